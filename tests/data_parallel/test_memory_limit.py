"""A model that no rank can hold alone trains with sharded parameters."""

import contextlib
import resource
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.letters import Z
from tests.parity import make_trainer
from tests.pool import Pool, WorkerFailure

pytestmark = pytest.mark.thorough

WIDTH, DEPTH, RANKS = 1024, 40, 4
ALLOWED = 3 * 4 * DEPTH * WIDTH**2
"""Bytes that a rank may allocate: three times those of the weights. Weights, gradients and Adam's
two states are four times as large. With sharded parameters a rank keeps a quarter of them, and
buckets and what it gathers of a few blocks."""


class LitDeep(L.LightningModule):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def configure_model(self):
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.depth))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.h:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def train(shard, depth):
    strategy = PTDPStrategy(plan=ParallelPlan(blocks="h"), meta_init=True, **{Z: shard})
    trainer = make_trainer(strategy, RANKS, max_steps=2)
    trainer.fit(LitDeep(depth), DataLoader(torch.ones(8 * RANKS, WIDTH), batch_size=4))
    return trainer.global_step


def data_bytes():
    """Return the bytes of private writable memory, which ``RLIMIT_DATA`` limits."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


def train_within_limit(rank, shard):
    train(shard, 2)  # imports, and starts threads
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + ALLOWED, resource.RLIM_INFINITY))
    return train(shard, DEPTH)


@pytest.fixture
def new_pool():
    """Return processes without memory of other tests that could be used again."""
    with contextlib.closing(Pool()) as pool:
        yield pool


def test_model_larger_than_memory_of_rank_trains_with_sharded_parameters(new_pool):
    steps = new_pool.run(train_within_limit, world_size=RANKS, args=("parameters",))
    assert steps == [2] * RANKS


def test_model_larger_than_memory_of_rank_is_not_held_whole(new_pool):
    with pytest.raises(WorkerFailure, match="can't allocate memory"):
        new_pool.run(train_within_limit, world_size=RANKS, args=("none",))
