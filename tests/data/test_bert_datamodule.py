"""BERT data module in a real Trainer: resume, replicas, workers and evaluation."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_ptdp.data import (
    BertDataModule,
    DataError,
    EvaluationLoader,
    StoreError,
    TokenLoader,
)
from tests.data.fits import BatchRecorder, continued, data, saved_at, trainer


@pytest.fixture(scope="module")
def make(corpus, tmp_path_factory):
    """Return a factory of data modules for one prepared folder."""
    folder = tmp_path_factory.mktemp("datamodule") / "store"
    made = partial(data, corpus, folder, BertDataModule, micro_batch_size=8, num_microbatches=4)
    made().prepare_data()
    return made


@pytest.fixture(scope="module")
def uninterrupted(make, tmp_path_factory):
    """Return the batches of two uninterrupted epochs."""
    module = BatchRecorder()
    trainer(tmp_path_factory.mktemp("whole")).fit(module, datamodule=make())
    return module.seen


@pytest.mark.filterwarnings("error:.*resum")
@pytest.mark.parametrize(("second_epoch", "num_workers"), [(False, 0), (True, 0), (True, 2)])
def test_mid_epoch_resume_reads_same_batches(
    make, tmp_path, uninterrupted, second_epoch, num_workers
):
    stop = 3 + second_epoch * (len(uninterrupted) // 2)
    first, checkpoint = saved_at(stop, make(num_workers=num_workers), tmp_path, BatchRecorder)
    assert first == uninterrupted[:stop]
    rest = continued(checkpoint, make(num_workers=num_workers), tmp_path, BatchRecorder)
    assert rest == uninterrupted[stop:]


def test_masks_differ_between_epochs(uninterrupted):
    def unmasked(row, labels):
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


def test_replicas_split_batch_of_single_replica(make):
    made = make()
    made.setup()
    whole = next(iter(TokenLoader(made._stream("train"), batch_size=8)))
    halves = [
        next(iter(TokenLoader(made._stream("train"), batch_size=4, num_replicas=2, replica_rank=r)))
        for r in range(2)
    ]
    for name, value in whole.items():
        assert torch.equal(torch.cat([half[name] for half in halves]), value), name


def test_validation_reads_each_window_once_for_any_replicas(make):
    stream = make()._stream("validation")
    counted = [
        sorted(
            tuple(row.tolist())
            for r in range(d)
            for batch in EvaluationLoader(stream, batch_size=8, num_replicas=d, replica_rank=r)
            for row in batch["labels"]
            if row.max() >= 0
        )
        for d in (1, 2)
    ]
    assert counted[0] == counted[1]
    assert len(counted[0]) == len(stream)


def test_bad_options_and_mismatched_data_are_refused(make, corpus):
    made = make()
    made.check(num_replicas=2)
    with pytest.raises(ValueError, match=r"pairs='both' must be one of .*'swap'"):
        make(pairs="both")
    with pytest.raises(ValueError, match=r"mask_probability=0\.9"):
        make(mask_probability=0.9)
    with pytest.raises(DataError, match="a step takes batch_size 32 x 1000 replicas"):
        made.check(num_replicas=1000)
    with pytest.raises(StoreError, match="other settings"):
        data(corpus, Path(made.data_dir)).check()


def test_resume_with_other_seed_is_refused(make, tmp_path):
    run = trainer(tmp_path, max_epochs=-1, max_steps=1)
    run.fit(BatchRecorder(), datamodule=make())
    run.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(DataError, match="seed is 0 in the checkpoint, but 1 in this training"):
        continued(str(tmp_path / "x.ckpt"), make(seed=1), tmp_path, BatchRecorder)
