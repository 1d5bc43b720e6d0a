"""torchmetrics objects under model parallelism: states are summed over replicas only, and copied from the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.engine.report import MetricState
from lightning_ptdp.mesh import ProcessMesh

__all__ = ["load_metric_states", "scope_metrics"]


def _never() -> bool:
    """A metric with a single replica has nobody to sum with."""
    return False


def _metrics(module: Any) -> Iterator[Any]:
    from torchmetrics import Metric

    return (child for child in module.modules() if isinstance(child, Metric))


def scope_metrics(module: Any, mesh: ProcessMesh) -> Callable[[], None]:
    """Let the module's metrics sum over the replicas instead of the world, where a replica's ranks hold equal states.

    Returns:
        A function that undoes it: a metric that holds a process group can neither be copied nor pickled.
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
            metric.process_group, metric.distributed_available_fn = own_group, available

    return undo


def load_metric_states(module: Any, states: Iterable[MetricState], device: torch.device) -> None:
    """Give this stage's metrics the states that the last stage's reached."""
    for state in states:
        metric = module.get_submodule(state.path)
        for key, value in state.state.items():
            setattr(metric, key, [v.to(device) for v in value] if isinstance(value, list) else _moved(value, device))
        metric._update_count, metric._computed = state.update_count, None


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
