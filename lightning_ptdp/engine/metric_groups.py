"""torchmetrics objects under model parallelism.

Their states are summed over replicas only, and their values are those of the batch. Context ranks
have the same samples: their states are summed too if a step updates a metric with the tokens of its
slice, but not if it does so with values of samples, nor if a hook updates it with complete outputs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.forward.surroundings import BatchPart
from lightning_ptdp.forward.token_mixing import has_tokens
from lightning_ptdp.world.mesh import Group, ProcessMesh

if TYPE_CHECKING:
    from torchmetrics import Metric


_OF_SAMPLES = "_is_of_samples"
"""Attribute of a metric, which pipeline stages share as they share its state."""


def _never() -> bool:
    """Return False: a metric with a single replica has no other rank to sum with."""
    return False


def _always() -> bool:
    """Return True: the other ranks of the metric's group have other slices."""
    return True


def _metrics(module: nn.Module) -> Iterator[Metric]:
    from torchmetrics import Metric

    return (child for child in module.modules() if isinstance(child, Metric))


def _collected(module: nn.Module) -> dict[int, list[Metric]]:
    """Return the members of the collection of each metric, by the metric's identity."""
    from torchmetrics import MetricCollection

    collections = [
        [*_metrics(child)] for child in module.modules() if isinstance(child, MetricCollection)
    ]
    return {id(metric): members for members in collections for metric in members}


def scope_metrics(
    module: nn.Module, mesh: ProcessMesh, is_of_samples: Callable[[tuple[object, ...]], bool]
) -> Callable[[], None]:
    """Make the module's metrics sum over the replicas instead of the world.

    Args:
        module: The LightningModule, this rank's part.
        mesh: This rank's groups.
        is_of_samples: Returns True if all ranks of a replica update a metric with the same values.

    A metric gets its process group only when it sums, because a group cannot be copied, and
    MetricTracker copies metrics.

    Returns:
        A function that undoes it.
    """
    group = mesh.group("replica_sum")
    saved = [
        (m, m.process_group, _own(m.distributed_available_fn), m.update) for m in _metrics(module)
    ]
    peers = _collected(module)
    for metric, own_group, available, update in saved:
        if own_group is not None:
            continue
        if group.size == 1:
            metric.distributed_available_fn = _never
            continue
        scope = _Scope(
            metric=metric,
            peers=peers.get(id(metric), [metric]),
            groups={True: mesh.group("replicas"), False: group},
            available=available,
            own_update=update,
            is_of_samples=is_of_samples,
        )
        vars(metric)[_OF_SAMPLES] = False
        metric.distributed_available_fn = scope.is_available
        if mesh.group("context").size > 1:
            vars(metric)["update"] = scope.update

    def undo() -> None:
        for metric, own_group, available, update in saved:
            metric.process_group = own_group
            metric.distributed_available_fn = available
            vars(metric)["update"] = update
            vars(metric).pop(_OF_SAMPLES, None)

    return undo


def _own(available: Callable[[], bool]) -> Callable[[], bool]:
    """Return the ``distributed_available_fn`` of a metric that may be a copy of a scoped one."""
    scope = getattr(available, "__self__", None)
    return scope.available if isinstance(scope, _Scope) else available


@dataclass(frozen=True, eq=False, kw_only=True)
class _Scope:
    """Choice of the ranks that sum a metric's states, by the values of its updates.

    Attributes:
        metric: The metric.
        peers: It, or all metrics of its collection, which share states.
        groups: Groups of ranks that sum the states: one for values of whole samples (True), one
            for values of tokens (False).
        available: The metric's ``distributed_available_fn``.
        own_update: Its ``update``.
        is_of_samples: As in ``scope_metrics``.
    """

    metric: Metric
    peers: Sequence[Metric]
    groups: Mapping[bool, Group]
    available: Callable[[], bool]
    own_update: Callable[..., None]
    is_of_samples: Callable[[tuple[object, ...]], bool]

    def __deepcopy__(self, memo: object) -> _Scope:
        """Return itself: process groups cannot be copied."""
        return self

    def update(self, *args: object, **kwargs: object) -> None:
        """Update the metric.

        Raises:
            ContextParallelError: Earlier updates were with values of the other kind.
        """
        of_samples = self.is_of_samples((args, kwargs))
        if (
            any(peer.update_count for peer in self.peers)
            and vars(self.metric)[_OF_SAMPLES] != of_samples
        ):
            raise ContextParallelError(
                f"{type(self.metric).__name__} is updated with tokens of a slice and with values "
                "of whole samples, which context ranks sum differently. Use one metric for each"
            )
        for peer in self.peers:
            vars(peer)[_OF_SAMPLES] = of_samples
        self.own_update(*args, **kwargs)

    def is_available(self) -> bool:
        """Choose the ranks that sum the states, and return True if there are several.

        torchmetrics calls it before each sum.
        """
        group = self.groups[vars(self.metric)[_OF_SAMPLES]]
        self.metric.process_group = group.handle
        return group.size > 1 and self.available()


class BatchMetrics:
    """Values over the full batch of the metrics that a step called.

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
        self._part: BatchPart | None = None
        self._copies: dict[int, Metric] = {}
        self._called: dict[int, None] = {}
        self._busy = False

    def has_all(self, module: nn.Module) -> bool:
        """Return True if ``module`` has the same metrics as before."""
        return [id(metric) for metric in _metrics(module)] == [*self._metrics]

    def __deepcopy__(self, memo: object) -> BatchMetrics:
        """Return self: it belongs to the metrics of the run, not to copies of them."""
        return self

    @contextlib.contextmanager
    def watching(self, part: BatchPart | None = None) -> Iterator[None]:
        """Record metric calls during the step on one microbatch, or on ``part`` of it."""
        self._part = part
        handles = [
            metric.register_forward_hook(self._forwarded, with_kwargs=True)
            for metric in self._metrics.values()
        ]
        try:
            yield
        finally:
            self._part = None
            for handle in handles:
                handle.remove()

    def is_of_samples(self, values: object) -> bool:
        """Return True if a metric gets values of whole samples.

        This is the case outside of steps, and for tensors with one row per sample. All other values
        in a step belong to a slice.
        """
        part = self._part
        tensors = [tensor for tensor in iterate_tensors(values) if tensor.dim()]
        if part is None or not tensors:
            return part is None
        tokens = part.length // part.group.size
        return all(t.size(0) == part.samples and not has_tokens(t, tokens) for t in tensors)

    def settle(self) -> None:
        """Set the values of the called metrics to those of the full batch.

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
                of_samples = self.is_of_samples((args, kwargs))
                self._copies[key] = self._empty_copy(metric, of_samples=of_samples)
            self._called[key] = None
            self._copies[key].update(*args, **kwargs)
        finally:
            self._busy = False

    def _empty_copy(self, metric: Metric, *, of_samples: bool) -> Metric:
        # Process groups and values with a graph cannot be copied; states need not be.
        memo: dict[int, object] = {}
        for inner in _metrics(metric):
            held = inner.process_group, inner.distributed_available_fn
            for value in (*held, inner._forward_cache, inner._computed):
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
            elif self._context.size > 1 and not of_samples:
                inner.process_group = self._context.handle
                inner.distributed_available_fn = _always
            else:
                inner.distributed_available_fn = _never
        fresh.reset()
        return fresh
