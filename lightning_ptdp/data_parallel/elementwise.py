"""Whether an optimizer can step on pieces of a matrix."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["check_elementwise"]

_STEPS, _SIDE = 3, 4


def check_elementwise(optimizer: Optimizer, *, device: torch.device) -> None:
    """Try it: step a small matrix, and its two flattened halves, and compare.

    This asks every optimizer the same question, whoever wrote it. Those that look at rows, columns or norms of a whole matrix give
    another answer, or refuse flat tensors.

    Raises:
        ValueError: It is not elementwise; names it and the reason.
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


def _step(optimizer: Optimizer, group: dict[str, object], *, halves: bool, device: torch.device) -> Tensor:
    """The matrix after a few steps of an optimizer like this one, with this group's hyperparameters."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(_SIDE, _SIDE, generator=generator).to(device) for _ in range(2))
    pieces = [nn.Parameter(piece.clone()) for piece in (start.flatten().chunk(2) if halves else [start])]
    probe = object.__new__(type(optimizer))
    # Its own attributes, but not a step that a scheduler has bound to the original, and nothing that the steps would change there.
    vars(probe).update({key: value for key, value in vars(optimizer).items() if key != "step"})
    probe.state = defaultdict(dict)
    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    probe.param_groups = [{**own, "params": pieces}]
    for turn in range(_STEPS):
        for piece, part in zip(pieces, (gradient.flatten().chunk(2) if halves else [gradient]), strict=True):
            piece.grad = part * (turn + 1)
        probe.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])
