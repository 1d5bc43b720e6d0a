"""Random numbers as a function of indices, without a stream or a state.

The hash is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied once per index, in int64 with wrap-around products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
# 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right logically; torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: Tensor, index: Tensor) -> Tensor:
    """Return a new key (broadcast shape, int64) from a key and an index."""
    z = (key ^ (index * _GAMMA)) + _GAMMA
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def uniform(key: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return numbers in [0, 1), float32, one for each combination of ``indices``.

    The indices are tensors that broadcast against each other and ``key``.
    """
    for index in indices:
        key = mix(key, index)
    return _shifted(key, 40).to(torch.float32) * 2.0**-24


def sample_keys(tensors: Iterable[Tensor], samples: int) -> Tensor:
    """Return a key (b) int64 of each sample's content.

    The key of a sample does not depend on its batch or its position in the batch.

    Args:
        tensors: Tensors of a batch; those with b entries along dimension 0 are used.
        samples: b.

    Raises:
        ValueError: No tensor has one row per sample.
    """
    keys: Tensor | None = None
    for number, tensor in enumerate(t for t in tensors if t.dim() and t.size(0) == samples):
        rows = _bits(tensor.detach()).reshape(samples, -1)
        positions = torch.arange(rows.size(1), device=rows.device)
        tensor_keys = mix(rows, positions + (number << 40)).sum(1)
        keys = tensor_keys if keys is None else mix(keys, tensor_keys)
    if keys is None:
        raise ValueError(
            "keyed_dropout=True identifies samples by their content, but the batch has no "
            f"tensor of {samples} samples. Use tensors with samples along dimension 0, or "
            "keyed_dropout=False"
        )
    return keys


def _bits(x: Tensor) -> Tensor:
    """Return the elements as int64 values that are equal if and only if the elements are."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.double().view(torch.int64) if x.is_floating_point() else x.to(torch.int64)
