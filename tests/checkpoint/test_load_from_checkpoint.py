"""Checkpoint folders read by ``load_from_checkpoint`` and by Lightning's own strategies."""

import sys

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI

from lightning_ptdp.checkpoint import CheckpointError, read_whole
from tests.checkpoint.lit_saved import make
from tests.conformance.toys import P2, Place, assert_weights, make_trainer, weights
from tests.models.fits import quiet_trainer
from tests.processes import run

pytestmark = pytest.mark.thorough

LitSaved, SavedData = make(L)
OTHER = {"width": 6, "rates": (0.05, 0.3), "names": ["a"]}


def train(rank, place, path):
    saver = ModelCheckpoint(dirpath=path, filename="best", monitor="train_loss", save_last=True)
    trainer = make_trainer(place, callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    trainer.fit(LitSaved(**OTHER), datamodule=SavedData(batch_size=8))
    return weights(trainer)


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    trained = pool.run(train, world_size=2, args=(Place(world_size=2, layout=P2), str(folder)))[0]
    return folder / "last.ckpt", trained


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_weights_and_hyperparameters_are_loaded(written, weights_only):
    path, trained = written
    module = LitSaved.load_from_checkpoint(path, weights_only=weights_only)
    assert_weights(module.state_dict(), trained, tolerance=0)
    assert dict(module.hparams) == OTHER
    assert sorted(module.seen) == sorted(trained), "on_load_checkpoint must see the whole model"
    assert SavedData.load_from_checkpoint(path).hparams == {"batch_size": 8}
    assert_weights(LitSaved.load_from_checkpoint(path.as_uri()).state_dict(), trained, tolerance=0)
    assert_weights(
        LitSaved.load_from_checkpoint(path.parent / "latest").state_dict(), trained, tolerance=0
    )


def test_arguments_override_stored_hyperparameters(written, tmp_path):
    path, trained = written
    assert LitSaved.load_from_checkpoint(path, names=["b"]).hparams["names"] == ["b"]
    (tmp_path / "hparams.yaml").write_text("width: 6\nrates: [1.0, 2.0]\n")
    assert LitSaved.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml").hparams[
        "rates"
    ] == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="size mismatch"):
        LitSaved.load_from_checkpoint(path, width=5)

    class LitMore(LitSaved):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.head = torch.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match="Missing key"):
        LitMore.load_from_checkpoint(path)
    assert_weights(
        {**LitMore.load_from_checkpoint(path, strict=False).net.state_dict(prefix="net.")},
        trained,
        tolerance=0,
    )


def test_map_location_is_applied(written):
    path, _ = written
    for place in (
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
        lambda storage, location: torch.UntypedStorage(0, device="meta"),
    ):
        assert all(value.is_meta for value in read_whole(path, place)["state_dict"].values()), place
    for nowhere in (None, "cpu", {"cuda:0": "meta"}, lambda storage, location: None):
        assert not any(
            value.is_meta for value in read_whole(path, nowhere)["state_dict"].values()
        ), nowhere


def test_lightning_strategies_evaluate_but_refuse_to_resume(written):
    path, trained = written
    expected = LitSaved(**OTHER)
    expected.load_state_dict(trained)
    loss = float(
        torch.stack(
            [expected.net(batch).square().mean() for batch in SavedData(8).test_dataloader()]
        ).mean()
    )
    for given in (path, path.as_uri(), "last"):
        saver = ModelCheckpoint(dirpath=path.parent)
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=[saver])
        results = trainer.test(LitSaved(**OTHER), SavedData(8), ckpt_path=given, verbose=False)
        assert results[0]["test_loss"] == pytest.approx(loss, rel=1e-6)
    with pytest.raises(CheckpointError, match='strategy="ptdp"'):
        quiet_trainer(max_epochs=2).fit(LitSaved(**OTHER), SavedData(), ckpt_path=path)


def test_incomplete_or_missing_folder_is_refused(written, tmp_path):
    (tmp_path / "torn.ckpt").mkdir()
    (tmp_path / "torn.ckpt" / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is incomplete"):
        LitSaved.load_from_checkpoint(tmp_path / "torn.ckpt")
    with pytest.raises(FileNotFoundError):
        LitSaved.load_from_checkpoint(tmp_path / "missing.ckpt")


QUIET = ("accelerator=cpu", "devices=1", "logger=false", "enable_progress_bar=false")


def save_with_cli(rank, path):
    quiet = [*QUIET, "strategy=ptdp", "max_epochs=1", "enable_checkpointing=false"]
    options = ["--model.width=3", *(f"--trainer.{option}" for option in quiet)]
    cli = LightningCLI(LitSaved, SavedData, args=options, run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, cli.datamodule)
    cli.trainer.save_checkpoint(path)


def test_checkpoint_of_lightningcli_is_loaded(pool, tmp_path):
    pool.run(save_with_cli, world_size=1, args=(str(tmp_path / "cli.ckpt"),))
    assert torch.load(tmp_path / "cli.ckpt", weights_only=True)["hyper_parameters"]["_instantiator"]
    assert LitSaved.load_from_checkpoint(tmp_path / "cli.ckpt").net[0].out_features == 3


def test_lightningcli_takes_hyperparameters_from_checkpoint(written, tmp_path):
    quiet = [*QUIET, f"default_root_dir={tmp_path}"]
    options = [
        "test",
        f"--ckpt_path={written[0]}",
        "--model.width=5",
        *(f"--trainer.{option}" for option in quiet),
    ]
    cli = LightningCLI(LitSaved, SavedData, args=options, save_config_callback=None)
    assert (cli.model.hparams["width"], cli.model.hparams["names"]) == (6, ["a"])
    assert cli.config["test"]["ckpt_path"] == str(written[0])
    assert_weights(cli.model.state_dict(), written[1], tolerance=0)


SCRIPT = """
import sys
{first}
import lightning.pytorch, pytorch_lightning, torch
{last}
from tests.checkpoint.lit_saved import make
assert {imported}
for lightning in (lightning.pytorch, pytorch_lightning):
    module = make(lightning)[0].load_from_checkpoint(sys.argv[1])
    assert module.hparams["width"] == 6 and not torch.distributed.is_initialized()
    lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False).test(
        module, make(lightning)[1](), ckpt_path=sys.argv[1]
    )
"""


@pytest.mark.parametrize("autoload", [True, False])
def test_loading_works_with_autoload_and_with_late_import(autoload, written):
    script = SCRIPT.format(
        first="" if autoload else "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'",
        last=""
        if autoload
        else "assert 'lightning_ptdp' not in sys.modules; import lightning_ptdp",
        imported="'lightning_ptdp.strategy' not in sys.modules",
    )
    done = run([sys.executable, "-c", script, str(written[0])])
    assert done.returncode == 0, done.stderr
