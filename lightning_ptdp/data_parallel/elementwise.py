"""Trial of an optimizer on pieces of a matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["check_elementwise"]

_STEPS, _SIDE = 3, 4


def check_elementwise(optimizer: Optimizer, *, device: torch.device) -> None:
    """Step a small matrix and its two flattened halves, and compare the results.

    Optimizers that use rows, columns or norms of a whole matrix give another result, or refuse flat tensors.

    Raises:
        ValueError: It is not elementwise.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        try:
            whole = _step(optimizer, group, halves=False, device=device)
            halves = _step(optimizer, group, halves=True, device=device)
        except Exception as error:
            raise ValueError(f"{_REFUSED.format(name=name)}, and it fails on one: {error}. {_MEND}") from error
        if not torch.allclose(whole, halves, rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"{_REFUSED.format(name=name)}, and its update of one differs from that of the whole matrix by up to "
                f"{(whole - halves).abs().max():.1e}. {_MEND}"
            )


_REFUSED = "shard_optimizer=True cuts matrices into flat pieces, but {name} does not work element by element"
_MEND = "Use an elementwise optimizer (AdamW, Adam, SGD, RMSprop, ...), or shard_optimizer=False"


def _step(optimizer: Optimizer, group: Mapping[str, Any], *, halves: bool, device: torch.device) -> Tensor:
    """Return a matrix after a few steps of an optimizer like this one, with this group's hyperparameters."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(_SIDE, _SIDE, generator=generator).to(device) for _ in range(2))
    pieces = [nn.Parameter(piece.clone()) for piece in (start.flatten().chunk(2) if halves else [start])]
    probe = object.__new__(type(optimizer))
    # Its own attributes, but not a step that a scheduler has bound to the original, and nothing that the steps would change there.
    vars(probe).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    probe.state = defaultdict(dict, {piece: _constructed_state(optimizer, group, piece) for piece in pieces})
    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    probe.param_groups = [{**own, "params": pieces}]
    for turn in range(_STEPS):
        for piece, part in zip(pieces, (gradient.flatten().chunk(2) if halves else [gradient]), strict=True):
            piece.grad = part * (turn + 1)
        probe.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])


def _constructed_state(optimizer: Optimizer, group: Mapping[str, Any], piece: nn.Parameter) -> dict[str, object]:
    """Return the state that the optimizer's constructor makes for a parameter, in the shape of ``piece``.

    Adagrad of torch 2.11 has one; most optimizers make theirs at the first step.
    """
    parameter = next((each for each in group["params"] if optimizer.state.get(each) and each.numel()), None)
    if parameter is None:
        return {}
    state: dict[str, object] = {}
    for key, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor):
            has_shape = value.shape == parameter.shape and value.dim() > 0
            value = value.flatten()[0].expand_as(piece).clone() if has_shape else value.clone()
        state[key] = value
    return state
