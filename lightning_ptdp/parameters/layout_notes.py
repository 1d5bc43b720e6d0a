"""Notes for users about the layout of a model over the ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator

from lightning_ptdp.parameters.placement import Placement

__all__ = ["layout_notes"]

_MUCH, _SHOWN, _INDEX = 1 / 8, 4, re.compile(r"\.\d+\.")


def layout_notes(
    *,
    differing: Collection[str],
    everywhere: Collection[str],
    placements: dict[str, Placement],
    padded: Collection[str],
    size: int,
) -> Iterator[str]:
    """Yield notes on a layout.

    Args:
        differing: Names of tensors that were built with different values on different ranks.
        everywhere: Names of the modules that every stage keeps.
        placements: Placements of this rank's parameters, by name.
        padded: Names of the parameters that are padded to a multiple of t.
        size: t.
    """
    if differing:
        shown = ", ".join([*differing][:3]) + (", ..." if len(differing) > 3 else "")
        yield (
            f"{len(differing)} tensors ({shown}) had different initial values on different "
            "ranks. The values of rank 0 were broadcast"
        )
    for name, placement in placements.items():
        rows, full = placement.local_shape[0] * size if name in padded else 0, placement.full_shape
        if rows and rows > full[0]:
            yield (
                f"'{name}': the vocabulary of {full[0]} is not divisible by "
                f"tensor_parallel_size={size}, so it is padded to {rows} rows"
            )
    for name in everywhere:
        yield (
            f"'{name}' is never called, and only its parameters are used, so every pipeline "
            "stage keeps a copy"
        )
    if size > 1:
        yield from _whole_note(placements, size)


def _whole_note(placements: dict[str, Placement], size: int) -> Iterator[str]:
    """Yield a note if tensor parallelism leaves many of the layers' parameters unsplit.

    An adapter around a projection, for example, leaves its attention unsplit."""
    matrices = [
        (_INDEX.sub(".*.", name), math.prod(held.full_shape), "tensor" in held.sharded)
        for name, held in placements.items()
        if len(held.full_shape) > 1 and _INDEX.search(name)
    ]
    total = sum(numel for _, numel, _ in matrices)
    whole = sum(numel for _, numel, is_split in matrices if not is_split)
    if whole > _MUCH * total:
        names = list(dict.fromkeys(name for name, _, is_split in matrices if not is_split))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield (
            f"tensor_parallel_size={size} leaves {whole / total:.0%} of the elements of the "
            "layers' matrices replicated, and every rank computes with all of them: "
            f"{', '.join(names[:_SHOWN])}{more}. Split them with "
            "PTDPStrategy(plan=ParallelPlan(tensor={...}))"
        )
