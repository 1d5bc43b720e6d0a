"""Replicas that read unequal amounts of data, or get a signal while only one of them is busy."""

import contextlib
import os
import signal
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.data_parallel import reduction
from tests.conformance.blocks import LAYOUTS, LENGTH, VOCABULARY, LitBlocks, batches
from tests.conformance.toys import Place, make_trainer, weights
from tests.fake_cuda import fake_cuda

SHARDED = {
    shard: Place(world_size=2, layout={"num_microbatches": 4, "shard": shard})
    for shard in ("none", "optimizer", "gradients", "parameters")
}
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2, "partition": [2, 2]}
IN_PIPELINE = Place(
    world_size=4, layout={**PIPELINE, "shard": "parameters", "reshard_after": "block"}
)


class LitPredicts(LitBlocks):
    def predict_step(self, batch, batch_idx):
        return self.loss(batch)


def error_of(call):
    """Return the error of ``call()``, or an empty string."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fit_unequal(rank, place):
    rows = torch.randint(0, VOCABULARY, (16, LENGTH + 1))
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    loader = DataLoader(rows, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7] if rank else [4, 5]])
    return error_of(lambda: trainer.fit(LitBlocks(), loader))


def predict(rank, place, samples, batch_size):
    rows = torch.randint(0, VOCABULARY, (samples, LENGTH + 1))
    trainer = make_trainer(place)
    return error_of(lambda: trainer.predict(LitPredicts(), DataLoader(rows, batch_size=batch_size)))


@pytest.mark.parametrize("shard", SHARDED)
def test_replicas_with_unequal_microbatches_train_or_are_refused(shard, pool):
    messages = pool.run(fit_unequal, world_size=2, args=(SHARDED[shard],))
    if shard in ("none", "optimizer"):
        assert messages == ["", ""]
        return
    for message in messages:
        assert message.startswith("BatchMismatchError: the replicas' batches have between 2 and 4")
        assert f"shard='{shard}'" in message


def fit_unequal_on_gpu(rank, samples):
    place = Place(
        world_size=2,
        layout={
            **SHARDED["gradients"].layout,
            "process_group_backend": "gloo",
            "timeout_s": 10,
        },
    )
    rows = torch.randint(0, VOCABULARY, (16, LENGTH + 1))
    loader = DataLoader(rows, batch_sampler=[[0, 1, 2, 3], [*range(4, 4 + samples[rank])]])
    gpu = {"accelerator": "gpu", "use_distributed_sampler": False, "max_epochs": 1}
    message = ""
    # A step that fails leaves reductions in progress. NCCL does not use gloo's replacements of two
    # collectives.
    with (
        contextlib.suppress(AssertionError),
        fake_cuda(rank),
        mock.patch.object(reduction, "_is_gloo", return_value=False),
    ):
        message = error_of(lambda: make_trainer(place, **gpu).fit(LitBlocks(), loader))
    return message


def test_gpu_refuses_unequal_microbatches_before_step(pool):
    """Other numbers are reported one batch later, but the replicas would then wait for each other."""
    changed, other = pool.run(fit_unequal_on_gpu, world_size=2, args=((2, 4),))
    assert changed.startswith("BatchMismatchError: the replicas' batches have between 2 and 4")
    assert "rank 0" in other
    assert "BatchMismatchError" in other
    assert pool.run(fit_unequal_on_gpu, world_size=2, args=((2, 2),)) == ["", ""]


class LitGraphs(LitBlocks):
    """Its batches have no dimension of samples."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch["nodes"]) + 0 * batch["edges"].sum()


def fit_graphs(rank, place):
    graphs = [
        {"nodes": torch.randint(0, VOCABULARY, (4, LENGTH + 1)), "edges": torch.ones(6 + index)}
        for index in range(4)
    ]
    trainer = make_trainer(place, max_epochs=1)
    return error_of(lambda: trainer.fit(LitGraphs(), DataLoader(graphs, batch_size=None)))


@pytest.mark.parametrize("shard", SHARDED)
def test_batches_without_samples_train_without_microbatches(shard, pool):
    place = Place(world_size=2, layout={"shard": shard})
    assert pool.run(fit_graphs, world_size=2, args=(place,)) == ["", ""]


@pytest.mark.parametrize(
    ("place", "samples", "batch_size"),
    [
        pytest.param(LAYOUTS["d2 sharded parameters"], 5, 1, id="batches"),
        pytest.param(IN_PIPELINE, 7, 2, id="last batch"),
    ],
)
def test_unequal_predictions_are_refused_with_sharded_parameters(place, samples, batch_size, pool):
    for message in pool.run(
        predict, world_size=place.world_size, args=(place, samples, batch_size)
    ):
        assert "shard='parameters' makes the replicas wait for each other" in message
    equal = pool.run(predict, world_size=place.world_size, args=(place, samples + 1, batch_size))
    assert set(equal) == {""}


def test_unequal_predictions_run_without_sharded_parameters(pool):
    place = LAYOUTS["d2 sharded"]
    assert pool.run(predict, world_size=2, args=(place, 5, 1)) == ["", ""]


# ---- A stage without parameters ------------------------------------------------------------------


class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh()


class LitHalf(LitBlocks):
    """Only the blocks of the first stage have parameters."""

    def __init__(self):
        super().__init__()
        self.wte = self.norm = self.head = None
        self.h = nn.ModuleList(nn.Linear(4, 4) if index < 2 else Tanh() for index in range(4))

    def training_step(self, batch, batch_idx):
        for block in self.h:
            batch = block(batch)
        return (batch - 1).square().mean()


def fit_half(rank, place):
    torch.manual_seed(1)
    trainer = make_trainer(place, max_epochs=1)
    trainer.fit(LitHalf(), DataLoader(torch.linspace(-1, 1, 64).view(16, 4), batch_size=4))
    return weights(trainer)


def test_pipeline_stage_without_parameters_trains(pool):
    ((expected,), (found, _)) = (
        pool.run(fit_half, world_size=place.world_size, args=(place,))
        for place in (Place(), Place(world_size=2, layout=PIPELINE))
    )
    torch.testing.assert_close(found, expected)


# ---- SIGTERM in a validation ---------------------------------------------------------------------


class LitTerminated(LitBlocks):
    """Gets SIGTERM in the second batch of the second validation, on rank 1."""

    def on_validation_start(self):
        self.validations = getattr(self, "validations", 0) + 1

    def validation_step(self, batch, batch_idx):
        if self.validations == 2 and batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.log("loss", self.loss(batch), sync_dist=True)


def fit_terminated(rank, place):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=9)
    with pytest.raises(SystemExit):
        trainer.fit(LitTerminated(), batches(place, rank), batches(place, rank))
    return trainer.global_step


def test_sigterm_in_validation_ends_all_replicas_after_it(pool):
    place = Place(world_size=2)
    first, second = pool.run(fit_terminated, world_size=2, args=(place,))
    assert first == second
