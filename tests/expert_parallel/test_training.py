"""A mixture with its experts shared out trains as on one process: every clipped step, whatever its
router does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.expert_parallel.toy import LitMixture, Run, fit, trainer_of
from tests.letters import E, M, P, V, Z
from tests.pool import Pool, WorkerFailure

pytestmark = pytest.mark.thorough


def check(pool: Pool, run: Run, expected: dict[str, Any] | None = None) -> None:
    expected = (
        expected or pool.run(fit, world_size=1, args=(replace(run, world_size=1, layout={}),))[0]
    )
    assert min(expected["norms"]) > run.clip, "the clipping threshold must bite"
    for found in pool.run(fit, world_size=run.world_size, args=(run,)):
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=0)
        assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        for name, value in expected["final"].items():
            assert torch.equal(found["initial"][name], expected["initial"][name]), (
                f"{name} starts differently"
            )
            torch.testing.assert_close(
                found["final"][name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("routing", ["own", "one"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, {E: 2}, marks=pytest.mark.quick),
        (4, {E: 4, M: 2}),
        (4, {E: 2, Z: True}),
        pytest.param(4, {E: 2, P: 2, V: 2, M: 2}, marks=pytest.mark.quick),
        (4, {E: 2, P: 2, M: 2, "schedule": "zb_h1"}),
        (2, {E: 2, "recompute": "full"}),
    ],
    ids=["e2", "e4 m2", "d2 e2 zero", "p2 v2 e2", "p2 e2 zb_h1", "e2 recompute"],
)
def test_same_weights_as_one_process(
    world_size: int, layout: dict[str, Any], routing: str, pool: Pool
) -> None:
    check(pool, Run(world_size=world_size, layout=layout, routing=routing))


def test_a_rank_has_its_part_of_the_experts(pool: Pool) -> None:
    (whole,) = pool.run(fit, world_size=1, args=(Run(steps=1),))
    for found in pool.run(fit, world_size=4, args=(Run(world_size=4, layout={E: 4}, steps=1),)):
        assert 4 * found["numbers"] == whole["numbers"]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {E: 2}), (4, {E: 2, P: 2, M: 2}), (2, {})],
    ids=["e2", "p2 e2", "d2"],
)
def test_a_checkpoint_goes_on_in_another_layout(
    world_size: int, layout: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "four.ckpt")
    begun = Run(world_size=4, layout={E: 4}, steps=3, save=folder)
    (saved, *_) = pool.run(fit, world_size=4, args=(begun,))
    run = Run(world_size=world_size, layout=layout, resume=folder)
    (expected,) = pool.run(fit, world_size=1, args=(Run(resume=folder),))
    for found in pool.run(fit, world_size=world_size, args=(run,)):
        for name, value in saved["final"].items():
            assert torch.equal(found["initial"][name], value), name
            torch.testing.assert_close(
                found["final"][name], expected["final"][name], rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (
            "nowhere",
            r"the router of 'layers.0.experts' chose experts that do not exist \d+ times \(valid: 0 "
            r"to 3\)",
        ),
        (
            "nan",
            r"the router of 'layers.0.experts' returned 48 weights that are not finite, on rank "
            r"\d+(.|\n)*microbatch 0, stage 0",
        ),
    ],
)
def test_a_router_that_errs_is_named(routing: str, said: str, pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=said):
        pool.run(fit, world_size=2, args=(Run(world_size=2, layout={E: 2}, routing=routing),))


def test_replicas_that_evaluate_unequally_often_are_refused(pool: Pool) -> None:
    with pytest.raises(WorkerFailure, match=r"expert_parallel_size=2 .* same number of batches"):
        pool.run(fit, world_size=2, args=(Run(world_size=2, layout={E: 2}, uneven=True),))


@pytest.mark.parametrize(
    ("world_size", "layout", "plan", "said"),
    [
        (
            2,
            {E: 2},
            False,
            r"expert_parallel_size=2 .* no experts were found in LitMixture.*expert_parallel_size=1",
        ),
        (
            4,
            {E: 4, P: 2},
            True,
            r"expert_parallel_size=4 does not divide 2, the ranks of context and data parallelism.* "
            r"\[1, 2\]",
        ),
        (
            3,
            {E: 3},
            True,
            r"'layers.0.experts': number of experts=4 is not divisible by "
            r"expert_parallel_size=3.*\[1, 2, 4\]",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_launch(
    world_size: int, layout: dict[str, Any], plan: bool, said: str
) -> None:
    run = Run(world_size=world_size, layout=layout | {"start_method": "fork"}, plan=plan)
    with pytest.raises(ValueError, match=said):
        trainer_of(run).fit(LitMixture(run), [])
