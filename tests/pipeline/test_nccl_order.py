"""The messages of real steps are those of the NCCL model (tests/schedule/nccl.py), in its order."""

import pytest
import torch
from torch import nn

from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.p2p import Transport
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule import build_schedule
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.pipeline.jobs import SumJob
from tests.queued import HOST
from tests.schedule.nccl import Habits, operations

pytestmark = pytest.mark.thorough

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb_h1", 1),
    ("gpipe", 2),
    ("interleaved_1f1b", 2),
    ("zb_v", 2),
    ("dualpipe_v", 2),
)


def two_steps(rank, name, p, v, m, training):
    """Return the messages of each of two steps on this rank.

    A message is ("send" or "recv", source, destination, direction).
    """
    sizes = {"pipeline_parallel_size": p, "virtual_pipeline_size": v}
    schedule = build_schedule(name, num_microbatches=m, training=training, **sizes)
    layout = ParallelLayout(world_size=p, placement=schedule.placement, **sizes)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(p * v)))
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    lines = {handle.identity: line for line, handle in mesh.channels.items()}
    ranges = tuple((stage, stage + 1) for stage in range(p * v))
    cut = PipelineCut(
        model,
        parts=find_parts(model, ParallelPlan(blocks="")),
        ranges=ranges,
        stages=tuple(schedule.stages_of(rank)),
    )
    link = Transport(mesh=mesh, device=torch.device("cpu"))
    runtime = PipelineRuntime(cut=cut, transport=link, group=mesh.group("pipeline"))
    steps = []
    for _ in range(2):
        before = len(HOST.calls)
        runtime.run(schedule, SumJob(model, [torch.ones(1, 2)] * m, training=training))
        steps.append(
            [(call.what, *lines[call.group]) for call in HOST.calls[before:] if call.group in lines]
        )
    return steps


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
def test_runtime_issues_messages_of_nccl_model(name, v, pool):
    for p, m, training in ((2, 3, True), (4, 6, True), (4, 6, False)):
        real = pool.run(two_steps, world_size=p, args=(name, p, v, m, training), backend="queued")
        schedule = build_schedule(
            name,
            pipeline_parallel_size=p,
            virtual_pipeline_size=v,
            num_microbatches=m,
            training=training,
        )
        for step, habits in enumerate((Habits(first_step=True), Habits())):
            for rank, given in enumerate(operations(schedule, habits)):
                lines = [
                    operation.stream[0]
                    for operation in given
                    if isinstance(operation.stream, tuple)
                ]
                expected = [("send" if line.source == rank else "recv", *line) for line in lines]
                assert real[rank][step] == expected, (p, m, training, step, rank)
