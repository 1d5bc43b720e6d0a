"""Megatron's indexed files in a real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp.cli import main
from lightning_ptdp.data import DataError, IndexedDataModule, StoreError
from tests.data.fits import Recorder, trainer
from tests.data.indexed_files import numbered, write_indexed


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_indexed(tmp_path / "corpus", numbered(200))


def data(prefix: Path, **changes: Any) -> IndexedDataModule:
    settings = {
        "vocabulary_size": 50_000,
        "validation_fraction": 0.1,
        "sequence_length": 31,
        "micro_batch_size": 4,
        "num_microbatches": 2,
    }
    return IndexedDataModule(data_prefix=str(prefix), **{**settings, **changes})


def test_a_fit_resumes_in_mid_epoch_and_other_data_are_refused(
    prefix: Path, tmp_path: Path
) -> None:
    whole, datamodule = Recorder(), data(prefix)
    trainer(tmp_path).fit(whole, datamodule=datamodule)
    assert whole.validated == 2 * len(datamodule.val_dataloader().stream)
    steps = len(datamodule.train_dataloader())
    assert whole.seen[:steps] != whole.seen[steps:]
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=steps + 3, filename="saved")
    trainer(tmp_path, saving, max_epochs=-1, max_steps=steps + 3).fit(
        Recorder(), datamodule=data(prefix)
    )
    rest = Recorder()
    trainer(tmp_path).fit(
        rest, datamodule=data(prefix, num_workers=1), ckpt_path=str(tmp_path / "saved.ckpt")
    )
    assert rest.seen == whole.seen[steps + 3 :]
    other = write_indexed(tmp_path / "other", numbered(200, seed=1))
    with pytest.raises(DataError, match=r"data is .* in the checkpoint"):
        trainer(tmp_path).fit(
            Recorder(), datamodule=data(other), ckpt_path=str(tmp_path / "saved.ckpt")
        )


def test_validation_may_have_files_of_its_own(prefix: Path, tmp_path: Path) -> None:
    apart = write_indexed(tmp_path / "apart", numbered(20, seed=2))
    datamodule = data(prefix, validation_prefix=str(apart))
    assert (
        len(datamodule.train_dataloader().stream)
        == sum(len(s) for d in numbered(200) for s in d) // 32
    )
    assert (
        len(datamodule.val_dataloader().stream)
        == sum(len(s) for d in numbered(20, seed=2) for s in d) // 32
    )


def test_what_is_wrong_is_found_before_training(prefix: Path, tmp_path: Path) -> None:
    data(prefix).check(num_replicas=2)
    with pytest.raises(StoreError, match=r"nowhere\.idx is missing"):
        data(tmp_path / "nowhere").check()
    with pytest.raises(DataError, match="replicas"):
        data(prefix).check(num_replicas=1000)
    with pytest.raises(StoreError, match="but vocabulary_size=9"):
        data(prefix, vocabulary_size=9).prepare_data()
    data(prefix, vocabulary_size=9, verify_tokens=False).prepare_data()


def test_the_command_line_takes_it(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "prepare",
        "--data",
        "IndexedDataModule",
        "--data.data_prefix",
        str(prefix),
        "--trainer.logger",
        "false",
    ]
    arguments += ["--data.sequence_length", "31", "--model", "LitGPT"]
    assert main([*arguments, "--data.vocabulary_size", "50000"]) == 0
    assert main([*arguments, "--data.vocabulary_size", "9"]) != 0
    assert "but vocabulary_size=9" in capsys.readouterr().err
