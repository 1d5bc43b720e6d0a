"""Labels that count: unequal numbers are told once, and float16 sees gradients of the size of one
process's."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptdp.engine.microbatches import is_uneven, label_spread
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer
from tests.pool import Pool

pytestmark = pytest.mark.thorough

VOCABULARY = 8


class LitLabels(L.LightningModule):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.embedding, self.counts = nn.Embedding(VOCABULARY, 8), counts
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.layers(self.embedding(batch["tokens"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["answers"].flatten(), ignore_index=-100)
        return (
            {"loss": loss, "num_tokens": (batch["answers"] != -100).sum()} if self.counts else loss
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, size: int, layout: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    settings = {"counts": False, "uneven": True, "length": 8, "precision": "32-true", **settings}
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (16, settings["length"]), generator=generator)
    answers = tokens.roll(1, 1)
    if settings["uneven"]:
        for row, answer in enumerate(answers):
            answer[: row % 5] = -100
    rows = [{"tokens": row, "answers": answer} for row, answer in zip(tokens, answers, strict=True)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = make_trainer(
            PTDPStrategy(**layout), size, precision=settings["precision"], max_epochs=2
        )
        module = LitLabels(settings["counts"])
        trainer.fit(module, DataLoader(rows, batch_size=8 // trainer.strategy.layout.num_replicas))
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    return {
        "told": [str(one.message) for one in told if "num_tokens" in str(one.message)],
        "scale": None if scaler is None else scaler.get_scale(),
        "final": trainer.strategy.gather_state_dict(),
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one m2": (1, {"num_microbatches": 2}),
    "one m3": (1, {"num_microbatches": 3}),
    "p2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "d2": (2, {}),
    "d2 m2": (2, {"num_microbatches": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unequal_numbers_of_labels_are_told_once_with_their_key(name: str, pool: Pool) -> None:
    size, layout = LAYOUTS[name]
    told = [
        text
        for rank in pool.run(fit, world_size=size, args=(size, layout, {}))
        for text in rank["told"]
    ]
    assert len(told) == 1
    assert told[0].startswith(
        "the microbatches or replicas of a batch have different numbers of labels"
    )


@pytest.mark.parametrize("settings", [{"counts": True}, {"uneven": False}], ids=["counted", "even"])
@pytest.mark.parametrize("name", ["one m2", "p2", "d2"])
def test_nothing_is_told_of_a_step_that_counts_or_of_equal_numbers(
    name: str, settings: dict[str, Any], pool: Pool
) -> None:
    size, layout = LAYOUTS[name]
    assert not any(
        rank["told"] for rank in pool.run(fit, world_size=size, args=(size, layout, settings))
    )


def test_the_shares_are_of_a_sample() -> None:
    labels = torch.ones(3, 4, dtype=torch.int64)
    cpu = torch.device("cpu")
    assert not is_uneven(*label_spread({"labels": labels}, (2, 1), device=cpu))
    labels[0, 0] = -100
    assert is_uneven(*label_spread({"labels": labels}, (2, 1), device=cpu))
    assert not is_uneven(*label_spread({"labels": labels}, (3,), device=cpu))


@pytest.mark.parametrize("name", LAYOUTS)
def test_float16_takes_the_steps_of_one_process(name: str, pool: Pool) -> None:
    """Check float16 training with 4096 tokens a batch.

    The product of the loss, the number of tokens and the loss scale exceeds the range of float16.
    """
    settings = {"counts": True, "length": 512, "precision": "16-true"}
    size, layout = LAYOUTS[name]
    (expected,) = pool.run(fit, world_size=1, args=(1, {}, settings))
    for found in pool.run(fit, world_size=size, args=(size, layout, settings)):
        assert found["scale"] == expected["scale"]
        for key, value in expected["final"].items():
            torch.testing.assert_close(
                found["final"][key],
                value,
                rtol=2e-2,
                atol=2e-3,
                msg=lambda text, k=key: f"{k}: {text}",
            )
