"""Rehearsal of the first training step in a separate process before launch."""

import random
import threading
from functools import partial

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.base.forked_processes import try_in_child
from lightning_ptdp.strategy import PTDPStrategy
from tests.pool import in_new_process

pytestmark = pytest.mark.thorough

WIDTH = 4


class Samples(Dataset[dict[str, Tensor]]):
    """Samples as dictionaries, from which no input can be inferred; counts its reads."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.reads += 1
        return {"x": torch.full((WIDTH,), float(index)), "y": torch.zeros(1)}


class Chain(L.LightningModule):
    """Module with sequential blocks in code that needs both tensors of a batch."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return x + y

    def training_step(self, batch, batch_idx):
        loss = self(batch["x"], batch["y"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Residual(Chain):
    """Module whose blocks take the residual of the previous blocks, as in N-BEATS."""

    def forward(self, x, y):
        for block in self.blocks:
            x = x - block(x)
        return x + y


class Twice(Chain):
    """Module that runs two views of a batch through the blocks, as in SimCLR."""

    def training_step(self, batch):
        views = self(batch["x"], batch["y"]), self(batch["x"] + 1, batch["y"])
        return (views[0] - views[1]).square().mean()


class Varies(Chain):
    """Module that sends tensors of random sizes, refused in the second microbatch."""

    def training_step(self, batch, batch_idx):
        draws = int(torch.randint(9, ())), int(np.random.randint(9)), random.randrange(9)
        x = batch["x"].repeat(1 + draws[0] + 9 * draws[1] + 81 * draws[2], 1, 1)
        return self(x, batch["y"]).square().mean()


class SavesAnObject(Chain):
    """Module that adds its loss function to the checkpoint."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loss_fn"] = nn.MSELoss()


class FailsAnyway(Residual):
    """Module that also fails in a single process, so its stages are unknown."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        raise LookupError


class Data(L.LightningDataModule):
    """Data module that creates its data in ``setup``."""

    def setup(self, stage):
        self.samples = Samples()

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4)


def graphs(samples):
    """Collate without a common first dimension."""
    return {"x": torch.stack([each["x"] for each in samples]), "y": torch.zeros(3)}


def fit(module, data, folder=None):
    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PTDPStrategy(pipeline_parallel_size=2, num_microbatches=2, start_method="fork"),
        max_steps=1,
        logger=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
    ).fit(module, data)


def refused(module, words, data, folder):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = module()
    torch.set_rng_state(before)
    # an error in a rank would be a ProcessRaisedException
    with pytest.raises(ValueError, match=words) as caught:
        fit(model, data, folder)
    assert type(caught.value) is ValueError
    assert torch.equal(torch.get_rng_state(), before)
    assert "samples" not in vars(data)
    assert not getattr(getattr(data, "dataset", None), "reads", 0)


def trained(module):
    fit(module(), DataLoader(Samples(), batch_size=4))


def launched(module, words):
    with pytest.raises(ProcessRaisedException, match=words):
        fit(module(), DataLoader(Samples(), batch_size=4))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Residual, r"cannot cut Residual: the model computes something before block 'blocks\.2'"),
        (Twice, "one step calls the repeated blocks more than once"),
    ],
)
@pytest.mark.parametrize("source", ["loader", "combined loader", "data module"])
def test_unsplittable_module_is_refused_before_launch(module, words, source):
    data = Data() if source == "data module" else DataLoader(Samples(), batch_size=4, num_workers=1)
    if source == "combined loader":
        data = CombinedLoader(data, "sequential")
    assert in_new_process(partial(refused, module, words, data, None)) == 0


def test_unsplittable_batch_is_refused_before_launch():
    data = DataLoader(Samples(), batch_size=4, collate_fn=graphs)
    assert (
        in_new_process(partial(refused, Chain, r"first dimensions are \[3, 4\]", data, None)) == 0
    )


def test_object_in_checkpoint_hook_is_refused_before_launch(tmp_path):
    words = r"on_save_checkpoint of SavesAnObject adds 'loss_fn' \(a torch\..*MSELoss\)"
    data = DataLoader(Samples(), batch_size=4)
    assert in_new_process(partial(refused, SavesAnObject, words, data, str(tmp_path))) == 0


def test_sequential_blocks_train():
    assert in_new_process(partial(trained, Chain)) == 0


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (FailsAnyway, "computes something before"),
        (Varies, "may depend on the shapes in the batch, but not on its values"),
    ],
)
def test_errors_missed_by_rehearsal_are_raised_by_ranks(module, words):
    assert in_new_process(partial(launched, module, words)) == 0


def test_rehearsal_is_skipped_with_other_threads():
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        try_in_child(lambda: ValueError("not called"))
    finally:
        ended.set()
        other.join()
