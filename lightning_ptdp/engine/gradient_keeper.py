"""The gradients of one rank from batch to batch: started, accumulated, summed, shown to the optimizer, judged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import BucketEntry, GradientBuckets, LooseGradients, SteppedParameters, global_norm
from lightning_ptdp.engine.arrivals import Arrivals
from lightning_ptdp.engine.gradient_checks import GradientChecks
from lightning_ptdp.engine.gradients import counted_gradients, make_gradients, make_stepped, needs_masters
from lightning_ptdp.mesh import ProcessMesh
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.pipeline.progress import Observers

__all__ = ["GradientKeeper"]


class GradientKeeper:
    """Gradients, what the optimizer steps on, and where the two are on their way.

    Args:
        module: The LightningModule, this rank's part.
        config: The strategy's options.
        mesh: This rank's place and groups.
        parallel: What was made of the module.
        observers: Are told of reductions.
        device: This rank's device.

    Attributes:
        stepped: What the optimizer steps on; None if that is the parameters.
        accumulates: The batches of now do not complete an optimizer step.
        losses: Of the last batch's microbatches, on the rank that has them.
    """

    def __init__(
        self,
        *,
        module: Any,
        config: PTDPConfig,
        mesh: ProcessMesh,
        parallel: ParallelModel,
        observers: Observers,
        device: torch.device,
    ) -> None:
        self._module, self._config, self._mesh, self._parallel = module, config, mesh, parallel
        self._observers, self._device = observers, device
        self._buckets: GradientBuckets | LooseGradients | None = None
        self.stepped: SteppedParameters | None = None
        self._arrivals: Arrivals | None = None
        self._checks: GradientChecks | None = None
        self.losses: Sequence[Tensor] = []
        self.accumulates = False
        self._clears, self._open = True, False
        self._left: dict[Tensor, Tensor] = {}

    def prepare(self, optimizer: Any, *, apart: bool, overlaps: bool = False) -> None:
        """Make the gradient buckets and give the optimizer what it steps on.

        Args:
            optimizer: Lightning's one.
            apart: Gradients have to be summed over ranks or kept from Lightning's sight; else autograd's own may do.
            overlaps: Let parameters of a sharded optimizer arrive while the next forward runs.
        """
        if not apart and not needs_masters(self._config, self._parallel) and self._config.check_finite is None:
            return
        self._optimizer, self._overlaps = optimizer, overlaps
        self._lay_out()

    def _lay_out(self) -> None:
        self._buckets = make_gradients(
            config=self._config, mesh=self._mesh, parallel=self._parallel, launched=self._observers.reducing
        )
        self.stepped = make_stepped(self._buckets, config=self._config, parallel=self._parallel)
        if self.stepped is not None:
            self.stepped.adopt(self._optimizer)
            self._arrivals = Arrivals(self._module, self.stepped, overlaps=self._overlaps and self.stepped.is_sharded)
        self._checks = GradientChecks(
            config=self._config, mesh=self._mesh, parallel=self._parallel, gradients=self._buckets, stepped=self.stepped
        )
        if self._config.check_finite is not None:
            self._observers.add(self._checks)

    def close(self) -> None:
        """Detach from the module."""
        if self._arrivals is not None:
            self._arrivals.close()
        for entry in self.stepped.entries if self.stepped is not None else ():
            entry.bucket_gradient = None  # whoever saves the optimizer after the fit needs the entry, and not the bucket
        if self._buckets is not None:
            self._buckets.close()
        if self._checks is not None:
            self._observers.remove(self._checks)
        self._buckets = self.stepped = self._arrivals = self._checks = None

    # ---- a batch ------------------------------------------------------------------------------------------------------

    def begin(self, *, clears: bool) -> None:
        """A batch begins: wait for the parameters that nothing in its forward will wait for.

        Args:
            clears: Lightning will clear all gradients between this forward and its backward; else it is seen by what is left in
                ``.grad`` by then.
        """
        self._clears = clears
        if self._arrivals is not None:
            self._arrivals.begin()

    def start(self) -> GradientBuckets | LooseGradients:
        """Gradients are about to be computed; where they go."""
        assert self._buckets is not None
        assert self._checks is not None
        resumes = self._open and not self._clears
        changed = self._checks.changed_trainable()
        if changed and (resumes or self.stepped is not None or needs_masters(self._config, self._parallel)):
            self._checks.refuse_change(changed[0], accumulating=resumes)
        if resumes:
            self._buckets.resume()
        else:
            # What nobody cleared is summed over the replicas already: it waits aside until the batch's gradients are too.
            left = {} if self._clears else _gradients(self._stepped_on())
            self._left = {value: gradient.clone() for value, gradient in left.items()}
            if changed:
                self.close()
                self._lay_out()
            self._buckets.zero()
            self._buckets.install()
        self._open = self.accumulates
        return self._buckets

    def settle(self, *, reduced: bool, counted: bool, scale: float | None) -> None:
        """A schedule has computed a batch's gradients: complete their sums, and put them out of Lightning's sight.

        Args:
            reduced: Reductions were launched while it ran.
            counted: The batch weighs its tokens, so that its gradients are still to be scaled.
            scale: Factor that does so; None: no token counted.
        """
        buckets = self._buckets
        assert buckets is not None
        if reduced:
            buckets.finish(scale)
        elif counted and self.accumulates:
            buckets.stash(scale or 0.0)
        else:
            if counted:
                buckets.unstash(scale or 0.0)
            if not self.accumulates:
                buckets.reduce_all()
                buckets.finish()
        buckets.park()
        for value, gradient in self._left.items():
            value.grad = gradient  # for Lightning to clear, or not

    @contextlib.contextmanager
    def reducing(self) -> Iterator[None]:
        """Around Lightning's own backward: sum gradients over the replicas while it runs."""
        if self._buckets is None:
            yield
            return
        self.start()
        if self.accumulates:
            yield
            return
        self._buckets.arm(0)
        yield
        self._buckets.reduce(0)
        self._buckets.finish()
        self._show()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Batches in this context do not complete an optimizer step."""
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    # ---- a step of the optimizer --------------------------------------------------------------------------------------

    def install(self) -> None:
        """Show the gradients that a schedule computed to Lightning and the optimizer."""
        assert self._buckets is not None
        self._left = _gradients(self._left)
        for value in self._left:
            value.grad = None
        self._buckets.install()
        if not self.accumulates:
            self._show()

    def check(self, optimizer: Any, *, scaled: bool = False) -> None:
        """The gradients of a batch are there; if they are those of a step, look at them (see ``GradientChecks.complete``)."""
        if self._checks is not None and not self.accumulates:
            self._checks.complete(optimizer, losses=self.losses, norm=None if scaled else self.norm)

    def norm(self, optimizer: Any = None) -> Tensor:
        """2-norm of the whole model's gradient, or of what ``optimizer`` steps on, each parameter counted once; collective."""
        mine = counted_gradients(self.stepped, parallel=self._parallel, optimizer=optimizer)
        group = self._mesh.world if self.stepped is not None and self.stepped.is_sharded else self._mesh.group("shards")
        return global_norm(mine, group=group, device=self._device)

    def _show(self) -> None:
        """Give the optimizer the gradients, which are complete, and what was left of those before."""
        if self.stepped is not None:
            self.stepped.install()
        for value, gradient in self._left.items():
            value.grad = gradient if value.grad is None else value.grad.add_(gradient)
        self._left = {}

    def _stepped_on(self) -> list[Tensor]:
        """What the optimizer steps on, whose ``.grad`` is there for everybody to see and to clear."""
        assert self._buckets is not None
        kept = self._buckets.entries if self.stepped is None else self.stepped.entries
        values = {entry.parameter if isinstance(entry, BucketEntry) else entry.value for entry in kept}
        return [p for group in self._optimizer.param_groups for p in group["params"] if p in values]

    def used(self) -> None:
        """The optimizer has stepped."""
        if self._arrivals is not None:
            self._arrivals.ended()

    def parameters_needed(self) -> None:
        """Somebody is about to read the parameters: wait until those of the last step are here."""
        if self.stepped is not None:
            self.stepped.wait()


def _gradients(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {tensor: tensor.grad for tensor in tensors if tensor.grad is not None}
