"""Numbers of labels: one warning if they differ, and float16 gradients scaled as in a single
process."""

import warnings
from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.engine.rank_agreement import describe_uneven, is_uneven, label_spread
from lightning_ptdp.strategy import PTDPStrategy
from tests.letters import M, P
from tests.parity import Training, fit, make_trainer

pytestmark = pytest.mark.thorough

VOCABULARY = 8


class LitLabels(L.LightningModule):
    def __init__(self, counts: bool, weight: float) -> None:
        super().__init__()
        self.embedding, self.counts = nn.Embedding(VOCABULARY, 8), counts
        self.weight = weight
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        )

    def training_step(self, batch, batch_idx):
        logits = self.layers(self.embedding(batch["tokens"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["answers"].flatten(), ignore_index=-100)
        count = (batch["answers"] != -100).sum() * self.weight
        return {"loss": loss, "num_tokens": count} if self.counts else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Labels(Training):
    """Two epochs of sequences with labels. ``uneven`` ignores some of them.

    ``weight`` is that of a label.
    """

    counts: bool = False
    weight: float = 1.0
    uneven: bool = True
    length: int = 8

    def make_module(self):
        return LitLabels(self.counts, self.weight)

    def make_data(self):
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(VOCABULARY, (16, self.length), generator=generator)
        answers = tokens.roll(1, 1)
        if self.uneven:
            for row, answer in enumerate(answers):
                answer[: row % 5] = -100
        return [
            {"tokens": row, "answers": answer} for row, answer in zip(tokens, answers, strict=True)
        ]

    def results(self, trainer, module):
        scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
        return {"scale": None if scaler is None else scaler.get_scale()}


def fit_and_listen(rank, training):
    """Train, and return the result with the warnings about labels."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = fit(rank, training)
    texts = [str(one.message) for one in told]
    return {**result, "told": [text for text in texts if "num_tokens" in text]}


LAYOUTS = {
    "one m2": (1, {M: 2}),
    "one m3": (1, {M: 3}),
    "p2": (2, {P: 2, M: 4}),
    "d2": (2, {}),
    "d2 m2": (2, {M: 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unequal_label_counts_warn_once(name, parity):
    ranks = parity.ranks(Labels().on(LAYOUTS[name]), fit_and_listen)
    told = [text for rank in ranks for text in rank["told"]]
    assert len(told) == 1
    assert told[0].startswith(
        "the microbatches or replicas of a batch have different numbers of labels"
    )


@pytest.mark.parametrize(
    "settings",
    [{"counts": True}, {"counts": True, "weight": 0.001}, {"uneven": False}],
    ids=["counted", "weighted", "even"],
)
@pytest.mark.parametrize("name", ["one m2", "p2", "d2"])
def test_counted_or_even_labels_match_single_process(name, settings, parity):
    ranks = parity.check(Labels(**settings), LAYOUTS[name], fit=fit_and_listen)
    assert not any(rank["told"] for rank in ranks)


class LitSometimes(LitLabels):
    """Counts the labels of some microbatches only."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output if (batch["answers"] == -100).any() else output["loss"]


def fit_sometimes(rank):
    data = Labels().make_data()
    trainer = make_trainer(PTDPStrategy(num_microbatches=4), max_steps=2)
    with pytest.raises(ValueError, match="'num_tokens' for some microbatches of a batch, but not"):
        trainer.fit(LitSometimes(True, 1.0), DataLoader(data, batch_size=4))


def test_labels_counted_in_some_microbatches_are_refused(pool):
    pool.run(fit_sometimes, world_size=1)


class LitCountsWhere(LitLabels):
    """Counts its labels on one replica, or in all batches but the first."""

    def __init__(self, replica: int | None) -> None:
        super().__init__(True, 1.0)
        self.replica = replica

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        counts = batch_idx > 0 if self.replica is None else self.global_rank == self.replica
        return output if counts else output["loss"]


def fit_counts_where(rank, replica, microbatches):
    data = Labels(uneven=False).make_data()
    trainer = make_trainer(PTDPStrategy(num_microbatches=microbatches), 2, max_steps=2)
    with pytest.raises(ValueError, match="'num_tokens' for some batches or replicas, but not for"):
        trainer.fit(LitCountsWhere(replica), DataLoader(data, batch_size=4))


@pytest.mark.parametrize("replica", [1, None])
@pytest.mark.parametrize("microbatches", [None, 2])
def test_labels_counted_by_some_replicas_or_batches_are_refused(microbatches, replica, pool):
    pool.run(fit_counts_where, world_size=2, args=(replica, microbatches))


class LitCountsLater(LitLabels):
    """Skips the sanity check."""

    def validation_step(self, batch, batch_idx):
        return None if self.trainer.sanity_checking else self.training_step(batch, batch_idx)


def fit_counts_later(rank):
    data = Labels(uneven=False).make_data()
    trainer = make_trainer(PTDPStrategy(), 2, max_steps=1, limit_val_batches=1)
    trainer.fit(LitCountsLater(True, 1.0), DataLoader(data, 4), DataLoader(data, 4))


def test_labels_may_be_counted_after_the_sanity_check(pool):
    pool.run(fit_counts_later, world_size=2)


def test_label_counts_are_compared_per_sample():
    labels = torch.ones(3, 4, dtype=torch.int64)
    cpu = torch.device("cpu")
    assert not is_uneven(*label_spread({"labels": labels}, (2, 1), device=cpu))
    labels[0, 0] = -100
    assert is_uneven(*label_spread({"labels": labels}, (2, 1), device=cpu))
    assert not is_uneven(*label_spread({"labels": labels}, (3,), device=cpu))
    several = {"label": torch.ones(3).long(), "masked": labels}
    assert is_uneven(*label_spread(several, (2, 1), device=cpu))
    assert "in 'masked'" in describe_uneven(several, 3)
    padded = [{"tokens": torch.ones(3, size).long(), "label": several["label"]} for size in (4, 6)]
    spreads = [label_spread(batch, (3,), device=cpu) for batch in padded]
    assert not is_uneven(*torch.stack(spreads).amax(0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_float16_steps_match_single_process(name, parity):
    """Check float16 training with 4096 tokens a batch.

    The product of the loss, the number of tokens and the loss scale exceeds the range of float16.
    """
    training = Labels(counts=True, length=512, precision="16-true")
    expected = parity.result(training)
    for found in parity.ranks(training.on(LAYOUTS[name])):
        assert found["scale"] == expected["scale"]
        torch.testing.assert_close(found["final"], expected["final"], rtol=2e-2, atol=2e-3)
