"""Text data module in a real Trainer: resume, replicas and refused options."""

import re
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_ptdp.data
from lightning_ptdp.data import CorpusError, DataError, Manifest, StoreError, TextDataModule
from tests.data.fits import Recorder, check_overfitting, continued, data, saved_at, trainer
from tests.pool import Pool

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("datamodule") / "store"
    data(corpus, folder).prepare_data()
    return folder


@pytest.fixture(scope="module")
def make(corpus, folder):
    """Return a factory of data modules for the prepared folder."""
    return partial(data, corpus, folder)


@pytest.fixture(scope="module")
def uninterrupted(make, folder):
    """Return the batches of two uninterrupted epochs."""
    module, datamodule = Recorder(), make()
    trainer(folder.parent).fit(module, datamodule=datamodule)
    steps = len(datamodule.train_dataloader())
    assert len(module.seen) == 2 * steps
    assert steps > 8
    assert module.seen[:steps] != module.seen[steps:]
    return module.seen


@pytest.mark.filterwarnings("error:.*resum")
@pytest.mark.parametrize(
    ("where", "num_workers"),
    [("middle", 0), ("end of epoch", 0), ("second epoch", 0), ("second epoch", 2)],
)
def test_resume_reads_same_batches(make, tmp_path, uninterrupted, where, num_workers):
    epoch = len(uninterrupted) // 2
    stop = {"middle": 5, "end of epoch": epoch, "second epoch": epoch + 3}[where]
    first, checkpoint = saved_at(stop, make(num_workers=num_workers), tmp_path)
    assert first == uninterrupted[:stop]
    rest = continued(checkpoint, make(num_workers=num_workers), tmp_path)
    assert rest == uninterrupted[stop:]


def test_failed_step_is_repeated_after_resume(make, tmp_path, uninterrupted):
    first = Recorder(fail_at=4)
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(RuntimeError, match="this step fails"):
        trainer(tmp_path, saving).fit(first, datamodule=make())
    (checkpoint,) = tmp_path.glob("*.ckpt")
    assert first.seen + continued(str(checkpoint), make(), tmp_path) == uninterrupted


def test_sample_order_continues_with_other_batch_size(make, tmp_path, uninterrupted):
    first, checkpoint = saved_at(3, make(), tmp_path)
    smaller = make(micro_batch_size=2, num_microbatches=1)
    rest = continued(checkpoint, smaller, tmp_path, max_epochs=-1, max_steps=11)
    assert [token for batch in first + rest for token in batch] == [
        token for batch in uninterrupted[:5] for token in batch
    ]


def test_extended_fit_continues_and_overfitting_repeats(make, tmp_path, uninterrupted):
    module, datamodule = Recorder(), make()
    lengthened = trainer(tmp_path, max_epochs=1)
    lengthened.fit(module, datamodule=datamodule)
    lengthened.fit_loop.max_epochs = 2
    lengthened.fit(module, datamodule=datamodule)
    assert module.seen == uninterrupted
    again = Recorder()
    trainer(tmp_path, max_epochs=1).fit(again, datamodule=datamodule)
    assert again.seen == uninterrupted[: len(again.seen)]
    check_overfitting(datamodule, tmp_path)


def test_evaluated_checkpoint_changes_no_position(make, tmp_path, uninterrupted):
    _, checkpoint = saved_at(5, make(), tmp_path)
    datamodule = make()
    evaluate = {"datamodule": datamodule, "ckpt_path": checkpoint, "verbose": False}
    trainer(tmp_path).validate(Recorder(), **evaluate)
    module = Recorder()
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, datamodule=datamodule)
    run.test(module, **evaluate)
    run.fit_loop.max_epochs = 2
    run.fit(module, datamodule=datamodule)
    assert module.seen == uninterrupted
    other = make(seed=1)  # in which training could not continue at the checkpoint's position
    run = trainer(tmp_path, max_epochs=-1, max_steps=1)
    run.fit(Recorder(), datamodule=other)
    run.test(Recorder(), **{**evaluate, "datamodule": other})


def test_validation_reads_every_sample_once(make, tmp_path):
    module, datamodule = Recorder(), make()
    trainer(tmp_path).validate(module, datamodule=datamodule, verbose=False)
    assert module.validated == len(datamodule.val_dataloader().stream)
    trainer(tmp_path).test(module, datamodule=datamodule, verbose=False)
    assert module.validated == 2 * len(datamodule.val_dataloader().stream)
    module.validated = 0
    trainer(tmp_path).validate(module, datamodule=make(validation_samples=5), verbose=False)
    assert module.validated == 5


def fit_under_ddp(rank, corpus, folder, root):
    """Train with Lightning's DDPStrategy as one of two externally launched processes."""
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(2)
    strategy = DDPStrategy(
        accelerator=None, cluster_environment=environment, process_group_backend="gloo"
    )
    module = Recorder()
    datamodule = data(Path(corpus), Path(folder), micro_batch_size=2)
    trainer(Path(root), strategy=strategy, devices=2, max_epochs=1).fit(
        module, datamodule=datamodule
    )
    return module.seen, module.validated


def test_ddp_replicas_split_batches(pool, corpus, tmp_path, uninterrupted):
    # The folder is not prepared yet. Rank 0 prepares it after the process group is initialized.
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "NODE_RANK": "0", "LOCAL_RANK": "0"}
    results = pool.run(
        fit_under_ddp,
        world_size=2,
        args=(str(corpus), str(tmp_path / "new"), str(tmp_path)),
        env=env,
    )
    joined = [first + second for first, second in zip(results[0][0], results[1][0], strict=True)]
    assert joined == uninterrupted[: len(joined)]
    assert len(joined) == len(uninterrupted) // 2
    stream = data(corpus, tmp_path / "new").val_dataloader().stream
    assert results[0][1] + results[1][1] == len(stream)


def test_checkpoint_records_data_and_refuses_other_seed(make, folder, tmp_path):
    run = trainer(tmp_path, max_epochs=-1, max_steps=2)
    run.fit(Recorder(), datamodule=make())
    run.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert state["datamodule_hyper_parameters"]["data_dir"] == str(folder)
    assert state["TextDataModule"]["consumed_samples"] == 16
    with pytest.raises(DataError, match="seed is 0 in the checkpoint, but 1 in this training"):
        continued(str(tmp_path / "x.ckpt"), make(seed=1), tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 0),
        ("micro_batch_size", 2.5),
        ("num_microbatches", -1),
        ("num_workers", -1),
        ("validation_samples", 0),
        ("vocabulary_size", 5),
        ("sequence_length", 1 << 23),
    ],
)
def test_bad_numbers_are_refused(corpus, tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        data(corpus, tmp_path / "new", **{field: value})


def test_bad_configuration_is_refused_before_writing(corpus, make, folder, tmp_path):
    longest = Manifest.read(folder).splits["validation"].tokens
    new = data(corpus, tmp_path / "new")
    new.check()
    make().check(num_replicas=2)
    for error, words, call in (
        (CorpusError, "nowhere does not exist", data(tmp_path / "nowhere", tmp_path / "new").check),
        (
            StoreError,
            "vocabulary_size was 320 and is now 400",
            make(vocabulary_size=400).check,
        ),
        (
            DataError,
            "a step takes batch_size 8 x 1000 replicas",
            partial(make().check, num_replicas=1000),
        ),
        (
            StoreError,
            r"validation sample of sequence_length=\d+.*greater validation_fraction",
            make(sequence_length=longest, micro_batch_size=1, num_microbatches=1).check,
        ),
        (StoreError, "not a folder of prepared data", new.setup),
        (
            StoreError,
            "vocabulary of 320, but vocabulary_size=400",
            make(vocabulary_size=400).setup,
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not list(tmp_path.iterdir())


def loaded_modules(rank):
    """Return the packages loaded in a fresh process.

    The process has imported this file, and with it ``lightning_ptdp``.
    """
    return {name.split(".")[0] for name in sys.modules}


def test_package_import_does_not_load_heavy_dependencies():
    fresh = Pool()
    try:
        (loaded,) = fresh.run(loaded_modules, world_size=1)
    finally:
        fresh.close()
    assert "lightning_ptdp" in loaded
    assert not {"litdata", "mlflow"} & loaded
    # torchmetrics loads sentencepiece if transformers is installed, so check our own imports.
    for file in Path(lightning_ptdp.data.__file__).parent.glob("*.py"):
        assert not re.search(
            r"^(import|from) (sentencepiece|litdata)", file.read_text("utf-8"), re.MULTILINE
        ), file


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (8, 1, 32)),
        ({"micro_batch_size": 2, "num_microbatches": 3}, (2, 3, 24)),
        ({"global_batch_size": 48, "micro_batch_size": 4}, (4, 3, 48)),
        ({"global_batch_size": 48, "num_microbatches": 2}, (6, 2, 48)),
    ],
)
def test_missing_batch_size_is_derived(given, sizes):
    (plan,) = TextDataModule(data_dir="nowhere", **given).batch_plans(num_replicas=4)
    assert (plan.micro_batch_size, plan.num_microbatches, plan.global_batch) == sizes


RAMP = {"start": 8, "increment": 8, "samples": 400}
RAMPED = {"global_batch_size": 32, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"global_batch_size": 10, "micro_batch_size": 4},
            "global_batch_size=10 is not divisible by micro_batch_size",
        ),
        (
            {"global_batch_size": 16, "micro_batch_size": 4, "num_microbatches": 3},
            "is not micro_batch_size",
        ),
        ({"global_batch_size": 16}, "alone does not determine"),
        ({**RAMPED, "ramp_up": {**RAMP, "start": 4}}, "multiples of 8"),
        ({**RAMPED, "ramp_up": {"start": 8}}, "must be a mapping of start"),
        ({**RAMPED, "ramp_up": {**RAMP, "samples": 0}}, r"ramp_up=.*samples.: 0"),
    ],
)
def test_inconsistent_batch_sizes_are_refused_before_launch(given, words):
    with pytest.raises(ValueError, match=words):
        TextDataModule(data_dir="nowhere", **given).batch_plans(num_replicas=2)


class Epochs(pl.Callback):
    """Callback that records the steps at the ends of epochs and at validations."""

    def __init__(self):
        self.ends = []
        self.validations = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.ends.append(trainer.global_step)

    def on_validation_start(self, trainer, pl_module):
        self.validations.append(trainer.global_step)


def ramped(make):
    return make(global_batch_size=32, micro_batch_size=8, num_microbatches=None, ramp_up=RAMP)


def test_ramp_up_epochs_validate_and_resume(make, tmp_path):
    whole, epochs, datamodule = Recorder(), Epochs(), ramped(make)
    trainer(tmp_path, epochs, max_epochs=3, enable_checkpointing=False).fit(
        whole, datamodule=datamodule
    )
    loader = datamodule.train_dataloader()
    assert (
        epochs.ends == epochs.validations == [loader.steps_of_epochs(count) for count in (1, 2, 3)]
    )
    assert len(whole.seen[0]) == 8 * 8
    assert len(whole.seen[-1]) == 32 * 8
    for stop in (epochs.ends[0] // 2, epochs.ends[0]):
        _, checkpoint = saved_at(stop, ramped(make), tmp_path)
        assert continued(checkpoint, ramped(make), tmp_path, max_epochs=3) == whole.seen[stop:]


def test_ramp_up_with_accumulate_grad_batches_is_refused(make, tmp_path):
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        trainer(tmp_path, accumulate_grad_batches=2).fit(Recorder(), datamodule=ramped(make))
