"""Schedules with gradient reductions, in float32 and in bfloat16 with masters."""

from dataclasses import replace

import pytest

from tests.parity import assert_near, distance
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"virtual_pipeline_size": 2},
    "zb_h1": {},
    "zb_v": {"virtual_pipeline_size": 2},
    "dualpipe_v": {"virtual_pipeline_size": 2},
}
MODES = {
    "flat": (4, {"num_microbatches": 4}),
    "sharded": (4, {"num_microbatches": 4, "shard": "optimizer"}),
    "sharded gradients": (4, {"num_microbatches": 4, "shard": "gradients"}),
    "sharded parameters": (4, {"num_microbatches": 4, "shard": "parameters"}),
    "two levels": (8, {"num_microbatches": 2, "data_parallel_replicas": 2}),
    "sharded in two levels": (
        8,
        {"num_microbatches": 2, "data_parallel_replicas": 2, "shard": "optimizer"},
    ),
    "sharded parameters in two levels": (
        8,
        {"num_microbatches": 2, "data_parallel_replicas": 2, "shard": "parameters"},
    ),
}
RUN = Run(accumulate=2, global_batch=16)


def place_of(schedule, mode):
    world_size, layout = MODES[mode]
    pipeline = {"pipeline_parallel_size": 2, "schedule": schedule, "bucket_mb": 1e-2}
    return world_size, {**pipeline, **SCHEDULES[schedule], **layout}


# A reduction in two levels, or to the shards of the optimizer, starts when a flat one starts: it is
# the same bucket. So it is trained with one schedule that computes weight gradients in the backward
# pass, and with one that defers them.
WITH_EACH_SCHEDULE = ("flat", "sharded gradients", "sharded parameters")
FLOAT32 = [
    (schedule, mode)
    for schedule in SCHEDULES
    for mode in MODES
    if mode in WITH_EACH_SCHEDULE or schedule in ("interleaved_1f1b", "zb_v")
]
# Masters are updated after the reduction, so each schedule and each reduction is trained once or
# twice, not each pair.
BFLOAT16 = [
    ("gpipe", "flat"),
    ("1f1b", "sharded"),
    ("interleaved_1f1b", "sharded gradients"),
    ("zb_h1", "flat"),
    ("zb_v", "sharded"),
    ("dualpipe_v", "sharded gradients"),
    ("zb_v", "sharded in two levels"),
]


@pytest.mark.parametrize(("schedule", "mode"), FLOAT32)
def test_float32_equals_single_process(schedule, mode, parity):
    parity.check(RUN, place_of(schedule, mode))


@pytest.mark.parametrize(("schedule", "mode"), BFLOAT16)
def test_bfloat16_with_masters_is_close_to_single_process(schedule, mode, parity):
    """Microbatches have the size of the reference run; only the order of float32 sums differs."""
    run = replace(
        RUN,
        layout={"num_microbatches": 8},
        count_tokens=False,
        ignore_padding=False,
        precision="bf16-true",
    )
    expected = parity.result(run)
    for found in parity.ranks(run.on(place_of(schedule, mode))):
        assert_near(found["losses"], expected["losses"], 1e-2, "losses")
        assert distance(found["final"], expected["final"]) < 4e-3
