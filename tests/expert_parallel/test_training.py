"""A user's mixture with distributed experts, compared with a single process."""

import warnings

import pytest

from tests.expert_parallel.toy import LitMixture, Run
from tests.letters import E, M, P, V, Z
from tests.parity import assert_weights_near, fit
from tests.pool import WorkerFailure

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("routing", ["own", "one"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, {E: 2}, marks=pytest.mark.quick),
        (4, {E: 4, M: 2}),
        (4, {E: 2, Z: "optimizer"}),
        pytest.param(4, {E: 2, P: 2, V: 2, M: 2}, marks=pytest.mark.quick),
        (4, {E: 2, P: 2, M: 2, "schedule": "zb_h1"}),
        (2, {E: 2, "recompute": "full"}),
    ],
    ids=["e2", "e4 m2", "d2 e2 zero", "p2 v2 e2", "p2 e2 zb_h1", "e2 recompute"],
)
def test_weights_equal_single_process(world_size, layout, routing, parity):
    parity.check(Run(routing=routing), (world_size, layout))


def fit_with_warnings(rank, run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(rank, run)
    return [str(one.message) for one in caught]


def test_counts_of_as_many_ranks_as_samples_do_not_warn(pool):
    run = Run(steps=1, global_batch=4).on((2, {E: 2}))
    for told in pool.run(fit_with_warnings, world_size=2, args=(run,)):
        assert not [one for one in told if "over dimension 0" in one]


def test_rank_holds_its_shard_of_experts(parity):
    run = Run(steps=1)
    whole = parity.result(run)
    for found in parity.ranks(run.on((4, {E: 4}))):
        assert 4 * found["numbers"] == whole["numbers"]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {E: 2}), (4, {E: 2, P: 2, M: 2}), (2, {})],
    ids=["e2", "p2 e2", "d2"],
)
def test_checkpoint_resumes_in_other_layout(world_size, layout, parity, tmp_path):
    folder = str(tmp_path / "four.ckpt")
    saved, *_ = parity.ranks(Run(steps=2, save=folder).on((4, {E: 4})))
    for found in parity.check(Run(resume=folder), (world_size, layout)):
        assert_weights_near(found["initial"], saved["final"], tolerance=0)


@pytest.mark.parametrize(
    ("routing", "said"),
    [
        (
            "nowhere",
            r"the router of 'layers.0.experts' on rank \d+ chose experts that do not exist \d+ times "
            r"\(valid: 0 to 3\)",
        ),
        (
            "nan",
            r"the router of 'layers.0.experts' on rank \d+ returned 48 weights that are not "
            r"finite(.|\n)*microbatch 0, stage 0",
        ),
    ],
)
def test_faulty_router_is_named(routing, said, parity):
    with pytest.raises(WorkerFailure, match=said):
        parity.ranks(Run(routing=routing).on((2, {E: 2})))


def test_uneven_validation_batches_are_refused(parity):
    with pytest.raises(WorkerFailure, match=r"expert_parallel_size=2 .* same number of batches"):
        parity.ranks(Run(uneven=True).on((2, {E: 2})))


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
def test_invalid_expert_parallel_size_is_refused_before_launch(world_size, layout, plan, said):
    run = Run(world_size=world_size, layout=layout | {"start_method": "fork"}, plan=plan)
    with pytest.raises(ValueError, match=said):
        run.make_trainer().fit(LitMixture(run), [])
