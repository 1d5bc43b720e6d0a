"""Chunked cross-entropy trains like the full loss in several layouts."""

from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch

from lightning_ptdp.models import AdamWConfig, BertConfig, GPTConfig, LitBert, LitGPT
from lightning_ptdp.tensor_parallel import linear_cross_entropy
from tests.letters import SP, M, P, S, T, Z
from tests.parity import Training, fit

pytestmark = pytest.mark.thorough

SIZES = {
    "vocabulary_size": 61,
    "sequence_length": 8,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
}
LAYOUTS = {
    "t2 sp p2": (4, {T: 2, P: 2, SP: True, M: 2}),
    "d2 in shards": (2, {M: 2, Z: "optimizer"}),
    "p2 zero bubble": (2, {P: 2, M: 2, S: "zb_h1"}),
}


@dataclass(frozen=True, kw_only=True)
class Chunks(Training):
    """Training with a loss that computes ``chunk_mb`` of logits at a time."""

    kind: str
    chunk_mb: float = 1e9
    steps: int = 2
    clip: float | None = 0.5

    always_clips: ClassVar[bool] = False

    def make_module(self):
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-4, warmup_steps=2)
        if self.kind == "gpt":
            return LitGPT(GPTConfig.gpt2(**SIZES), optimizer, loss_chunk_mb=self.chunk_mb)
        config = BertConfig.original(**SIZES, dropout=0.0)
        return LitBert(config, optimizer, loss_chunk_mb=self.chunk_mb)

    def make_data(self):
        return [_sample(index) for index in range(24)]


def _sample(index):
    ids = torch.randint(61, (9,), generator=torch.Generator().manual_seed(index))
    labels = ids[1:].where(torch.arange(8) > index % 3, torch.tensor(-100))
    return {"input_ids": ids[:-1], "labels": labels, "next_sentence_label": ids[0] % 2}


def fit_in_chunks(rank, training):
    """Train, and fail if all local logits are computed at once."""
    with patch(f"{linear_cross_entropy.__module__}.local_logits", None):
        return fit(rank, training)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_chunked_loss_trains_like_full_loss(kind, layout, parity):
    expected = parity.result(Chunks(kind=kind))
    training = Chunks(kind=kind, chunk_mb=1e-4)
    parity.check(training, LAYOUTS[layout], expected=expected, fit=fit_in_chunks)
