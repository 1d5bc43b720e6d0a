"""A loss that computes a part of the logits at a time trains as one that has them all, in every
layout that holds the head."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import AdamWConfig, BertConfig, GPTConfig, LitBert, LitGPT
from lightning_ptdp.tensor_parallel import linear_cross_entropy
from tests.letters import P, T
from tests.parity import make_trainer
from tests.pool import Pool

pytestmark = pytest.mark.thorough

SIZES: dict[str, Any] = {
    "vocabulary_size": 61,
    "sequence_length": 8,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "t2 sp p2": (4, {T: 2, P: 2, "sequence_parallel": True, "num_microbatches": 2}),
    "d2 in shards": (2, {"num_microbatches": 2, "shard_optimizer": True}),
    "p2 zero bubble": (2, {P: 2, "num_microbatches": 2, "schedule": "zb_h1"}),
}


def _sample(index: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (9,), generator=torch.Generator().manual_seed(index))
    labels = ids[1:].where(torch.arange(8) > index % 3, torch.tensor(-100))
    return {"input_ids": ids[:-1], "labels": labels, "next_sentence_label": ids[0] % 2}


def _fit(
    rank: int, kind: str, world_size: int, layout: dict[str, Any], chunk_mb: float
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-4, warmup_steps=2)
    module: Any = (
        LitGPT(GPTConfig.gpt2(**SIZES), optimizer, loss_chunk_mb=chunk_mb)
        if kind == "gpt"
        else LitBert(BertConfig.original(**SIZES, dropout=0.0), optimizer, loss_chunk_mb=chunk_mb)
    )
    trainer = make_trainer(
        PTDPStrategy(**layout),
        world_size,
        max_steps=3,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
    )
    data: Any = [_sample(index) for index in range(24)]
    replicas = world_size // (layout.get(T, 1) * layout.get(P, 1))
    sampler: Any = DistributedSampler(
        data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
    )
    loader = DataLoader(data, batch_size=8 // replicas, sampler=sampler)
    # A head that is called has given up to be computed in parts.
    called = (
        contextlib.nullcontext()
        if chunk_mb > 1
        else patch(f"{linear_cross_entropy.__module__}.local_logits", None)
    )
    with called:
        trainer.fit(module, loader)
    return {
        "loss": float(trainer.callback_metrics["train_loss"]),
        "final": trainer.strategy.gather_state_dict(),
    }


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    return cache(lambda kind: pool.run(_fit, world_size=1, args=(kind, 1, {}, 1e9))[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_parts_of_the_logits_train_as_all_of_them(
    kind: str, layout: str, pool: Pool, expected: Any
) -> None:
    size, options = LAYOUTS[layout]
    for found in pool.run(_fit, world_size=size, args=(kind, size, options, 1e-4)):
        if "d2" not in layout:  # a replica logs its own
            assert found["loss"] == pytest.approx(expected(kind)["loss"], rel=1e-5)
        for name, value in expected(kind)["final"].items():
            torch.testing.assert_close(
                found["final"][name],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, n=name: f"{n}: {text}",
            )
