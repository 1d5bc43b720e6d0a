"""Ranks with different models, options, weights or data, as nodes with different files have."""

import shutil
import warnings

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp import LitCausalLM
from lightning_ptdp.base.data_record import DatasetRecord, DescribedData
from lightning_ptdp.models.tiny import make_tiny
from lightning_ptdp.strategy import PTDPStrategy
from tests.models.fits import quiet_trainer


class Wide(L.LightningModule):
    """A model of a given width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, width), torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.last(self.first(batch)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank, width):
    trainer = quiet_trainer(devices=2, strategy=PTDPStrategy(), max_steps=1)
    try:
        trainer.fit(Wide(8 if rank == 0 else width), DataLoader(torch.zeros(8, 4), batch_size=2))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("width", [8, 9])
def test_rank_with_another_model_is_named_on_all_ranks(pool, width):
    messages = pool.run(fit, world_size=2, args=(width,))
    if width == 8:
        assert messages == ["", ""]
        return
    for message in messages:
        assert "rank 1: ValueError: 'first.weight' is torch.float32 (9, 4) here" in message


class Dropped(Wide):
    """A model with an option that no shape shows, and an address that may differ."""

    def __init__(self, dropout: float, cache: str) -> None:
        super().__init__(8)
        self.save_hyperparameters({"sizes": {"dropout": dropout}, "cache": cache})


class Described(DescribedData, L.LightningDataModule):
    """Data with a digest."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self.digest = digest

    def datasets(self):
        return [
            DatasetRecord(name="x", context="training", digest=self.digest, source={}, profile={})
        ]

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 4), batch_size=2)


class Plain(L.LightningDataModule):
    """Data of a user, with an attribute of another meaning."""

    def __init__(self):
        super().__init__()
        self.datasets = {"train": torch.zeros(8, 4)}

    def train_dataloader(self):
        return DataLoader(self.datasets["train"], batch_size=2)


def fit_with_another_option(rank):
    trainer = quiet_trainer(devices=2, strategy=PTDPStrategy(), max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Dropped(0.2 if rank else 0.1, f"/node{rank}/cache"), datamodule=Plain())
    return [text for one in caught if (text := str(one.message)).startswith("option ")]


def test_rank_with_another_option_warns(pool):
    zero, one = pool.run(fit_with_another_option, world_size=2)
    assert not zero
    assert one == [
        "option 'sizes.dropout' is 0.2 here, but 0.1 on rank 0. All ranks need the same code, "
        "options and files"
    ]


def fit_other(rank, what, folder):
    other = what if rank else ""
    module = Dropped(0.1, f"/node{rank}/cache")
    if what == "weights":
        module = LitCausalLM(f"{folder}/model{rank}")
    trainer = quiet_trainer(devices=2, strategy=PTDPStrategy(), max_steps=1)
    try:
        trainer.fit(module, datamodule=Described("b" if other == "data" else "a"))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("data", "the digest of the training data is b here, but a on rank 0"),
        ("weights", "the digest of the initial weights is "),
        ("", ""),
    ],
)
def test_rank_with_other_files_is_named_on_all_ranks(pool, tmp_path, what, words):
    if what == "weights":
        make_tiny(tmp_path / "model0", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
        shutil.copytree(tmp_path / "model0", tmp_path / "model1")
        with open(tmp_path / "model1" / "model.safetensors", "r+b") as stream:
            stream.seek(-2, 2)
            stream.write(b"\x01\x3f")
    messages = pool.run(fit_other, world_size=2, args=(what, str(tmp_path)))
    for message in messages:
        assert (f"rank 1: ValueError: {words}" in message) if what else (message == "")
        assert not what or "Update those of this rank's node" in message
