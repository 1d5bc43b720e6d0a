"""Counts of the labels in a batch that are not ignored.

They give the expected number of tokens, and show if equally weighted parts of a batch have
different numbers of labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, named_tensors

__all__ = ["describe_uneven", "expected_tokens", "is_uneven", "label_spread", "power_above"]

_IGNORED = -100
_PARTS = 1_000_000


def expected_tokens(batch: Nested, samples: int) -> int:
    """Return the expected number of tokens in a batch of this form.

    It is the number of elements of the batch's largest tensor of integers.
    """
    sizes = [
        tensor.numel()
        for _, tensor in named_tensors(batch)
        if not tensor.is_floating_point() and tensor.dim() <= 2
    ]
    return max([samples, *sizes])


def power_above(number: float) -> float:
    """Return the least power of two that is not below ``number``; division by it is exact."""
    return 2.0 ** math.ceil(math.log2(max(number, 1)))


def label_spread(batch: Nested, sizes: Sequence[int], *, device: torch.device) -> Tensor:
    """Return the most labels per sample in a microbatch, and the negative of the least.

    Ignored labels do not count. The values are in millionths, (2) int64 on ``device``.

    Args:
        batch: The whole batch.
        sizes: Numbers of samples in its microbatches.
        device: Device of the result.
    """
    found = _labels(batch, sum(sizes)) if sizes else None
    if found is None:
        return torch.zeros(2, dtype=torch.int64, device=device)
    counts = (
        (found[1] != _IGNORED).flatten(1).sum(1)
        if found[1].dim() > 1
        else (found[1] != _IGNORED).long()
    )
    if len(set(sizes)) == 1:
        shares = counts.view(len(sizes), -1).sum(1) * _PARTS // sizes[0]
    else:
        shares = torch.stack(
            [part.sum() * _PARTS // len(part) for part in counts.split(list(sizes))]
        )
    return torch.stack([shares.amax(), -shares.amin()]).to(device, non_blocking=True)


def is_uneven(most: float, negative_least: float) -> bool:
    """Return True if ``label_spread``, or its maximum over ranks, shows unequal numbers."""
    return most + negative_least > 1  # tolerates rounding


def describe_uneven(batch: Nested, samples: int) -> str:
    """Return the warning about the labels of ``batch``."""
    name = (_labels(batch, samples) or ("", None))[0]
    shown = f"'{name}'" if name else "the labels"
    return (
        "the microbatches or replicas of a batch have different numbers of labels other than "
        f"{_IGNORED} in {shown}, and training_step returns no 'num_tokens'. The mean of each "
        "microbatch has the same weight, so the loss is not the mean over all labels as in "
        f"one process. Return {{'loss': loss, 'num_tokens': (labels != {_IGNORED}).sum()}} "
        "from training_step"
    )


def _labels(batch: Nested, samples: int) -> tuple[str, Tensor] | None:
    """Return the tensor that seems to hold labels: by its name, else the last one of integers."""
    found = [
        (name, tensor)
        for name, tensor in named_tensors(batch)
        if tensor.dtype in (torch.int64, torch.int32)
        and tensor.dim()
        and tensor.size(0) == samples
        and tensor.numel()
    ]
    named = [pair for pair in found if "label" in pair[0].lower() or "target" in pair[0].lower()]
    return next(iter(named), found[-1] if found else None)
