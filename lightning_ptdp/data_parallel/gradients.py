"""The gradients of one rank from batch to batch: started, accumulated, summed, shown to the
optimizer."""

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
from lightning_ptdp.data_parallel.optimizer_parameters import Stepped, SteppedParameters
from lightning_ptdp.data_parallel.parameter_gather import Arrivals
from lightning_ptdp.data_parallel.unbucketed_gradients import LooseGradients
from lightning_ptdp.parameters.records import Records
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["Gradients"]


class Gradients:
    """Gradients, what the optimizer steps on, and where the two are on their way.

    Of a batch: ``begin``, ``start``, then ``reduce`` around Lightning's backward, or ``finish``
    behind a schedule's and ``install``.

    Args:
        module: The LightningModule, this rank's part.
        config: The strategy's options.
        mesh: This rank's place and groups.
        records: Of its parameters.
        launched: Is told of every reduction that starts: its chunk and what waits for it.
        device: This rank's device.

    Attributes:
        stepped: What the optimizer steps on; None if that is the parameters.
        accumulates: The batches of now do not complete an optimizer step.
        reduces: The batch that was started is summed over the replicas while its backward runs.
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
        self._kept: GradientBuckets | LooseGradients | None = None
        self.stepped: SteppedParameters | None = None
        self._arrivals: Arrivals | None = None
        self._trainable: set[nn.Parameter] = set()
        self._values = [Stepped(parameter, parameter) for parameter in records]
        self.accumulates = self.reduces = False
        self._clears, self._open = True, False
        self._left: dict[Tensor, Tensor] = {}
        self._view: GradientView | None = None
        self._compared = False

    def prepare(self, optimizer: Any, *, apart: bool, overlaps: bool = False) -> bool:
        """Lay out the gradients and give the optimizer what it steps on; returns whether that is
        needed.

        Args:
            optimizer: Lightning's one.
            apart: Gradients have to be summed over ranks or kept from Lightning's sight; else
                autograd's own may do.
            overlaps: Let parameters of a sharded optimizer arrive while the next forward runs.
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
            self._arrivals = Arrivals(
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
            # whoever saves the optimizer after the fit needs the entry, and not the bucket
            entry.bucket_gradient = None
        if self._kept is not None:
            self._kept.close()
        self._kept = self.stepped = self._arrivals = None
        self._values = [Stepped(parameter, parameter) for parameter in self._records]

    # ---- a batch ---------------------------------------------------------------------------------

    def begin(self, *, clears: bool) -> None:
        """A batch begins: wait for the parameters that nothing in its forward will wait for.

        Args:
            clears: Lightning will clear all gradients between this forward and its backward; else
                it is seen by what is left in ``.grad`` by then.
        """
        self._clears = clears
        if self._arrivals is not None:
            self._arrivals.begin()

    def start(self) -> GradientBuckets | None:
        """Gradients are about to be computed; who is told when they are complete, if anybody has to
        be.

        Raises:
            ValueError: ``requires_grad`` of a parameter has changed, and nothing can follow that;
                names the parameter and what works.
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
            # What nobody cleared is summed over the replicas already: it waits aside until the
            # batch's gradients are too.
            left = {} if self._clears else _gradients(self._stepped_on())
            self._left = {value: gradient.clone() for value, gradient in left.items()}
            if changed:
                self.close()
                self._lay_out()
            self._kept.zero()
            self._kept.install()
        self._open = self.accumulates
        # Batches that weigh their tokens differently are scaled one by one, so their gradients
        # cannot be reduced while they grow.
        self.reduces = not self.accumulates and not self._kept.has_stash
        return self._kept if isinstance(self._kept, GradientBuckets) else None

    def finish(self, *, counted: bool, scale: float | None) -> None:
        """A schedule has computed a batch's gradients: complete their sums, and put them out of
        Lightning's sight.

        Args:
            counted: The batch weighs its tokens, so that its gradients are still to be scaled.
            scale: Factor that does so; None: no token counted.
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
        """Around Lightning's own backward: sum gradients over the replicas while it runs."""
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
        """Batches in this context do not complete an optimizer step."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    # ---- a step of the optimizer -----------------------------------------------------------------

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
        """2-norm of the whole model's gradient, or of what ``optimizer`` steps on, each parameter
        counted once; collective."""
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
        """Scale ``gradients``, whose 2-norm over all ranks is ``norm``, to ``limit`` if that is
        less."""
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
        """Return the norm of what a user has chosen.

        Raises:
            PartialModelError: Tied parameters are chosen on some stages only, where the rank that
                counts them may not be among them.
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
        """Give the optimizer the gradients, which are complete, and what was left of those
        before."""
        if self.stepped is not None:
            self.stepped.install()
        for value, gradient in self._left.items():
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        self._left = {}

    def _stepped_on(self) -> list[Tensor]:
        """Return the tensors on which the optimizer steps; their ``.grad`` may be read and cleared
        by users."""
        values = {entry.value for entry in self._values if entry.parameter in self._trainable}
        return [p for group in self._optimizer.param_groups for p in group["params"] if p in values]

    # ---- what others look at ---------------------------------------------------------------------

    def local(self) -> Iterator[Tensor]:
        """Return this rank's part of the gradients, in few tensors."""
        return iter(()) if self._kept is None else self._kept.local()

    def named(self) -> Iterator[tuple[int, str, Tensor]]:
        """(order, name, value) of the gradients that the optimizer sees."""
        for entry in self._values:
            if entry.value.grad is not None:
                record = self._records[entry.parameter]
                yield record.order, record.name, entry.value.grad

    def unused(self) -> list[str]:
        """Names of the parameters whose gradient no backward has added to, tied ones left out:
        another stage may have used those."""
        return (
            []
            if self._kept is None
            else sorted(self._records[parameter].name for parameter in self._kept.unused())
        )

    def used(self) -> None:
        """The optimizer has stepped."""
        if self._arrivals is not None:
            self._arrivals.ended()

    def parameters_needed(self) -> None:
        """Somebody is about to read the parameters: wait until those of the last step are here."""
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
