"""Gradients of one rank from batch to batch, until the optimizer's step.

They are started, accumulated, summed, and given to the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel.gradient_store import GradientStore, make_store, needs_masters
from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters, is_cut_for_step
from lightning_ptdp.data_parallel.sharded_parameters import ShardedParameters
from lightning_ptdp.data_parallel.step_gradients import StepGradients, UnusedGradients
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.world.mesh import ProcessMesh


class Gradients:
    """Gradients of one rank and the tensors on which the optimizer steps.

    The call for a batch is ``reduce`` around Lightning's backward. With a schedule the calls are
    ``start``, then ``finish`` and ``set_grad`` after its backward.

    Args:
        module: The LightningModule, this rank's part.
        config: The strategy's options.
        mesh: This rank's position and groups.
        parameters: This rank's parameters.
        count: Number of the uncut model's parameters.
        launched: Called for every reduction that starts, with its chunk and its ``Pending``.
        device: This rank's device.
        shards: Sharded parameters; None: they are not sharded.

    Attributes:
        step: The gradients that the optimizer sees.
        stepped: Tensors on which the optimizer steps; None if these are the parameters.
        accumulates: True if the current batches do not complete an optimizer step.
        reduces: True if the started batch is summed over the replicas during its backward.
        clears: True if Lightning clears all gradients between the batch's forward and its backward.
            Otherwise the gradients left in ``.grad`` show whether it did.
    """

    def __init__(
        self,
        *,
        module: Any,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parameters: ManagedParameters,
        count: int,
        launched: Callable[[int | None, Any], None],
        device: torch.device,
        shards: ShardedParameters | None = None,
    ) -> None:
        self._flats = () if shards is None else shards.flats
        self._computing = contextlib.nullcontext if shards is None else shards.computing
        self._module = module
        self._config = config
        self._mesh = mesh
        self._parameters = parameters
        self._launched = launched
        self._store: GradientStore | None = None
        self.step = StepGradients(parameters, mesh=mesh, device=device)
        self.stepped: OptimizerParameters | None = None
        self._trainable: set[nn.Parameter] = set()
        self.accumulates = self.reduces = False
        self.clears = True
        self._open = False
        self._counts: bool | None = None  # whether the batches of the accumulation weigh tokens
        self._left: dict[Tensor, Tensor] = {}
        self._unused = UnusedGradients(parameters, count=count, mesh=mesh, device=device)

    def prepare(self, optimizer: Any, *, apart: bool, defers: bool = False) -> bool:
        """Lay out the gradients and the optimizer's tensors.

        Args:
            optimizer: Lightning's optimizer.
            apart: True if gradients must be summed over ranks or kept from Lightning. Otherwise
                autograd's own may suffice.
            defers: Let offloaded optimizer steps run on the CPU during the next forward.

        Returns:
            False if autograd's own gradients suffice.
        """
        if (
            not apart
            and not needs_masters(self._config, self._parameters)
            and self._config.check_finite is None
        ):
            return False
        self._optimizer = optimizer
        self._defers = defers
        self._lay_out()
        return True

    def _lay_out(self) -> None:
        self._store = make_store(
            config=self._config,
            mesh=self._mesh,
            parameters=self._parameters,
            launched=self._launched,
            flats=self._flats,
        )
        masters = needs_masters(self._config, self._parameters)
        tensor = self._mesh.group("tensor")
        cuts = any(is_cut_for_step(managed, tensor) for managed in self._store.parameters)
        if masters or cuts or self._store.scatters:
            self.stepped = OptimizerParameters(self._store, config=self._config, tensor=tensor)
            self.stepped.adopt(self._optimizer, defers=self._defers)
            self.stepped.attach(self._module)
        self._trainable = {parameter for parameter in self._parameters if parameter.requires_grad}
        self.step.use(self._store, steps_on_copies=self.stepped is not None)

    def close(self) -> None:
        """Detach from the module."""
        if self.stepped is not None:
            self.stepped.close()
        if self._store is not None:
            self._store.close()
        self._store = self.stepped = None
        self.step.use(None)

    # ---- batches ---------------------------------------------------------------------------------

    def start(self) -> GradientStore:
        """Prepare for a batch's gradients and return their store.

        The caller tells it which backwards are the last, so that reductions start during them.

        Raises:
            ValueError: ``requires_grad`` of a parameter has changed in a way that is not supported.
                The message names the parameter and what works.
        """
        assert self._store is not None
        keep = self._keeps
        changed = self._changed()
        if changed and (
            keep or self.stepped is not None or needs_masters(self._config, self._parameters)
        ):
            _refuse_change(
                self._parameters[changed[0]].name, changed[0].requires_grad, accumulating=keep
            )
        if not keep:
            self._counts = None
            # Gradients that were not cleared are already summed over the replicas. They are set
            # aside until the batch's gradients are summed too.
            uncleared = {} if self.clears else _gradients(self._stepped_on())
            self._left = {value: gradient.clone() for value, gradient in uncleared.items()}
            self._unset_copies()
            if changed:
                self.close()
                self._lay_out()
        self._store.begin(keep=keep)
        self._open = self.accumulates
        # Batches that weigh their tokens differently are scaled one by one, so their gradients
        # cannot be reduced while they accumulate.
        self.reduces = not self.accumulates and not self._store.has_weighed
        return self._store

    @property
    def _keeps(self) -> bool:
        """Return True if the batch adds to the gradients of earlier ones."""
        return self._open and not self.clears

    def guard(self, *, keeps: bool | None = None) -> None:
        """Refuse backwards of the user's own if their gradients are kept.

        By default, these are kept as those of the batches before a step are.
        """
        if self._store is not None:
            self._store.refuses = self._keeps if keeps is None else keeps

    def _unset_copies(self) -> None:
        """Take the last gradients from the optimizer, so that a step cannot clear new ones.

        They are views of the buckets that are filled next. Those on the host are copies, which the
        deferred optimizer step still reads.
        """
        if self.stepped is None or self._config.offload_optimizer:
            return
        for parameter in self._trainable:
            managed = self._parameters[parameter]
            if managed.steps_on_copy and managed.stepped is not None:
                managed.stepped.grad = None

    def finish(self, *, counted: bool | None, scale: float | None) -> None:
        """Complete the sums of a batch's gradients after a schedule; leave ``.grad`` empty.

        Lightning must not see the gradients before ``set_grad``.

        Args:
            counted: True if the batch weighs its tokens, so that its gradients still need scaling.
                None: it was skipped and has no gradients.
            scale: The scaling factor; None: no token was counted.

        Raises:
            ValueError: The step has changed ``requires_grad`` of a parameter, or only some batches
                of an accumulation weigh their tokens.
        """
        store = self._store
        assert store is not None
        for parameter in self._changed():
            raise ValueError(
                f"requires_grad of '{self._parameters[parameter].name}' has become "
                f"{parameter.requires_grad} in training_step, which runs for each microbatch after "
                "the batch has begun. Change it in on_train_batch_start"
            )
        if counted is None:
            counted = store.has_weighed
        elif self._counts not in (None, counted):
            raise ValueError(
                "training_step returned num_tokens for some of the batches whose gradients are "
                "accumulated, so these cannot be weighed. Return it for all of them, or for none"
            )
        else:
            self._counts = counted
        if self.reduces:
            store.finish(scale)
        else:
            if counted:
                store.weigh(scale or 0.0, last=not self.accumulates)
            if not self.accumulates:
                store.finish()
        store.unset_grad()
        self.guard(keeps=not self.clears)
        for value, gradient in self._left.items():
            value.grad = gradient  # for Lightning to clear, or not

    @contextlib.contextmanager
    def reduce(self, *, overlaps: bool) -> Iterator[None]:
        """Sum gradients over the replicas during Lightning's own backward in this context.

        Without ``overlaps`` the sums begin after it, because it may be several backwards.
        """
        if self._store is None:
            yield
            return
        store = self.start()
        last = not self.accumulates
        if overlaps:
            store.expect(0, last=last)
        with self._computing():
            yield
        self.guard(keeps=True)
        if last:
            store.finish()
            self._give_sums()
        else:
            store.reduce(0, last=False)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Declare that batches in this context do not complete an optimizer step."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    # ---- optimizer step --------------------------------------------------------------------------

    def set_grad(self) -> None:
        """Give the gradients that a schedule computed to Lightning and the optimizer."""
        assert self._store is not None
        self._left = _gradients(self._left)
        for value in self._left:
            value.grad = None
        self._store.set_grad()
        if not self.accumulates:
            self._give_sums()

    def for_hooks(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of hooks that may look at the gradients and change them."""
        return contextlib.nullcontext() if self.accumulates else self.step.for_hooks()

    def defer(self) -> None:
        """Defer the following optimizer step to the next forward, if the optimizer allows it."""
        if self.stepped is not None:
            self.stepped.take()

    def start_parameter_gather(self) -> None:
        """Start to gather the parameters, after the optimizer has stepped."""
        self.guard(keeps=self._open)
        if self.stepped is not None:
            self.stepped.publish()

    @contextlib.contextmanager
    def rewritten(self) -> Iterator[None]:
        """Return a context in which other code changes the values that the optimizer steps on."""
        if self.stepped is not None:
            self.stepped.take_values()
        yield
        self.start_parameter_gather()

    def parameters_needed(self) -> None:
        """Wait for the parameters of the last step, before they are read."""
        if self.stepped is not None:
            self.stepped.wait()

    def _give_sums(self) -> None:
        """Give the complete gradients to the optimizer, plus the gradients set aside."""
        with self._computing():  # frees what a skipped backward has left
            pass
        if self.stepped is not None:
            self.stepped.set_grad()
        if self._store is not None:
            self._unused.remove(self._store)
        for value, gradient in self._left.items():
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        self._left = {}

    def _stepped_on(self) -> list[Tensor]:
        """Return the tensors on which the optimizer steps.

        Users may read and clear their ``.grad``.
        """
        values = {self._parameters[parameter].stepped for parameter in self._trainable}
        return [p for group in self._optimizer.param_groups for p in group["params"] if p in values]

    # ---- queries ---------------------------------------------------------------------------------

    def local(self) -> Iterable[Tensor]:
        """Return this rank's part of the gradients, in few tensors."""
        return () if self._store is None else self._store.local()

    def _changed(self) -> list[nn.Parameter]:
        """Return the parameters whose ``requires_grad`` differs from that at the batch's start."""
        return [
            parameter
            for parameter in self._parameters
            if parameter.requires_grad != (parameter in self._trainable)
        ]

    def unused(self) -> list[str]:
        """Return the names of parameters that this replica has not used since the last step.

        Tied parameters are left out, because another stage may have used them.
        """
        unused = () if self._store is None else self._store.unused()
        return sorted(managed.name for managed in unused if not managed.placement.tied)


def _gradients(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {tensor: tensor.grad for tensor in tensors if tensor.grad is not None}


def _refuse_change(name: str, trains: bool, *, accumulating: bool) -> NoReturn:
    if accumulating:
        raise ValueError(
            f"requires_grad of '{name}' has become {trains} between two batches whose "
            "gradients are accumulated. Change it after a complete optimizer step"
        )
    raise ValueError(
        f"requires_grad of '{name}' has become {trains} since set-up, but the optimizer steps "
        "on shards or float32 copies of the parameters that were trainable at set-up. Change "
        "it before fit or between two calls of fit, or use shard='none' and "
        "precision='32-true' or 'bf16-mixed' (or master_weights=False)"
    )
