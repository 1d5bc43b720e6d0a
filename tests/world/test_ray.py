"""Ray Train: the example of the page about machines trains as one process does."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.docs.blocks import find_blocks
from tests.optional import needs
from tests.processes import session

pytestmark = [pytest.mark.thorough, needs("ray")]

PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
MODULE = """
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader


class YourModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def your_data():
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)
"""
START = "import ray; ray.init(num_cpus=2, include_dashboard=False, _temp_dir={folder!r})\n"


def _trained_alone(epochs: int) -> dict[str, Any]:
    """Return the parameters after epochs of the batches that Lightning gives to two replicas."""
    names: dict[str, Any] = {}
    exec(MODULE, names)
    module = names["YourModule"]()
    data = names["your_data"]().dataset
    optimizer = module.configure_optimizers()
    samplers = [DistributedSampler(data, 2, rank) for rank in range(2)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, 2, sampler=sampler) for sampler in samplers]
        for number, batches in enumerate(zip(*loaders, strict=True)):
            module.training_step(torch.cat(batches), number).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(module.state_dict())


def test_workers_of_ray_train_and_store_checkpoints(tmp_path):
    (block,) = (one for one in find_blocks(PAGE, "machines") if "TorchTrainer" in one.code)
    code = block.code.replace("/shared/runs", str(tmp_path))
    code = code.replace("num_workers=4", "num_workers=2")
    job = tmp_path / "job.py"
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # sockets need a short path
        job.write_text(MODULE + START.format(folder=folder) + code)
        seed = {"PL_GLOBAL_SEED": "0"}  # of the order of samples; other tests set it
        with session([sys.executable, str(job)], folder=tmp_path, **seed) as trained:
            assert trained.finish() == 0, trained.output
    files = [torch.load(path) for path in tmp_path.glob("first/*/checkpoint.ckpt")]
    assert sorted(file["epoch"] for file in files) == [0, 1, 2]
    for file in files:
        torch.testing.assert_close(file["state_dict"], _trained_alone(file["epoch"] + 1))
