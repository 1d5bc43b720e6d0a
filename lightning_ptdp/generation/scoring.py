"""Log-likelihoods of given tokens, computed by a language model in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from tqdm import tqdm

from lightning_ptdp.generation.decoders import language_model
from lightning_ptdp.generation.write import RunningModel, check_ids, running

_NOT_SCORED = -100


Row = tuple[Sequence[int], int]
"""Tokens, and the number of tokens at their end that are scored, which is smaller."""


@torch.no_grad()
def score(
    module: nn.Module, rows: Sequence[Row], *, batch_size: int = 8
) -> list[tuple[float, bool]]:
    """Return each row's log-likelihood, and True if all its scored tokens are the most likely.

    The result is the same in every layout. While a Trainer runs the module in a layout of ours, all
    ranks must call this with the same arguments, and every rank receives all results.

    Args:
        module: A LightningModule, or a model: token ids (b, s) -> logits (b, s, V).
        rows: The rows; long ones are computed first.
        batch_size: Number of rows in a forward.

    Raises:
        ValueError: A token is beyond the vocabulary, or the module is split and therefore needs a
            run of the Trainer.
    """
    model = language_model(module) or module
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    with running(module, (rows, batch_size)) as run:
        if not rows:
            return []
        check_ids(module, [tokens for tokens, _ in rows])
        results = [
            _score_batch(model, [rows[i] for i in order[start : start + batch_size]], run)
            for start in tqdm(
                range(0, len(rows), batch_size),
                desc="scoring",
                leave=False,
                disable=rank_zero_only.rank != 0 or None,  # None: only on a terminal
            )
        ]
    values = torch.empty(len(rows), 2)
    values[order] = torch.cat(results).view(-1, 2).cpu()
    return [(log_likelihood, bool(hit)) for log_likelihood, hit in values.tolist()]


def _score_batch(model: nn.Module, rows: Sequence[Row], run: RunningModel) -> Tensor:
    """Return log-likelihood and hit of each row, (2 b)."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    width += -width % run.multiple
    ids_bs = torch.zeros(len(rows), width, dtype=torch.int64)
    targets_bs = torch.full_like(ids_bs, _NOT_SCORED)
    for row, (tokens, scored) in enumerate(rows):
        # Padding is on the right, because a token does not depend on what follows it.
        end = len(tokens) - 1
        ids_bs[row, :end] = torch.tensor(tokens[:-1])
        targets_bs[row, end - scored : end] = torch.tensor(tokens[-scored:])
    ids_bs = ids_bs.to(run.device, non_blocking=True)
    targets_bs = targets_bs.to(run.device, non_blocking=True)

    def call(stage: int) -> Tensor:
        output: Any = model(ids_bs)
        logits_bsv: Tensor = getattr(output, "logits", output)
        # Logits that are split over the vocabulary are not gathered.
        losses = F.cross_entropy(
            logits_bsv.float().flatten(0, 1),
            targets_bs.flatten(),
            ignore_index=_NOT_SCORED,
            reduction="none",
        )
        hits_bs = (logits_bsv.argmax(-1) == targets_bs) | (targets_bs == _NOT_SCORED)
        scores_b = -losses.view_as(targets_bs).sum(-1)
        return torch.stack([scores_b, hits_bs.all(-1).float()], dim=-1).flatten()

    return run.forward(
        call,
        Tensor.detach,
        rows=2 * len(rows),
        key=("scoring", *ids_bs.shape),
        dtype=torch.float32,
    )
