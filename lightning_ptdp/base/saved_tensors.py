"""Checks of tensors that a graph saves; autograd itself checks none of those that hooks pack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def checked(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the tensor and raises an error if it was written to."""
    version = tensor._version

    def unpacked() -> Tensor:
        if tensor._version != version:
            raise written_refusal(tensor.shape)
        return tensor

    return unpacked


def written_refusal(shape: torch.Size | tuple[int, ...]) -> RuntimeError:
    """Return the error for a write to a saved tensor, as without hooks."""
    return RuntimeError(
        f"the backward needs a tensor of shape {tuple(shape)} that was changed in place after its "
        "use. Write x = x * y in place of x *= y, for example"
    )
