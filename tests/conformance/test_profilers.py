"""Profilers, graph logging, values logged by rank 0 only, and ``strategy.reduce``."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.distributed import ReduceOp

from tests.conformance.toys import (
    DDP,
    FEATURES,
    ONE,
    P2,
    LitNet,
    Place,
    loader,
    make_trainer,
    metrics,
)

pytestmark = pytest.mark.thorough

D2, D2M2, P2D2 = (
    Place(world_size=2),
    Place(world_size=2, layout={"num_microbatches": 2}),
    Place(world_size=4, layout=P2),
)


class LogsOnRankZero(LitNet):
    """Logs values on rank 0 only, as in Lightning's guide, and counts samples as tokens."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True, sync_dist=True)
        if self.global_rank == 0:
            self.log("rank", loss, rank_zero_only=True)
        return {"loss": loss, "num_tokens": torch.tensor(len(batch[0]))}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        if self.trainer.is_global_zero:
            self.log("val", loss, rank_zero_only=True)


def log_on_rank_zero(rank, place):
    trainer = make_trainer(place, max_epochs=1, limit_train_batches=2, limit_val_batches=1)
    trainer.fit(LogsOnRankZero(), loader(), loader())
    return metrics(trainer)["callback_metrics"], trainer.global_rank


@pytest.mark.parametrize(
    "place", [Place(world_size=2, layout=P2), D2, D2M2, P2D2], ids=["p2", "d2", "d2 m2", "d2 p2"]
)
def test_rank_zero_only_value_is_logged(place, conformance):
    replicas = place.world_size // place.layout.get("pipeline_parallel_size", 1)
    found = conformance.ranks(log_on_rank_zero, place)
    expected = conformance.expected(log_on_rank_zero, DDP if replicas > 1 else ONE)
    assert expected[0][0].keys() == {"zero", "rank", "val"}
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-5)
    assert [rank for _, rank in found] == list(range(place.world_size))


class Reduces(L.Callback):
    """Records the results of ``strategy.reduce`` and the values left in its input."""

    def __init__(self):
        self.found = {}

    def on_train_batch_end(self, trainer, *_):
        strategy = trainer.strategy
        replica, world = strategy.layout.replica(trainer.global_rank), torch.distributed.group.WORLD
        for op in ("sum", ReduceOp.SUM, "mean", "max"):
            own = torch.tensor([replica + 1.0])
            self.found[str(op)] = (float(strategy.reduce(own, reduce_op=op)), float(own))
        self.found["own"] = (
            float(strategy.reduce(torch.tensor(trainer.global_rank + 1), reduce_op="sum")),
        )
        self.found["world"] = (
            float(strategy.reduce(torch.tensor(trainer.global_rank + 1), world, "sum")),
        )


def reduce(rank, place):
    reduces = Reduces()
    make_trainer(place, max_steps=1, callbacks=[reduces]).fit(LitNet(), loader())
    return reduces.found


def test_reduce_counts_each_replica_once(conformance):
    found = conformance.ranks(reduce, P2D2)
    for result in found:
        assert result["sum"] == result[str(ReduceOp.SUM)] == (3.0, 3.0)
        assert result["mean"] == (1.5, 1.5) and result["max"] == (2.0, 2.0)
        assert result["world"] == (10,)
    # Values that differ within a replica are added to those of the same rank in the other replica,
    # not averaged.
    assert [result["own"] for result in found] == [(3,), (3,), (7,), (7,)]


def test_reduce_over_one_replica_returns_its_value(conformance):
    first, second = conformance.ranks(reduce, Place(world_size=2, layout=P2))
    assert first["sum"] == second["sum"] == (1.0, 1.0)
    assert (first["own"], second["own"]) == ((1,), (2,))


def profile(rank, place, folder):
    profiler = PyTorchProfiler(
        folder,
        filename="profile",
        sort_by_key="cpu_time_total",
        row_limit=1000,
        export_to_chrome=False,
    )
    trainer = make_trainer(place, max_epochs=1, profiler=profiler)
    trainer.fit(LitNet(), loader(), loader())
    return [
        path.read_text()
        for path in sorted(
            Path(folder).glob(
                "fit-profile.txt" if place.world_size == 1 else f"fit-profile-{rank}.txt"
            )
        )
    ]


@pytest.mark.parametrize(
    "place", [Place(), D2, Place(world_size=2, layout=P2)], ids=["one", "d2", "p2"]
)
def test_profiler_lists_modules_of_its_rank(place, conformance, tmp_path):
    tables = conformance.ranks(profile, place, str(tmp_path))
    assert all(len(table) == 1 for table in tables)
    seen = [{index for index in range(7) if f"net.{index} " in table} for (table,) in tables]
    whole = set(range(7))
    assert (
        seen == [whole] * place.world_size
        if not place.layout
        else seen[0] | seen[1] == whole and not seen[0] & seen[1]
    )


class LitExample(LitNet):
    """A module whose forward can be traced."""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(2, FEATURES)

    def forward(self, x):
        return self.net(x)


def log_graph(rank, place, folder):
    trainer = make_trainer(place, max_steps=1, logger=TensorBoardLogger(folder, log_graph=True))
    try:
        trainer.fit(LitExample(), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}, {trainer.strategy._run is None}"
    return ""


@pytest.mark.parametrize("place", [Place(), D2], ids=["one", "d2"])
def test_graph_of_whole_model_is_logged(place, conformance, tmp_path):
    assert not any(conformance.ranks(log_graph, place, str(tmp_path)))
    assert any(b"Linear[6]" in path.read_bytes() for path in tmp_path.rglob("events*"))


def test_graph_of_pipelined_model_is_refused_before_launch(conformance, tmp_path):
    for told in conformance.ranks(log_graph, Place(world_size=2, layout=P2), str(tmp_path)):
        assert told.startswith("MisconfigurationException: log_graph=True") and told.endswith(
            "True"
        )
