"""Tests that logged, returned and counted values cover the whole batch, as in one process.

Labels may be distributed unevenly over microbatches, replicas and slices of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import MeanMetric

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.huggingface.runs import make_model
from tests.letters import C, M, P
from tests.parity import make_trainer
from tests.pool import Pool
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "c2": (2, {C: 2}),
    "c2m2": (2, {C: 2, M: 2}),
    "p2c2": (4, {C: 2, P: 2, M: 2}),
    "d2c2": (4, {C: 2}),
    "m3": (1, {M: 3}),
    "d2": (2, {}),
    "p2": (2, {P: 2, M: 3}),
    "d2p2": (4, {P: 2, M: 2}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``answers``: only the last tokens of a sequence have labels, as in fine-tuning, so that half
    of the slices have none."""

    answers: bool = False
    counts: bool = True
    hugging_face: bool = False


class Answers(PaddedTokens):
    """As many labels in all sequences, and none in the middle."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[:-3] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


class LitEvaluated(LitTiny):
    """Labels that are shifted already."""

    def __init__(self, case: Case) -> None:
        super().__init__(Run(layers=2))
        self.case, self.error = case, MeanMetric()

    def token_losses(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1),
            batch["labels"].flatten(),
            reduction="none",
        )

    def step(self, batch: dict[str, Tensor], name: str, **options: Any) -> Any:
        losses, counted = self.token_losses(batch), batch["labels"].flatten() != -100
        loss = losses.sum() / counted.sum()
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True, sync_dist=True, **options)
        self.log(f"{name}_sum", losses.sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log(f"{name}_most", losses.max(), on_epoch=True, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "num_tokens": counted.sum()} if self.case.counts else loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.step(batch, "val", batch_size=len(batch["labels"]))


class LitShifts(LitEvaluated):
    """A Hugging Face model, which shifts labels itself; counted as the documentation says."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model("llama", num_hidden_layers=2, attn_implementation="sdpa")

    def configure_parallel(self) -> ParallelPlan:
        return ParallelPlan()

    def step(self, batch: dict[str, Tensor], name: str, **options: Any) -> Any:
        loss = self.model(**batch).loss
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True, sync_dist=True, **options)
        return (
            {"loss": loss, "num_tokens": (batch["labels"][:, 1:] != -100).sum()}
            if self.case.counts
            else loss
        )


class Seen(L.Callback):
    """Metrics and outputs that callback hooks receive from every batch."""

    def __init__(self) -> None:
        self.outputs: list[tuple[float, float]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        self.outputs.append((float(outputs["loss"]), float(outputs.get("num_tokens", 0))))


def run(rank: int, case: Case, world_size: int, layout: dict[str, int]) -> Any:
    L.seed_everything(3, verbose=False)
    seen, module = Seen(), LitShifts(case) if case.hugging_face else LitEvaluated(case)
    trainer = make_trainer(
        PTDPStrategy(**layout), world_size, max_epochs=1, callbacks=[seen], num_sanity_val_steps=0
    )
    data = Answers(12) if case.answers else PaddedTokens(12)
    sampler = DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False)
    loader = DataLoader(data, batch_size=4 // sampler.num_replicas, sampler=sampler)
    trainer.fit(module, loader, loader)
    return {
        "logged": seen.logged,
        "outputs": seen.outputs if sampler.num_replicas == 1 else [],
        "last": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": trainer.strategy.gather_state_dict(),
    }


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    return cache(lambda case: pool.run(run, world_size=1, args=(case, 1, {}))[0])


CASES = {
    "counted": Case(),
    "answers": Case(answers=True),
    "answers not counted": Case(answers=True, counts=False),
    "hugging face": Case(hugging_face=True),
    "hugging face answers not counted": Case(hugging_face=True, answers=True, counts=False),
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
def test_values_are_those_of_one_process(name: str, case: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    expected = reference(CASES[case])
    for found in pool.run(run, world_size=world_size, args=(CASES[case], world_size, layout)):
        for mine, theirs in zip(
            [*found["logged"], found["last"]], [*expected["logged"], expected["last"]], strict=True
        ):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for mine, theirs in zip(
            found["outputs"], expected["outputs"], strict=bool(found["outputs"])
        ):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for key, value in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][key],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, n=key: f"{n}: {text}",
            )


class Uneven(IterableDataset):
    """A stream that a replica reads longer than another."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __iter__(self) -> Any:
        data = PaddedTokens(8)
        return (data[index] for index in range(8 - 4 * self.trainer.global_rank))


class LitAtTheEnd(LitTiny):
    """Lightning itself sums over the replicas at the end of the epoch only."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(
            self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )
        self.log("val_loss", loss, sync_dist=True)
        return {"num_tokens": (batch["labels"] != -100).sum()}


def validate_unevenly(rank: int) -> float:
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


def test_replicas_that_evaluate_unequally_many_batches_do_not_wait_for_each_other(
    pool: Pool,
) -> None:
    first, second = pool.run(validate_unevenly, world_size=2)
    assert first == second
