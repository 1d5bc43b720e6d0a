"""Cost of parameters that replicas share (FSDP, ZeRO-3).

The cost consists of gathering, scattering and the copies around them. A layer's parameters are
gathered before its forward and before its backward, at the same time as the previous layer runs,
and copied to where the layer reads them. Its gradients are reduced and scattered once per
microbatch (torch's FSDP2: foreach_all_gather, foreach_reduce).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.job import Choice, Job
from lightning_ptdp.planner.shapes import LayerShape

__all__ = ["gathered_bytes", "sharding_time", "whole_bytes"]


def gathered_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of a layer's gathered parameters on one tensor-parallel rank."""
    experts = 0 if layer.experts is None else layer.experts.local(choice.layout)
    count = layer.parameters.on(choice.layout.tensor_parallel_size) + experts
    return count * (1 if job.software.float8 else job.precision.compute)


def whole_bytes(job: Job, choice: Choice, layer: LayerShape) -> float:
    """Return the bytes of the layers that are whole at a time.

    They are the parameters of the current layer and of the next, and gradients to scatter.
    """
    return 3 * gathered_bytes(job, choice, layer) if job.software.shards != "none" else 0.0


def sharding_time(
    job: Job, choice: Choice, layer: LayerShape, forward: float, backward: float
) -> tuple[float, float]:
    """Return the additional seconds of a layer's forward and backward.

    Args:
        job: Links, precision and software.
        choice: Layout.
        layer: The layer with the parameters.
        forward: Seconds of the previous layer's forward, which hides the gathering.
        backward: Seconds of the previous layer's backward, which hides gathering and scattering.
    """
    group = group_link(choice.layout, job.cluster, "replica_sum")
    if job.software.shards == "none" or group.size == 1:
        return 0.0, 0.0
    again = 0
    if job.software.shards == "modules":
        group, again = replace(group, link=group.hop), int(choice.recompute == "full")
    nbytes = gathered_bytes(job, choice, layer)
    gather = group.all_gather(nbytes)
    scatter = group.all_gather(
        nbytes * job.gradient / (1 if job.software.float8 else job.precision.compute)
    )
    hides = job.software.hides_gradients and job.overlaps
    copied = 2 * nbytes / job.device.stream
    back = (1 + again) * gather + scatter
    return copied + max(0.0, gather - hides * forward), (1 + again) * copied + max(
        0.0, back - hides * backward
    )
