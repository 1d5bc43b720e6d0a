"""Seconds for memory that a process has just been given, on a CPU.

The system hands it out page by page, each cleared when it is first touched. The C library keeps small blocks for their next use, and gives
large ones back: those above 32 MiB (glibc's DEFAULT_MMAP_THRESHOLD_MAX), and where there are several processes those above 1 MiB
(``_memory.py``). So every large tensor that an operation makes costs that much besides. Tensors that are made::

    forward     each product's input (a norm's output, an activation's) and its result; the sum with the stream behind a row layer
    backward    as many gradients; the attention's three, once more where they are put together
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ptdp._memory import LARGE_BLOCK
from lightning_ptdp.models.size import layer_matrices
from lightning_ptdp.planner.job import Choice, Job

__all__ = ["fresh_seconds", "layer_tensors"]

_KEPT = 32 * 2**20


def fresh_seconds(job: Job, sizes: Iterable[float]) -> float:
    """Of tensors of ``sizes`` bytes."""
    measured = job.device.measured
    if measured is None or not measured.fresh_s:
        return 0.0
    least = LARGE_BLOCK if job.world_size > 1 else _KEPT
    return measured.fresh_s * sum(size for size in sizes if size >= least)


def layer_tensors(job: Job, choice: Choice, *, mixture: bool = False) -> tuple[list[float], list[float]]:
    """Bytes of the tensors that a layer's forward makes, and its backward; of a mixture's those of the experts are small ones."""
    t, tokens = choice.layout.tensor_parallel_size, choice.tokens(job)
    (qkv, h), (_, q), (up, _), (_, f) = layer_matrices(job.model, t, mixture=mixture)
    alike = h / t if choice.layout.sequence_parallel else h
    biased = [alike, alike] if job.model.bias and t > 1 else []
    # Norms, sums with the stream; products; their inputs between them.
    forward = [alike, alike, alike, alike, *biased, qkv, q, h, up, f, h]
    backward = [alike, alike, alike, alike, qkv, qkv, q, h, up, f, h]
    if t == 1:
        weights = [outputs * inputs * job.precision.weight for outputs, inputs in layer_matrices(job.model, 1, mixture=mixture)]
    else:
        weights = []  # added where the sum is (matrix_product.py)
    width = job.precision.compute
    return [tokens * size * width for size in forward], [*(tokens * size * width for size in backward), *weights]
