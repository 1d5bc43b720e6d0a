"""On NCCL the first message of a connection holds both hosts: every connection is made before the first action. Real processes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.data_parallel import reduction
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule import build_schedule
from lightning_ptdp.world import mesh as mesh_module
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.conformance.toys import LitNet, Place, loader, make_trainer
from tests.pipeline.handshake import handshaking
from tests.pipeline.jobs import SumJob
from tests.pool import Pool, WorkerFailure

SCHEDULES = {1: ("gpipe", "1f1b", "zb_h1"), 2: ("interleaved_1f1b", "zb_v", "dualpipe_v")}


def first_step(rank: int, folder: str, schedule: str, p: int, v: int, m: int, connected: bool) -> Any:
    """A forward and backward of every stage, in a world whose connections are made lazily."""
    sizes = {"pipeline_parallel_size": p, "virtual_pipeline_size": v}
    program = build_schedule(schedule, num_microbatches=m, **sizes)
    layout = ParallelLayout(world_size=p, placement=program.placement, **sizes)
    stages = p * v
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))
    with handshaking(dist.FileStore(folder, p), limit_s=30.0 if connected else 2.0) as hands:
        with contextlib.nullcontext() if connected else mock.patch.object(mesh_module, "_connect_channel"):
            mesh = ProcessMesh.create(layout=layout, rank=rank)
        before = list(hands.made)
        ranges = tuple((stage, stage + 1) for stage in range(stages))
        parts = find_parts(model, blocks="")
        cut = PipelineCut(model, parts=parts, ranges=ranges, stages=tuple(program.stages_of(rank)))
        link = Transport(mesh=mesh, device=torch.device("cpu"))
        runtime = PipelineRuntime(cut=cut, transport=link, group=mesh.group("pipeline"))
        runtime.run(program, SumJob(model, [torch.ones(1, 2)] * m, training=True))
    return [made for made in hands.made if made not in before]


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(("v", "schedule"), [(v, schedule) for v, names in SCHEDULES.items() for schedule in names])
def test_the_first_step_waits_for_no_connection(p: int, v: int, schedule: str, pool: Pool, tmp_path: Path) -> None:
    late = pool.run(first_step, world_size=p, args=(str(tmp_path / "store"), schedule, p, v, 2 * p, True))
    assert late == [[]] * p


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_a_first_step_over_fresh_connections_would_hang(schedule: str, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"hangs: rank \d does not come to messages"):
        pool.run(first_step, world_size=2, args=(str(tmp_path / "store"), schedule, 2, 2, 1, False))


class FirstAction:
    """Notes what was connected when the first program began."""

    def __init__(self, hands: Any) -> None:
        self._hands = hands
        self.before: list[Any] | None = None

    def began(self, schedule: Any) -> None:
        self.before = list(self._hands.made) if self.before is None else self.before

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class LitWatched(LitNet):
    """Tells the observer of its strategy's."""

    def on_train_start(self) -> None:
        self.trainer.strategy.observers.add(self.trainer.first_action)


def fit(rank: int, folder: str, world: int, options: dict[str, Any]) -> Any:
    # What gloo has instead of two collectives, messages between all, NCCL never runs.
    never = mock.patch.object(reduction, "_is_gloo", return_value=False)
    with never, handshaking(dist.FileStore(folder, world), limit_s=30.0) as hands:
        trainer = make_trainer(Place(world_size=world, layout=options), max_steps=2, gradient_clip_val=0.5)
        trainer.first_action = FirstAction(hands)
        trainer.fit(LitWatched(), loader())
        before = trainer.first_action.before
    return [made for made in hands.made if made not in before]


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2, "num_microbatches": 4},
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "shard_optimizer": True},
        {"num_microbatches": 2, "shard_optimizer": True, "data_parallel_replicas": 2},
    ],
    ids=["p2 d2", "p2 d2 sharded", "d4 in two levels"],
)
def test_a_fit_makes_no_connection_inside_a_step(options: dict[str, Any], pool: Pool, tmp_path: Path) -> None:
    late = pool.run(fit, world_size=4, args=(str(tmp_path / "store"), 4, options))
    assert late == [[]] * 4
