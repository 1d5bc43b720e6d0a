"""Pretraining data in a real Trainer: resumed in the middle of an epoch, masks and all; replicas,
workers and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.data import (
    BertDataModule,
    DataError,
    EvaluationLoader,
    StoreError,
    TextDataModule,
    TokenLoader,
)
from tests.data.fits import trainer

Seen = list[dict[str, list[Any]]]


class Recorder(pl.LightningModule):
    """Remembers every tensor that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: Seen = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append({name: value.tolist() for name, value in batch.items()})
        return self.weight * batch["input_ids"].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(corpus: Path, folder: Path, **changes: Any) -> BertDataModule:
    settings = {
        "vocabulary_size": 320,
        "validation_fraction": 0.1,
        "sequence_length": 64,
        "micro_batch_size": 8,
        "num_microbatches": 4,
    }
    return BertDataModule(data_dir=str(folder), source=str(corpus), **{**settings, **changes})


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datamodule") / "store"
    data(corpus, folder).prepare_data()
    return folder


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, folder: Path) -> Seen:
    """The batches of two epochs."""
    module = Recorder()
    trainer(folder.parent).fit(module, datamodule=data(corpus, folder))
    return module.seen


@pytest.mark.filterwarnings("error:.*resum")
@pytest.mark.parametrize(("second_epoch", "num_workers"), [(False, 0), (True, 0), (True, 2)])
def test_resume_in_mid_epoch_sees_the_same_batches(
    corpus: Path,
    folder: Path,
    tmp_path: Path,
    uninterrupted: Seen,
    second_epoch: bool,
    num_workers: int,
) -> None:
    stop = 3 + second_epoch * (len(uninterrupted) // 2)
    first, rest = Recorder(), Recorder()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=stop, filename="saved")
    trainer(tmp_path, saving, max_epochs=-1, max_steps=stop).fit(
        first, datamodule=data(corpus, folder, num_workers=num_workers)
    )
    assert first.seen == uninterrupted[:stop]
    trainer(tmp_path).fit(
        rest,
        datamodule=data(corpus, folder, num_workers=num_workers),
        ckpt_path=str(tmp_path / "saved.ckpt"),
    )
    assert rest.seen == uninterrupted[stop:]


def test_masks_change_from_epoch_to_epoch(uninterrupted: Seen) -> None:
    def unmasked(row: list[int], labels: list[int]) -> tuple[int, ...]:
        return tuple(
            sorted(
                token if label == -100 else label for token, label in zip(row, labels, strict=True)
            )
        )

    half = len(uninterrupted) // 2
    epochs = [
        {
            unmasked(i, la): la
            for batch in part
            for i, la in zip(batch["input_ids"], batch["labels"], strict=True)
        }
        for part in (uninterrupted[:half], uninterrupted[half:])
    ]
    same = epochs[0].keys() & epochs[1].keys()
    assert len(same) > 0.8 * len(epochs[0])
    assert sum(epochs[0][key] != epochs[1][key] for key in same) > 0.95 * len(same)


def test_replicas_share_the_batches_of_one(corpus: Path, folder: Path) -> None:
    made = data(corpus, folder)
    made.setup()
    whole = next(iter(TokenLoader(made._stream("train"), batch_size=8)))
    halves = [
        next(iter(TokenLoader(made._stream("train"), batch_size=4, num_replicas=2, replica_rank=r)))
        for r in range(2)
    ]
    for name, value in whole.items():
        assert torch.equal(torch.cat([half[name] for half in halves]), value), name


def test_validation_sees_every_window_once_and_always_alike(corpus: Path, folder: Path) -> None:
    made = data(corpus, folder)
    stream = made._stream("validation")
    labels = [
        [
            tuple(row.tolist())
            for batch in EvaluationLoader(stream, batch_size=8, num_replicas=d, replica_rank=r)
            for row in batch["labels"]
        ]
        for d in (1, 2)
        for r in range(d)
    ]
    counted = [
        sorted(row for row in rows if max(row) >= 0) for rows in (labels[0], labels[1] + labels[2])
    ]
    assert counted[0] == counted[1]
    assert len(counted[0]) == len(stream)


def test_what_does_not_fit_is_refused(corpus: Path, folder: Path, tmp_path: Path) -> None:
    data(corpus, folder).check(num_replicas=2)
    with pytest.raises(ValueError, match=r"pairs='both' must be one of .*'swap'"):
        data(corpus, folder, pairs="both")
    with pytest.raises(ValueError, match=r"mask_probability=0\.9"):
        data(corpus, folder, mask_probability=0.9)
    with pytest.raises(DataError, match="a step takes batch_size 32 x 1000 replicas"):
        data(corpus, folder).check(num_replicas=1000)
    settings = {"vocabulary_size": 320, "validation_fraction": 0.1}
    with pytest.raises(StoreError, match="other settings"):
        TextDataModule(data_dir=str(folder), source=str(corpus), **settings).check()


def test_a_place_in_other_data_is_refused(corpus: Path, folder: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=-1, max_steps=1)
    run.fit(Recorder(), datamodule=data(corpus, folder))
    run.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(DataError, match="seed is 0 in the checkpoint, but 1 in this training"):
        trainer(tmp_path).fit(
            Recorder(), datamodule=data(corpus, folder, seed=1), ckpt_path=str(tmp_path / "x.ckpt")
        )
