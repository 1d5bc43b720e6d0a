"""Gradients of one rank from batch to batch, until the optimizer's step.

They are started, accumulated, summed, and shown to the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.gradient_entries import lay_out, make_stepped, needs_masters
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.data_parallel.gradient_view import GradientView
from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters, OptimizerTensor
from lightning_ptdp.data_parallel.parameter_gather import ParameterGather
from lightning_ptdp.data_parallel.unbucketed_gradients import UnbucketedGradients
from lightning_ptdp.parameters.records import Records
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["Gradients"]


class Gradients:
    """Gradients of one rank and the tensors on which the optimizer steps.

    The calls for a batch are ``begin``, then ``reduce`` around Lightning's backward. With a
    schedule they are ``begin`` and ``start``, then ``finish`` and ``install`` after its backward.

    Args:
        module: The LightningModule, this rank's part.
        config: The strategy's options.
        mesh: This rank's position and groups.
        records: Records of its parameters.
        launched: Called for every reduction that starts, with its chunk and its ``Pending``.
        device: This rank's device.

    Attributes:
        stepped: Tensors on which the optimizer steps; None if these are the parameters.
        accumulates: True if the current batches do not complete an optimizer step.
        reduces: True if the started batch is summed over the replicas during its backward.
    """

    def __init__(
        self,
        *,
        module: Any,
        config: PTDPConfig,
        mesh: ProcessMesh,
        records: Records,
        launched: Callable[[int | None, Any], None],
        device: torch.device,
    ) -> None:
        self._module, self._config, self._mesh, self._records = module, config, mesh, records
        self._launched, self._device = launched, device
        self._kept: GradientBuckets | UnbucketedGradients | None = None
        self.stepped: OptimizerParameters | None = None
        self._arrivals: ParameterGather | None = None
        self._trainable: set[nn.Parameter] = set()
        self._values = [OptimizerTensor(parameter, parameter) for parameter in records]
        self.accumulates = self.reduces = False
        self._clears, self._open = True, False
        self._left: dict[Tensor, Tensor] = {}
        self._view: GradientView | None = None
        self._compared = False

    def prepare(self, optimizer: Any, *, apart: bool, overlaps: bool = False) -> bool:
        """Lay out the gradients and the optimizer's tensors.

        Args:
            optimizer: Lightning's optimizer.
            apart: True if gradients must be summed over ranks or hidden from Lightning. Otherwise
                autograd's own may suffice.
            overlaps: Gather the parameters of a sharded optimizer during the next forward.

        Returns:
            False if autograd's own gradients suffice.
        """
        if (
            not apart
            and not needs_masters(self._config, self._records)
            and self._config.check_finite is None
        ):
            return False
        self._optimizer, self._overlaps = optimizer, overlaps
        self._lay_out()
        return True

    def _lay_out(self) -> None:
        self._kept = lay_out(
            config=self._config, mesh=self._mesh, records=self._records, launched=self._launched
        )
        self.stepped = make_stepped(self._kept, config=self._config, records=self._records)
        if self.stepped is not None:
            self.stepped.adopt(self._optimizer)
            self._arrivals = ParameterGather(
                self._module, self.stepped, overlaps=self._overlaps and self.stepped.is_sharded
            )
            self._values = self.stepped.entries
        self._trainable = {parameter for parameter in self._records if parameter.requires_grad}
        self._view = None

    def close(self) -> None:
        """Detach from the module."""
        if self._arrivals is not None:
            self._arrivals.close()
        for entry in self.stepped.entries if self.stepped is not None else ():
            # Saving the optimizer after the fit needs the entry, but not the bucket.
            entry.bucket_gradient = None
        if self._kept is not None:
            self._kept.close()
        self._kept = self.stepped = self._arrivals = None
        self._values = [OptimizerTensor(parameter, parameter) for parameter in self._records]

    # ---- batches ---------------------------------------------------------------------------------

    def begin(self, *, clears: bool) -> None:
        """Begin a batch: wait for the parameters that nothing in its forward waits for.

        Args:
            clears: True if Lightning clears all gradients between this forward and its backward.
                Otherwise the gradients left in ``.grad`` show whether it did.
        """
        self._clears = clears
        if self._arrivals is not None:
            self._arrivals.begin()

    def start(self) -> GradientBuckets | None:
        """Prepare for a batch's gradients and return the buckets to arm, if any.

        The caller arms the buckets, so that their reductions start during the backward.

        Raises:
            ValueError: ``requires_grad`` of a parameter has changed in a way that is not supported.
                The message names the parameter and what works.
        """
        assert self._kept is not None
        resumes = self._open and not self._clears
        changed = [
            parameter
            for parameter in self._records
            if parameter.requires_grad != (parameter in self._trainable)
        ]
        if changed and (
            resumes or self.stepped is not None or needs_masters(self._config, self._records)
        ):
            _refuse_change(
                self._records[changed[0]].name, changed[0].requires_grad, accumulating=resumes
            )
        if resumes:
            self._kept.resume()
        else:
            # Gradients that were not cleared are already summed over the replicas. They are set
            # aside until the batch's gradients are summed too.
            left = {} if self._clears else _gradients(self._stepped_on())
            self._left = {value: gradient.clone() for value, gradient in left.items()}
            if changed:
                self.close()
                self._lay_out()
            self._kept.zero()
            self._kept.install()
        self._open = self.accumulates
        # Batches that weigh their tokens differently are scaled one by one, so their gradients
        # cannot be reduced while they accumulate.
        self.reduces = not self.accumulates and not self._kept.has_stash
        return self._kept if isinstance(self._kept, GradientBuckets) else None

    def finish(self, *, counted: bool, scale: float | None) -> None:
        """Complete the sums of a batch's gradients after a schedule, and hide them.

        Lightning must not see the gradients before ``install``.

        Args:
            counted: True if the batch weighs its tokens, so that its gradients still need scaling.
            scale: The scaling factor; None: no token was counted.
        """
        kept = self._kept
        assert kept is not None
        if self.reduces:
            kept.finish(scale)
        elif counted and self.accumulates:
            kept.stash(scale or 0.0)
        else:
            if counted:
                kept.unstash(scale or 0.0)
            if not self.accumulates:
                kept.finish()
        kept.park()
        for value, gradient in self._left.items():
            value.grad = gradient  # for Lightning to clear, or not

    @contextlib.contextmanager
    def reduce(self) -> Iterator[None]:
        """Sum gradients over the replicas during Lightning's own backward in this context."""
        if self._kept is None:
            yield
            return
        buckets = self.start()
        if self.accumulates:
            yield
            return
        if buckets is not None:
            buckets.arm(0)
        yield
        self._kept.finish()
        self._show()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Declare that batches in this context do not complete an optimizer step."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    # ---- optimizer step --------------------------------------------------------------------------

    def install(self) -> None:
        """Show the gradients that a schedule computed to Lightning and the optimizer."""
        assert self._kept is not None
        self._left = _gradients(self._left)
        for value in self._left:
            value.grad = None
        self._kept.install()
        if not self.accumulates:
            self._show()

    def norm(self, optimizer: Any = None) -> Tensor:
        """Return the 2-norm of the whole model's gradient, each parameter counted once.

        With ``optimizer``, only the tensors on which it steps are included. Collective.
        """
        return self._norm(
            None
            if optimizer is None
            else {value for group in optimizer.param_groups for value in group["params"]},
            2.0,
        )

    def _norm(self, chosen: Collection[Tensor] | None, order: float) -> Tensor:
        sharded = self.stepped is not None and self.stepped.is_sharded
        counted = [
            part
            for entry in self._values
            if (record := self._records[entry.parameter]).counted
            and (entry.counts if sharded else record.leads)
            if entry.value.grad is not None
            if chosen is None or entry.value in chosen
            for part in entry.placed(record.sharding).counted(entry.value.grad)
        ]
        group = self._mesh.world if sharded else self._mesh.group("shards")
        with self._computing():
            return global_norm(self._joined(counted), group=group, device=self._device, order=order)

    def clip(self, gradients: Iterable[Tensor], limit: float, *, norm: Tensor) -> None:
        """Scale ``gradients`` down to ``limit`` if ``norm``, their 2-norm, is larger.

        ``norm`` is over all ranks.
        """
        with self._computing():
            torch.nn.utils.clip_grads_with_norm_(map(_holder, self._joined(gradients)), limit, norm)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of hooks that may look at the gradients and change them."""
        if self.accumulates:
            return contextlib.nullcontext()
        if self._view is None and self._is_divided:
            self._view = self._make_view()
        return contextlib.nullcontext() if self._view is None else self._view.shown()

    @property
    def _is_divided(self) -> bool:
        layout = self._mesh.layout
        return layout.divides_model or self.stepped is not None

    def _make_view(self) -> GradientView:
        everything = self._mesh.group("pipeline").size > 1 or (
            self.stepped is not None and self.stepped.is_sharded
        )
        places = {entry.value: self._records[entry.parameter] for entry in self._values}
        return GradientView(
            stepped={
                entry.parameter: entry.value
                for entry in self._values
                if entry.value is not entry.parameter
            },
            names={value: record.name for value, record in places.items()},
            partial={
                value
                for value, record in places.items()
                if everything or record.sharding.local_shape != record.sharding.full_shape
            },
            norm=self._chosen_norm,
        )

    def _chosen_norm(self, chosen: Collection[Tensor], order: float) -> Tensor:
        """Return the norm of the tensors that a user has chosen.

        Raises:
            PartialModelError: Tied parameters are chosen on some stages only, possibly without the
                rank that counts them.
        """
        pipeline = self._mesh.group("pipeline")
        if pipeline.size > 1 and not self._compared:
            self._compared = True
            tied = [
                record
                for e in self._values
                if e.value in chosen and (record := self._records[e.parameter]).tied
            ]
            holders = [record.sums[-1][1] for record in tied]
            missing = torch.tensor(
                sum(1 - group.size if group.rank == 0 else 1 for group in holders),
                device=self._device,
            )
            dist.all_reduce(missing, group=pipeline.handle)
            if missing:
                raise PartialModelError(
                    "a norm is computed of some parameters, among them tied ones that this choice "
                    "finds on some pipeline stages only. "
                    "Choose among self.parameters(), or use pipeline_parallel_size=1"
                )
        return self._norm(chosen, order)

    def _computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._view is None else self._view.paused()

    def _joined(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        return list(gradients) if self._kept is None else self._kept.joined(gradients)

    def _show(self) -> None:
        """Give the complete gradients to the optimizer, plus the gradients set aside."""
        if self.stepped is not None:
            self.stepped.install()
        for value, gradient in self._left.items():
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        self._left = {}

    def _stepped_on(self) -> list[Tensor]:
        """Return the tensors on which the optimizer steps.

        Users may read and clear their ``.grad``.
        """
        values = {entry.value for entry in self._values if entry.parameter in self._trainable}
        return [p for group in self._optimizer.param_groups for p in group["params"] if p in values]

    # ---- queries ---------------------------------------------------------------------------------

    def local(self) -> Iterator[Tensor]:
        """Return this rank's part of the gradients, in few tensors."""
        return iter(()) if self._kept is None else self._kept.local()

    def named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (order, name, value) of the gradients that the optimizer sees."""
        for entry in self._values:
            if entry.value.grad is not None:
                record = self._records[entry.parameter]
                yield record.order, record.name, entry.value.grad

    def unused(self) -> list[str]:
        """Return the names of parameters to which no backward has given a gradient.

        Tied parameters are left out, because another stage may have used them.
        """
        return (
            []
            if self._kept is None
            else sorted(self._records[parameter].name for parameter in self._kept.unused())
        )

    def used(self) -> None:
        """Start to gather the parameters, after the optimizer has stepped."""
        if self._arrivals is not None:
            self._arrivals.ended()

    def parameters_needed(self) -> None:
        """Wait for the parameters of the last step, before they are read."""
        if self.stepped is not None:
            self.stepped.wait()


def _holder(gradient: Tensor) -> Tensor:
    """Return a tensor whose ``.grad`` is the gradient."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder


def _gradients(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {tensor: tensor.grad for tensor in tensors if tensor.grad is not None}


def _refuse_change(name: str, trains: bool, *, accumulating: bool) -> NoReturn:
    if accumulating:
        raise ValueError(
            f"requires_grad of '{name}' has become {trains} since the batches began whose "
            "gradients are accumulated: change it when an "
            "optimizer step is complete"
        )
    raise ValueError(
        f"requires_grad of '{name}' has become {trains} since set-up, but the optimizer steps on "
        "shards or float32 copies of what could "
        "be trained then; set it before fit, call fit again after it, or use "
        "shard_optimizer=False and precision='32-true' or "
        "'bf16-mixed' (or master_weights=False)"
    )
