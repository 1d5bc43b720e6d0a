"""Tensors that the forward of a block keeps as attributes of its modules (``self.loss = ...``), which other stages would not find.

Where one is read of a placeholder it is an error (shell.py). But a sum over ``model.modules()`` does not even see the blocks of other
stages; so one number with a gradient, which can only be a loss, is refused, and whatever else has a gradient is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_ptdp.pipeline.crossing import StageError, tensors_in

__all__ = ["check_left", "kept_tensors", "newly_kept"]

_OWN = frozenset({"_parameters", "_buffers", "_modules"})

Kept = dict[tuple[str, ...], tuple[Tensor, ...]]


def kept_tensors(block: nn.Module) -> Kept:
    """The tensors in attributes of its modules that are neither parameters nor buffers, by their path."""
    return {path: tensors for path, value in _attributes(block) if (tensors := tuple(t for _, t in tensors_in(value)))}


def newly_kept(block: nn.Module, before: Kept) -> Kept:
    """What ``kept_tensors(block)`` has now and had not ``before``."""
    known = {path: {id(tensor) for tensor in tensors} for path, tensors in before.items()}
    new = {path: tuple(t for t in tensors if id(t) not in known.get(path, ())) for path, tensors in kept_tensors(block).items()}
    return {path: tensors for path, tensors in new.items() if tensors}


def check_left(name: str, left: Kept) -> None:
    """Check what block ``name`` has kept in its forward.

    Raises:
        StageError: A loss.
    """
    for path, tensors in left.items():
        if any(tensor.requires_grad and tensor.numel() == 1 for tensor in tensors):
            raise StageError(
                f"'{name}.{'.'.join(path)}' is a number with a gradient that a block keeps in its forward, as a loss to be summed over the "
                "blocks; under a pipeline a stage finds only those of its own blocks. Let the blocks return it (x, loss = block(x), with "
                "ParallelPlan(collects=True)), carry a sum through them (x, total = block(x, total)), or use pipeline_parallel_size=1"
            )
        if any(tensor.requires_grad for tensor in tensors):
            warnings.warn(
                f"'{name}.{'.'.join(path)}' is kept by a block in its forward; under a pipeline a stage finds only what its own blocks "
                "keep: what is used behind the blocks must be returned by them (ParallelPlan(collects=True))",
                stacklevel=2,
            )


def _attributes(block: nn.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    for suffix, module in block.named_modules():
        parents = tuple(suffix.split(".")) if suffix else ()
        yield from (((*parents, key), value) for key, value in vars(module).items() if key not in _OWN)
