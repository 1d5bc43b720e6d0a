"""Megatron's indexed files in a real Trainer."""

import pytest

from lightning_ptdp.cli import main
from lightning_ptdp.data import DataError, IndexedDataModule, StoreError
from tests.data.fits import Recorder, continued, saved_at, trainer
from tests.data.indexed_files import numbered, write_indexed


@pytest.fixture
def prefix(tmp_path):
    return write_indexed(tmp_path / "corpus", numbered(200))


def data(prefix, **changes):
    settings = {
        "vocabulary_size": 50_000,
        "validation_fraction": 0.1,
        "sequence_length": 31,
        "micro_batch_size": 4,
        "num_microbatches": 2,
    }
    return IndexedDataModule(data_prefix=str(prefix), **{**settings, **changes})


def test_fit_resumes_in_mid_epoch_and_refuses_other_data(prefix, tmp_path):
    whole, datamodule = Recorder(), data(prefix)
    trainer(tmp_path).fit(whole, datamodule=datamodule)
    assert whole.validated == 2 * len(datamodule.val_dataloader().stream)
    steps = len(datamodule.train_dataloader())
    assert whole.seen[:steps] != whole.seen[steps:]
    _, checkpoint = saved_at(steps + 3, data(prefix), tmp_path)
    assert continued(checkpoint, data(prefix, num_workers=1), tmp_path) == whole.seen[steps + 3 :]
    other = write_indexed(tmp_path / "other", numbered(200, seed=1))
    with pytest.raises(DataError, match=r"data is .* in the checkpoint"):
        continued(checkpoint, data(other), tmp_path)


def test_validation_prefix_selects_separate_files(prefix, tmp_path):
    apart = write_indexed(tmp_path / "apart", numbered(20, seed=2))
    datamodule = data(prefix, validation_prefix=str(apart))
    for loader, documents in (
        (datamodule.train_dataloader(), numbered(200)),
        (datamodule.val_dataloader(), numbered(20, seed=2)),
    ):
        tokens = sum(len(sequence) for document in documents for sequence in document)
        assert len(loader.stream) == tokens // 32


def test_bad_data_are_refused_before_training(prefix, tmp_path):
    data(prefix).check(num_replicas=2)
    with pytest.raises(StoreError, match=r"nowhere\.idx is missing"):
        data(tmp_path / "nowhere").check()
    with pytest.raises(DataError, match="replicas"):
        data(prefix).check(num_replicas=1000)
    with pytest.raises(StoreError, match="but vocabulary_size=9"):
        data(prefix, vocabulary_size=9).prepare_data()
    data(prefix, vocabulary_size=9, verify_tokens=False).prepare_data()


def test_cli_prepares_indexed_data(prefix, tmp_path, capsys):
    arguments = (
        "prepare --trainer.logger false --model LitGPT --data IndexedDataModule"
        f" --data.data_prefix {prefix} --data.sequence_length 31"
    ).split()
    assert main([*arguments, "--data.vocabulary_size", "50000"]) == 0
    assert main([*arguments, "--data.vocabulary_size", "9"]) != 0
    assert "but vocabulary_size=9" in capsys.readouterr().err
