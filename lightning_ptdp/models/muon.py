"""Muon for the matrices of the blocks and AdamW for the other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptdp.models.optimizer_closure import closure_loss

__all__ = ["MuonWithAdamW"]


class MuonWithAdamW(Optimizer):
    """torch's Muon on the groups with ``"muon": True``, and torch's AdamW on the others.

    Muon orthogonalizes the momentum of each matrix. Its update is scaled to the size of AdamW's, so
    that both take the same learning rate and weight decay (arXiv 2502.16982, section 2.2).

    A sharded optimizer gives each matrix to one replica as a whole, and tensor parallelism gathers
    it for the step. Expert parallelism of matrices and ``shard="parameters"`` are refused.

    Args:
        groups: Parameter groups, with the options of the optimizer that updates them.
        lr: Learning rate.
        betas, eps, weight_decay: Those of AdamW; Muon takes the weight decay too.
        momentum: Decay of Muon's momentum.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        matrix, vector = nn.Parameter(torch.empty(1, 1)), nn.Parameter(torch.empty(1))
        self._muon = torch.optim.Muon(
            [matrix],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(
            [vector], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        complete = [
            {"muon": False} | (self._muon if group.get("muon") else self._adamw).defaults | group
            for group in groups
        ]
        self._muon.param_groups, self._adamw.param_groups = [], []
        super().__init__(complete, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return the closure's loss."""
        loss = closure_loss(closure)
        inner: Any
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [group for group in self.param_groups if group["muon"] is is_muon]
            inner.state = self.state
            inner.step()
        return loss
