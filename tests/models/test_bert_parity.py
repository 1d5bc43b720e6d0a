"""BERT has the loss, gradients, weights and metrics of a single process in every layout."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.utils.data import Dataset

from lightning_ptdp.models import AdamWConfig, BertConfig, LitBert
from tests.letters import SP, C, M, P, T, V
from tests.parity import Training, make_loader

pytestmark = pytest.mark.thorough

LAYOUTS = {
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
    """Samples of different lengths and numbers of predictions; the last one is padding."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(5)
        self.ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=draw)
        self.lengths = torch.randint(PREDICTIONS + 3, LENGTH + 1, (count,), generator=draw)
        self.predictions = torch.randint(1, PREDICTIONS + 1, (count,), generator=draw)
        self.orders = torch.randint(0, 2, (count,), generator=draw)
        self.predictions[-1], self.orders[-1] = 0, -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
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
    """LitBert with SGD and learning rate 1: a step subtracts the gradient of every weight."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """Training followed by an evaluation."""

    order: str = "post"
    steps: int = 2
    global_batch: int = BATCH
    clip: float | None = 0.5

    always_clips: ClassVar[bool] = False

    def make_module(self):
        optimizer = AdamWConfig(learning_rate=5e-3, eps=1e-4, warmup_steps=2)
        return LitBert(CONFIGS[self.order], optimizer)

    def make_data(self):
        return Pairs(48)

    def results(self, trainer, module):
        loader = make_loader(Pairs(20), trainer, self.global_batch)
        (evaluated,) = trainer.validate(module, loader, verbose=False)
        return {"evaluated": evaluated}


@dataclass(frozen=True, kw_only=True)
class Step(Run):
    """Single step of SGD."""

    steps: int = 1
    clip: float | None = None

    def make_module(self):
        return LitPlain(CONFIGS[self.order], AdamWConfig())

    def results(self, trainer, module):
        return {}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, "post") for name in LAYOUTS),
        *((name, "pre") for name in ("t2sp", "p2v2")),
    ],
)
def test_training_and_metrics_equal_single_process(name, order, parity):
    run = Run(order=order)
    expected = parity.result(run)
    ranks = parity.check(run, LAYOUTS[name])
    for found in ranks:
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
    assert ranks[0]["logged"][-1].keys() == {"train_loss", "train_masked_loss", "train_order_loss"}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("t2", "post"),
        ("t2sp", "post"),
        ("c2", "pre"),
        ("p2v2", "post"),
        ("t2p2v2sp full", "pre"),
        ("d2", "post"),
    ],
)
def test_every_gradient_equals_single_process(name, order, parity):
    run = Step(order=order)
    expected, found = parity.result(run), parity.ranks(run.on(LAYOUTS[name]))[0]
    for key, start in expected["initial"].items():
        gradient = start - expected["final"][key]
        assert gradient.any(), f"{key} has no gradient"
        # The difference of two weights is exact to half a unit in the last place of the larger one.
        allowed = 1e-5 * gradient.abs().max() + 2e-7 * start.abs().max()
        assert (start - found["final"][key] - gradient).abs().max() < allowed, key
