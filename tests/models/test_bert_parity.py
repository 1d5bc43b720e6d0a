"""BERT in every layout: the loss, every gradient, the weights after several steps and the metrics
of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ptdp.models import AdamWConfig, BertConfig, LitBert
from lightning_ptdp.strategy import PTDPStrategy
from tests.letters import SP, C, M, P, T, V
from tests.models.fits import quiet_trainer
from tests.parity import Recorder
from tests.pool import Pool

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "d2": (2, {}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "t4": (4, {T: 4}),
    "p2": (2, {P: 2, M: 4}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "p2v2 zb_v selective": (2, {P: 2, V: 2, M: 4, "schedule": "zb_v", "recompute": "selective"}),
    "t2p2v2": (4, {T: 2, P: 2, V: 2, M: 4}),
    "t2p2v2sp full": (4, {T: 2, P: 2, V: 2, M: 4, SP: True, "recompute": "full"}),
    "c2": (2, {C: 2}),
    "t2c2p2sp": (8, {T: 2, C: 2, P: 2, M: 2, SP: True}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}
VOCABULARY, LENGTH, PREDICTIONS, BATCH = 61, 16, 4, 8
SIZES = {
    "vocabulary_size": VOCABULARY,
    "sequence_length": LENGTH,
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
}
CONFIGS = {
    "post": BertConfig.original(**SIZES, dropout=0.0, init_std=0.1),
    "pre": BertConfig.megatron(**SIZES, dropout=0.0, init_std=0.1),
}


class Pairs(Dataset):
    """Samples of different lengths and numbers of predictions; the last one is a row that only
    fills up."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=draw)
        self.lengths = torch.randint(PREDICTIONS + 3, LENGTH + 1, (count,), generator=draw)
        self.predictions = torch.randint(1, PREDICTIONS + 1, (count,), generator=draw)
        self.orders = torch.randint(0, 2, (count,), generator=draw)
        self.predictions[-1], self.orders[-1] = 0, -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length, count = int(self.lengths[index]), int(self.predictions[index])
        positions = torch.zeros(PREDICTIONS, dtype=torch.int64)
        positions[:count] = (
            torch.randperm(length - 2, generator=torch.Generator().manual_seed(index))[:count] + 1
        )
        labels = torch.full((LENGTH,), -100)
        labels[positions[:count]] = self.ids[index, positions[:count]]
        places = torch.arange(LENGTH)
        return {
            "input_ids": self.ids[index].where(
                (places < length) & (labels == -100), torch.tensor(4)
            ),
            "token_type_ids": ((places >= length // 2) & (places < length)).long(),
            "attention_mask": (places < length).long(),
            "labels": labels,
            "masked_positions": positions,
            "next_sentence_label": self.orders[index],
        }


class LitPlain(LitBert):
    """With plain gradient descent by the whole gradient: one step moves every weight by its
    gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(
    rank: int, order: str, world_size: int, layout: dict[str, Any], plain: bool
) -> dict[str, Any]:
    """Train, then evaluate; returns what can be compared."""
    pl.seed_everything(3, verbose=False)
    recorder = Recorder()
    optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-4, warmup_steps=2)
    module = (LitPlain if plain else LitBert)(CONFIGS[order], optimizer)
    replicas = world_size // (layout.get(T, 1) * layout.get(P, 1) * layout.get(C, 1))
    trainer = quiet_trainer(
        strategy=PTDPStrategy(**layout),
        devices=world_size,
        max_steps=1 if plain else 10,
        gradient_clip_val=None if plain else 0.5,
        num_sanity_val_steps=0,
        callbacks=[recorder],
    )
    loaders = []
    for samples in (48, 5 * replicas if plain else 20):
        data = Pairs(samples)
        sampler = DistributedSampler(
            data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False
        )
        loaders.append(DataLoader(data, batch_size=BATCH // replicas, sampler=sampler))
    trainer.fit(module, loaders[0])
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (evaluated,) = trainer.validate(module, loaders[1], verbose=False)
    return {
        "losses": recorder.losses,
        "initial": recorder.initial,
        "final": trainer.strategy.gather_state_dict(),
        "logged": logged,
        "evaluated": evaluated,
    }


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Any:
    @cache
    def run(order: str, plain: bool) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(order, 1, {}, plain))[0]

    return run


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, "post") for name in LAYOUTS),
        *((name, "pre") for name in ("t2sp", "p2v2", "d2t2p2")),
    ],
)
def test_training_and_metrics_equal_one_process(
    name: str, order: str, pool: Pool, one_process: Any
) -> None:
    world_size, layout = LAYOUTS[name]
    expected = one_process(order, False)
    ranks = pool.run(fit, world_size=world_size, args=(order, world_size, layout, False))
    for found in ranks:
        for key, value in expected["initial"].items():
            assert torch.equal(found["initial"][key], value), f"{key} starts differently"
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for key, value in expected["final"].items():
            assert (found["final"][key] - value).norm() < 1e-5 * value.norm(), key
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    assert ranks[0]["logged"].keys() == {"train_loss", "train_masked_loss", "train_order_loss"}
    if layout.get(P, 1) == world_size:  # else what is logged is of one replica, or one slice
        assert ranks[0]["logged"] == pytest.approx(expected["logged"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("t2", "post"),
        ("t2sp", "post"),
        ("c2", "pre"),
        ("p2v2", "post"),
        ("t2p2v2sp full", "pre"),
        ("d2t2p2", "post"),
    ],
)
def test_every_gradient_equals_one_process(
    name: str, order: str, pool: Pool, one_process: Any
) -> None:
    world_size, layout = LAYOUTS[name]
    expected = one_process(order, True)
    (found, *_) = pool.run(fit, world_size=world_size, args=(order, world_size, layout, True))
    for key, start in expected["initial"].items():
        gradient = start - expected["final"][key]
        assert gradient.any(), f"{key} gets no gradient"
        # The difference of two weights is exact to half a unit in the last place of the larger one.
        allowed = 1e-5 * gradient.abs().max() + 2e-7 * start.abs().max()
        assert (start - found["final"][key] - gradient).abs().max() < allowed, key
