"""Conversion of checkpoint folders to Lightning's single file."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.checkpoint import CheckpointError, to_lightning_file
from tests.checkpoint.layouts import save
from tests.models.fits import quiet_trainer


class Lit(pl.LightningModule):
    def __init__(self, hidden: int = 4, folder: Path | str = "data") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(6, hidden)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _fit_and_save(rank, folder):
    """Train, and store the Trainer's checkpoint as a checkpoint folder too."""
    callbacks = [
        pl.callbacks.EarlyStopping("missing", strict=False),
        pl.callbacks.ModelCheckpoint(folder),
    ]
    trainer = quiet_trainer(
        Path(folder), max_epochs=2, enable_checkpointing=True, callbacks=callbacks
    )
    model = Lit(hidden=8, folder=Path("data"))
    trainer.fit(model, DataLoader(torch.randn(12, 6), batch_size=4))
    trainer.save_checkpoint(f"{folder}/plain.ckpt")
    checkpoint = torch.load(f"{folder}/plain.ckpt", weights_only=False)
    weights = checkpoint.pop("state_dict")
    save(Path(folder, "ours.ckpt"), weights, state=checkpoint)
    return weights, checkpoint


@pytest.fixture(scope="module")
def fitted(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted")
    return (folder, *pool.run(_fit_and_save, world_size=1, args=(str(folder),))[0])


def test_load_from_checkpoint_reads_converted_file(fitted):
    folder, weights, state = fitted
    to_lightning_file(folder / "ours.ckpt", folder / "new" / "single.ckpt")
    model = Lit.load_from_checkpoint(folder / "new" / "single.ckpt")
    assert (model.hparams["hidden"], model.hparams["folder"]) == (8, "data")
    assert model.state_dict().keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    found = torch.load(folder / "new" / "single.ckpt", weights_only=True)
    assert found["loops"] == state["loops"]
    assert found["callbacks"].keys() == state["callbacks"].keys()
    assert found["global_step"] == state["global_step"] == 6
    assert "optimizer_states" not in found
    assert [entry.name for entry in (folder / "new").iterdir()] == ["single.ckpt"]


class Tied(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_keep_all_names(tmp_path):
    weight = torch.randn(5, 3)
    aliases = {"head.weight": "embedding.weight"}
    save(tmp_path / "c", {"embedding.weight": weight}, metadata={"aliases": aliases})
    to_lightning_file(tmp_path / "c", tmp_path / "single.ckpt")
    model = Tied.load_from_checkpoint(tmp_path / "single.ckpt")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, weight)
    assert (tmp_path / "single.ckpt").stat().st_size < 4000


def test_folder_target_and_missing_source_are_refused(fitted):
    folder, _, _ = fitted
    with pytest.raises(CheckpointError, match=r"is a folder\. Give the path of the file"):
        to_lightning_file(folder / "ours.ckpt", folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        to_lightning_file(folder / "nothing", folder / "out.ckpt")


def test_hyperparameters_left_out_are_named(tmp_path):
    state = {"hyper_parameters": {"hidden": 8, "loss": torch.nn.L1Loss()}}
    save(tmp_path / "c", {"w": torch.ones(2)}, state=state)
    with pytest.warns(UserWarning, match=r"without these hyper_parameters.*loss \(a torch\.nn"):
        to_lightning_file(tmp_path / "c", tmp_path / "single.ckpt")
    found = torch.load(tmp_path / "single.ckpt", weights_only=True)
    assert found["hyper_parameters"] == {"hidden": 8}
