"""Every schedule with every way to sum and to keep the optimizer, in single precision and in
bfloat16 with masters."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.parity import Frozen, Run, assert_same, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": {"virtual_pipeline_size": 2},
    "zb_h1": {},
    "zb_v": {"virtual_pipeline_size": 2},
    "dualpipe_v": {"virtual_pipeline_size": 2},
}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "flat": (4, {"num_microbatches": 4}),
    "sharded": (4, {"num_microbatches": 4, "shard_optimizer": True}),
    "two levels": (8, {"num_microbatches": 2, "data_parallel_replicas": 2}),
    "sharded in two levels": (
        8,
        {"num_microbatches": 2, "data_parallel_replicas": 2, "shard_optimizer": True},
    ),
}
SETTINGS: dict[str, Any] = {"steps": 4, "accumulate": 2, "global_batch": 16}


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Between whole models, relatively: single elements with hardly any gradient may go either
    way."""
    left, right = (
        torch.cat([state[name].double().flatten() for name in expected])
        for state in (found, expected)
    )
    return float((left - right).norm() / right.norm())


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


def run_of(schedule: str, mode: str, **settings: Any) -> Run:
    world_size, layout = MODES[mode]
    layout = {
        "pipeline_parallel_size": 2,
        "schedule": schedule,
        "bucket_mb": 1e-2,
        **SCHEDULES[schedule],
        **layout,
    }
    return Run(world_size=world_size, layout=layout, **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_single_precision(schedule: str, mode: str, pool: Pool, reference: Any) -> None:
    expected = reference(**SETTINGS)
    assert min(expected["norms"]) > 0.05, "the clipping threshold must bite"
    run = run_of(schedule, mode, **SETTINGS)
    for found in pool.run(fit, world_size=run.world_size, args=(run,)):
        assert_same(found, expected)


@pytest.mark.parametrize("mode", ["flat", "sharded", "sharded in two levels"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_with_masters(schedule: str, mode: str, pool: Pool, reference: Any) -> None:
    """Microbatches of the same size as in the reference, so that only the order of float32 sums
    differs."""
    settings = {
        **SETTINGS,
        "count_tokens": False,
        "ignore_padding": False,
        "precision": "bf16-true",
    }
    run = run_of(schedule, mode, **settings)
    expected = reference(layout={"num_microbatches": 8}, **settings)
    for found in pool.run(fit, world_size=run.world_size, args=(run,)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-2)
        assert distance(found["final"], expected["final"]) < 4e-3
