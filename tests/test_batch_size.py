"""Batch sizes (global batch = b * m * d) and a ramp over the consumed samples."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.schedule import build_schedule, dump_schedule
from lightning_ptdp.strategy.checks.data import check_data
from lightning_ptdp.world.batch_size import BatchPlan, RampUp
from lightning_ptdp.world.layout import ParallelLayout
from tests.errors import raises_with

pytestmark = pytest.mark.pure

SIZES = st.integers(1, 64)


@given(b=SIZES, m=SIZES, d=SIZES)
def test_any_two_batch_sizes_determine_the_third(b, m, d):
    plan = BatchPlan(micro_batch_size=b, num_microbatches=m, data_parallel_size=d)
    assert plan.global_batch == b * m * d
    for left_out in ("global_batch_size", "micro_batch_size", "num_microbatches", None):
        known = {
            "global_batch_size": plan.global_batch,
            "micro_batch_size": b,
            "num_microbatches": m,
        }
        known.pop(left_out or "", None)
        assert BatchPlan.derive(data_parallel_size=d, **known) == plan


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"global_batch_size": 12, "micro_batch_size": 4, "data_parallel_size": 2},
            ["12", "4 * 2", "8 or 16", "2 or 3 or 6"],
        ),
        (
            {"global_batch_size": 12, "num_microbatches": 5, "data_parallel_size": 1},
            ["num_microbatches", "10 or 15"],
        ),
        (
            {
                "global_batch_size": 16,
                "micro_batch_size": 2,
                "num_microbatches": 3,
                "data_parallel_size": 2,
            },
            ["16", "= 12", "=4"],
        ),
        ({"global_batch_size": 16, "data_parallel_size": 2}, ["two of them"]),
        (
            {"global_batch_size": 0, "micro_batch_size": 2, "data_parallel_size": 2},
            ["global_batch_size=0", "positive"],
        ),
    ],
)
def test_inconsistent_batch_sizes_are_refused_with_alternatives(sizes, words):
    with raises_with(words):
        BatchPlan.derive(**sizes)


def test_ramp_grows_with_consumed_samples():
    ramp = RampUp(start=8, stop=32, increment=8, samples=90)
    taken, sizes = 0, []
    for step in range(10):
        assert ramp.consumed(step) == taken
        sizes.append(ramp.global_batch(taken))
        taken += sizes[-1]
    assert sizes == [8, 8, 8, 8, 16, 16, 24, 24, 32, 32]
    assert [
        plan.num_microbatches for plan in ramp.plans(data_parallel_size=2, micro_batch_size=4)
    ] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": 8, "stop": 4, "increment": 1, "samples": 9}, "stop=4 is smaller than start=8"),
        (
            {"start": 8, "stop": 20, "increment": 5, "samples": 9},
            "increment=5 does not divide stop - start = 20 - 8",
        ),
        (
            {"start": 8, "stop": 16, "increment": 8, "samples": 0},
            "samples=0 must be a positive integer",
        ),
    ],
)
def test_invalid_ramp_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        RampUp(**fields)


RAMPS = st.builds(
    lambda start, increment, growths, samples: RampUp(
        start=start, stop=start + increment * growths, increment=increment, samples=samples
    ),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(1, 300),
)


@given(ramp=RAMPS, first=st.integers(0, 40), count=st.integers(0, 60), rest=st.integers(0, 100))
def test_ramp_step_counts_match_step_by_step_sum(ramp, first, count, rest):
    taken = [first]
    for _ in range(count):
        taken.append(taken[-1] + ramp.global_batch(taken[-1]))
    assert ramp.consumed(count, start=first) == taken[-1] - first
    assert ramp.steps(taken[-1] - first, start=first) == count
    size, alike = ramp.stretch(first)
    sizes = [later - earlier for earlier, later in pairwise(taken)]
    assert all(other == size for other in sizes[:alike])
    assert alike is None or alike >= len(sizes) or sizes[alike] > size
    enough = ramp.steps(rest, start=first)
    assert ramp.consumed(enough, start=first) <= rest < ramp.consumed(enough + 1, start=first)


@given(ramp=RAMPS, surplus=st.integers(0, 30), epochs=st.integers(1, 12))
def test_ramp_epoch_steps_add_up(ramp, surplus, epochs):
    samples, taken, steps = ramp.stop + surplus, 0, 0
    for _ in range(epochs):
        here = ramp.epoch_steps(taken, samples=samples)
        inside = taken + ramp.consumed(here - 1, start=taken)
        assert ramp.epoch_steps(inside, samples=samples) == here
        taken, steps = taken + ramp.consumed(here, start=taken), steps + here
    assert ramp.steps_of_epochs(epochs, samples=samples) == steps
    assert ramp.consumed(steps) == taken


def test_number_of_microbatches_follows_batch_size():
    config = PTDPConfig(pipeline_parallel_size=2, micro_batch_size=4)
    assert [config.microbatches(samples) for samples in (1, 4, 5, 16)] == [1, 1, 2, 4]
    assert config.usual_microbatches is None
    assert config.has_microbatches
    assert PTDPConfig(pipeline_parallel_size=2).microbatches(100) == 8
    assert not PTDPConfig().has_microbatches


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be a positive integer"),
        (
            {"micro_batch_size": 2, "num_microbatches": 4},
            "num_microbatches=4 and micro_batch_size=2 are both set. Set only one of them",
        ),
    ],
)
def test_invalid_microbatch_options_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        PTDPConfig(**fields)


def test_batch_plans_are_checked_against_strategy(tmp_path):
    class Data:
        def batch_plans(self, *, num_replicas):
            ramp = RampUp(start=8, stop=16, increment=8, samples=90)
            return ramp.plans(data_parallel_size=num_replicas, micro_batch_size=2)

    layout = ParallelLayout(world_size=4, pipeline_parallel_size=2)
    check_data(Data(), PTDPConfig(pipeline_parallel_size=2, micro_batch_size=2), layout)
    with pytest.raises(
        ValueError,
        match=r"micro_batch_size=8 is larger than the batch of 4 samples .* Use "
        r"micro_batch_size=4 or less",
    ):
        check_data(Data(), PTDPConfig(pipeline_parallel_size=2, micro_batch_size=8), layout)
    path = tmp_path / "order.csv"
    dump_schedule(build_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=4), path)
    with pytest.raises(
        ValueError,
        match=r"batch of 4 samples into 2 microbatches.*is written for num_microbatches=4",
    ):
        check_data(
            Data(),
            PTDPConfig(pipeline_parallel_size=2, micro_batch_size=2, schedule=str(path)),
            layout,
        )


def test_overflowing_global_batch_is_refused_with_its_factors():
    with pytest.raises(
        ValueError,
        match=r"micro_batch_size=1000000000000 \* num_microbatches=8 \* "
        r"data_parallel_size=1000000000000 is",
    ):
        BatchPlan.derive(data_parallel_size=10**12, micro_batch_size=10**12, num_microbatches=8)
