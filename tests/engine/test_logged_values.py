"""Tests that logged, returned and counted values cover the whole batch, as in one process.

Labels may be distributed unevenly over microbatches, replicas and slices of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.huggingface.runs import make_model
from tests.letters import C, M, P
from tests.parity import Training, make_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "c2": (2, {C: 2}),
    "c2m2": (2, {C: 2, M: 2}),
    "p2c2": (4, {C: 2, P: 2, M: 2}),
    "d2c2": (4, {C: 2}),
    "m3": (1, {M: 3}),
    "d2": (2, {}),
    "p2": (2, {P: 2, M: 3}),
    "d2p2": (4, {P: 2, M: 2}),
}


class Seen(L.Callback):
    """Callback that records the outputs of every validation batch."""

    def __init__(self):
        self.outputs = []

    def on_validation_batch_end(self, trainer, module, outputs, *_):
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        self.outputs.append((float(outputs["loss"]), float(outputs.get("num_tokens", 0))))


@dataclass(frozen=True, kw_only=True)
class Logging(Training):
    """A training that logs values over the whole batch and all replicas.

    With ``answers`` only the last tokens of a sequence have labels, as in fine-tuning, so that half
    of the slices have none.
    """

    steps: int = 2
    global_batch: int = 4
    validate_every: int | None = 0
    answers: bool = False
    counts: bool = True
    hugging_face: bool = False

    smallest: ClassVar[float] = 1e-3
    synced: ClassVar[tuple[str, ...]] = tuple(
        f"{stage}_{value}{suffix}"
        for stage in ("train", "val")
        for value in ("loss", "sum", "most")
        for suffix in ("", "_step", "_epoch")
    )

    def make_module(self):
        return LitShifts(self) if self.hugging_face else LitEvaluated(self)

    def make_data(self):
        return Answers(8) if self.answers else PaddedTokens(8)

    def make_callbacks(self):
        return [Seen()]

    def results(self, trainer, module):
        (seen,) = (one.outputs for one in trainer.callbacks if isinstance(one, Seen))
        return {"outputs": seen}


class Answers(PaddedTokens):
    """Sequences with three labels each, all at the end."""

    def __getitem__(self, index):
        labels = self.tokens[index, 1:].clone()
        labels[:-3] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


class LitEvaluated(LitTiny):
    """A module for labels that are shifted in the data."""

    def __init__(self, training: Logging) -> None:
        super().__init__(Run(layers=2))
        self.counts = training.counts

    def token_losses(self, batch):
        return F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1),
            batch["labels"].flatten(),
            reduction="none",
        )

    def step(self, batch, name, **options):
        losses, counted = self.token_losses(batch), batch["labels"].flatten() != -100
        loss = losses.sum() / counted.sum()
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True, sync_dist=True, **options)
        self.log(f"{name}_sum", losses.sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log(f"{name}_most", losses.max(), on_epoch=True, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "num_tokens": counted.sum()} if self.counts else loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val", batch_size=len(batch["labels"]))


class LitShifts(LitEvaluated):
    """A Hugging Face model that shifts labels itself. Tokens are counted as documented."""

    def configure_model(self):
        if self.model is None:
            self.model = make_model("llama", num_hidden_layers=2, attn_implementation="sdpa")

    def configure_parallel(self):
        return ParallelPlan()

    def step(self, batch, name, **options):
        loss = self.model(**batch).loss
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True, sync_dist=True, **options)
        return (
            {"loss": loss, "num_tokens": (batch["labels"][:, 1:] != -100).sum()}
            if self.counts
            else loss
        )


CASES = {
    "counted": Logging(),
    "answers": Logging(answers=True),
    "answers not counted": Logging(answers=True, counts=False),
    "hugging face": Logging(hugging_face=True),
    "hugging face answers not counted": Logging(hugging_face=True, answers=True, counts=False),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in LAYOUTS
        for case in CASES
        if C in LAYOUTS[name][1] or CASES[case].counts
    ],
)
def test_logged_and_returned_values_match_single_process(name, case, parity):
    expected = parity.result(CASES[case])
    assert expected["logged"][-1].keys() <= set(Logging.synced), "a logged value is not compared"
    for found in parity.check(CASES[case], LAYOUTS[name]):
        if found["replicas"] == 1:
            assert found["outputs"] == [
                pytest.approx(outputs, rel=1e-5) for outputs in expected["outputs"]
            ]


class Uneven(IterableDataset):
    """A stream that is longer on rank 0 than on rank 1."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __iter__(self):
        data = PaddedTokens(8)
        return (data[index] for index in range(8 - 4 * self.trainer.global_rank))


class LitAtTheEnd(LitTiny):
    """A module whose values Lightning reduces over replicas only at the end of the epoch."""

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )
        self.log("val_loss", loss, sync_dist=True)
        return {"num_tokens": (batch["labels"] != -100).sum()}


def validate_unevenly(rank):
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        strategy=PTDPStrategy(),
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
    )
    return trainer.validate(
        LitAtTheEnd(Run(layers=2)), DataLoader(Uneven(trainer), batch_size=2), verbose=False
    )[0]["val_loss"]


def test_replicas_with_uneven_validation_batches_do_not_hang(pool):
    first, second = pool.run(validate_unevenly, world_size=2)
    assert first == second


class Backwards(Sampler):
    """A sampler of the user's."""

    def __len__(self):
        return 8

    def __iter__(self):
        return reversed(range(8))


class LitListed(LitAtTheEnd):
    """A module that logs the mean of a list at the end of the epoch."""

    def __init__(self, run):
        super().__init__(run)
        self.losses, self.labels = [], []

    def training_step(self, batch, batch_idx):
        self.labels.append(batch["input_ids"][:, 0].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"])
        self.losses.append(logits.square().mean())

    def on_validation_epoch_end(self):
        losses = torch.stack(self.losses)
        self.log("mean", losses.mean(), sync_dist=True)
        self.log("most", losses.max(), sync_dist=True, reduce_fx="max")


def log_lists(rank, layout, world_size):
    L.seed_everything(3, verbose=False)
    data, options = PaddedTokens(8), {"max_steps": 1, "num_sanity_val_steps": 0}
    trainer = make_trainer(PTDPStrategy(**layout), world_size, **options)
    module = LitListed(Run(layers=2))
    ((logged),) = trainer.validate(module, DataLoader(data, batch_size=4), verbose=False)
    trainer.fit(module, DataLoader(data, batch_size=2, sampler=Backwards()))
    return logged, module.labels


def test_means_of_lists_are_shared_by_context_ranks(pool):
    ((expected, order),) = pool.run(log_lists, world_size=1, args=({}, 1))
    for world_size in (2, 4):
        found = pool.run(log_lists, world_size=world_size, args=({C: 2}, world_size))
        means = [logged["mean"] for logged, _ in found]
        assert means == pytest.approx([expected["mean"]] * world_size, rel=1e-5)
        assert len({logged["most"] for logged, _ in found}) == 1
        if world_size == 2:
            assert found[0][1] == order, "the user's sampler was replaced"


class LitStops(LitTiny):
    """A module that ends the training by the loss of a slice, which differs between the ranks."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 1 and self.global_rank == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stop_by_slice(rank):
    trainer = make_trainer(PTDPStrategy(context_parallel_size=2), 2, max_steps=4)
    trainer.fit(LitStops(Run(layers=2)), DataLoader(PaddedTokens(16), batch_size=4))
    return trainer.global_step


def test_stop_in_step_on_one_slice_ends_all_context_ranks(pool):
    assert pool.run(stop_by_slice, world_size=2) == [2, 2]
