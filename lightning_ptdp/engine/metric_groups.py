"""torchmetrics objects under model parallelism.

Their states are summed over replicas only, and their values are those of the batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from lightning_ptdp.world.mesh import Group, ProcessMesh

if TYPE_CHECKING:
    from torchmetrics import Metric


def _never() -> bool:
    """Return False: a metric with a single replica has no other rank to sum with."""
    return False


def _metrics(module: nn.Module) -> Iterator[Metric]:
    from torchmetrics import Metric

    return (child for child in module.modules() if isinstance(child, Metric))


def scope_metrics(module: nn.Module, mesh: ProcessMesh) -> Callable[[], None]:
    """Make the module's metrics sum over the replicas instead of the world.

    The ranks of a replica hold equal states.

    Returns:
        A function that undoes it. It is needed because a metric that holds a process group can
        neither be copied nor pickled.
    """
    group = mesh.group("replica_sum")
    saved = [(m, m.process_group, m.distributed_available_fn) for m in _metrics(module)]
    for metric, own_group, _ in saved:
        if own_group is None:
            metric.process_group = group.handle
            if group.size == 1:
                metric.distributed_available_fn = _never

    def undo() -> None:
        for metric, own_group, available in saved:
            metric.process_group = own_group
            metric.distributed_available_fn = available

    return undo


class BatchMetrics:
    """Values over the whole batch of the metrics that a step called.

    Lightning logs these values with ``on_step=True``. A called metric returns the value of its
    inputs, which are a microbatch or a slice of one. A copy of the metric receives all inputs.

    Args:
        module: The LightningModule.
        context: Ranks that have other slices of the same batch.
    """

    def __init__(self, module: nn.Module, context: Group) -> None:
        # Keyed by identity: metrics compare and hash by their states.
        self._metrics = {id(metric): metric for metric in _metrics(module)}
        self._context = context
        self._copies: dict[int, Metric] = {}
        self._called: dict[int, None] = {}
        self._busy = False

    def __deepcopy__(self, memo: object) -> BatchMetrics:
        """Return self: it belongs to the metrics of the run, not to copies of them."""
        return self

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record metric calls during the step on one microbatch."""
        handles = [
            metric.register_forward_hook(self._forwarded, with_kwargs=True)
            for metric in self._metrics.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> None:
        """Set the values of the called metrics to those of the whole batch.

        Call it after all microbatches have run. It is collective over the context group.
        """
        called = self._called
        self._called = {}
        for key in called:
            self._metrics[key]._forward_cache = self._copies[key].compute()
            self._copies[key].reset()

    def _forwarded(
        self, metric: Metric, args: tuple[object, ...], kwargs: dict[str, object], _: object
    ) -> None:
        key = id(metric)
        if self._busy or key not in self._metrics:
            return
        self._busy = True
        try:
            if key not in self._copies:
                self._copies[key] = self._empty_copy(metric)
            self._called[key] = None
            self._copies[key].update(*args, **kwargs)
        finally:
            self._busy = False

    def _empty_copy(self, metric: Metric) -> Metric:
        # Process groups and values with a graph cannot be copied; states need not be.
        memo: dict[int, object] = {}
        for inner in _metrics(metric):
            for value in (inner.process_group, inner._forward_cache, inner._computed):
                memo[id(value)] = None
            memo |= {
                id(getattr(inner, name)): copy.deepcopy(default)
                for name, default in inner._defaults.items()
            }
        fresh = copy.deepcopy(metric, memo)
        for inner, original in zip(_metrics(fresh), _metrics(metric), strict=True):
            if metric.dist_sync_on_step:
                inner.process_group = original.process_group
                inner.distributed_available_fn = original.distributed_available_fn
            elif self._context.size > 1:
                inner.process_group = self._context.handle
            else:
                inner.distributed_available_fn = _never
        fresh.reset()
        return fresh
