"""Steps on a backend with NCCL's behaviour (tests/queued.py) make no new connections. Real
processes."""

import contextlib
from datetime import timedelta
from unittest import mock

import pytest

from lightning_ptdp.world import mesh as mesh_module
from tests import queued
from tests.pipeline.grid import Case, make_batch, unsplit
from tests.pipeline.watched import Rank, assert_same, summed
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough

SCHEDULES = {1: ("gpipe", "1f1b", "zb_h1"), 2: ("interleaved_1f1b", "zb_v", "dualpipe_v")}


def steps(rank, case, m, connected):
    """Run two training steps and one evaluation; return the late connections and the outcomes."""
    with contextlib.ExitStack() as stack:
        if not connected:
            stack.enter_context(mock.patch.object(mesh_module, "_connect_channel"))
            stack.enter_context(mock.patch.object(queued, "LIMIT", timedelta(seconds=2)))
        here = Rank(case.build(1))
        before, outcomes = list(queued.HOST.met), []
        for training in (True, True, False):
            here.net.zero_grad()
            outcomes.append(
                here.step(case.build(m, training=training), make_batch(m), training=training)
            )
    return [made for made in queued.HOST.met if made not in before], outcomes


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(
    ("v", "schedule"), [(v, schedule) for v, names in SCHEDULES.items() for schedule in names]
)
def test_steps_match_whole_model_without_new_connections(p, v, schedule, pool):
    case, m = Case(schedule, p, v), p + 2
    ranks = pool.run(steps, world_size=p, args=(case, m, True), backend="queued")
    assert [late for late, _ in ranks] == [[]] * p
    expected, last = unsplit(m, stages=p * v), case.build(1).rank_of(p * v - 1)
    for step, training in enumerate((True, True, False)):
        outcomes = [outcomes[step] for _, outcomes in ranks]
        assert [outcomes[last].losses[i] for i in range(m)] == pytest.approx(
            expected.losses, rel=1e-12
        )
        assert_same(summed(outcomes), expected.gradients if training else {}, f"step {step}")


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
def test_first_step_without_connected_channels_hangs(schedule, pool):
    with pytest.raises(WorkerFailure, match=r"hangs: rank \d does not come to messages"):
        pool.run(steps, world_size=2, args=(Case(schedule, 2, 2), 1, False), backend="queued")
