"""Every schedule on real processes matches the whole model and runs in program order."""

import dataclasses
from functools import cache

import pytest
import torch

from lightning_ptdp.schedule import ActionKind, dump_schedule, peak_in_flight
from tests.pipeline.grid import TIED, Case, cases, make_batch, unsplit
from tests.pipeline.watched import Rank, assert_same, summed

pytestmark = pytest.mark.thorough

MICROBATCHES = (8, 1, 2, 3, 5)
GRID = [case for p in (1, 2, 3, 4) for case in cases(p)]
SPLIT = [case for case in GRID if case.build(1).splits_backward]

"""By number of microbatches; one outcome per rank."""


def _run_case(rank, case):
    """Run every number of microbatches, and the last one again with blocking sends."""
    here = Rank(case.build(1))
    outcomes = {}
    for m in (*MICROBATCHES, -MICROBATCHES[-1]):
        here.rendezvous(m < 0)
        here.net.zero_grad()
        outcomes[m] = here.step(case.build(abs(m)), make_batch(abs(m)))
    return outcomes


@pytest.fixture(scope="module")
def steps(pool):
    """Return a function that runs a case.

    By number of microbatches, it gives the schedule, the expected values and the outcomes of all
    ranks. A negative number means blocking sends."""

    @cache
    def of(case):
        ranks = pool.run(_run_case, world_size=case.p, args=(case,))
        return {
            m: (
                case.build(abs(m)),
                unsplit(abs(m), stages=case.p * case.v),
                [outcomes[m] for outcomes in ranks],
            )
            for m in ranks[0]
        }

    return of


@pytest.mark.parametrize("case", GRID, ids=str)
def test_losses_and_gradients_match_whole_model(case, steps):
    for m, (schedule, expected, outcomes) in steps(case).items():
        last = schedule.rank_of(schedule.num_stages - 1)
        assert [rank for rank, outcome in enumerate(outcomes) if outcome.losses] == [last]
        losses = outcomes[last].losses
        assert [losses[i] for i in range(abs(m))] == pytest.approx(expected.losses, rel=1e-12)
        assert_same(summed(outcomes), expected.gradients, f"m={m}")


@pytest.mark.parametrize("case", GRID, ids=str)
def test_computations_follow_program_order(case, steps):
    for schedule, _, outcomes in steps(case).values():
        kinds = {
            ActionKind.FORWARD,
            *((ActionKind.BACKWARD, ActionKind.WEIGHT) if schedule.splits_backward else ()),
        }
        for program, outcome in zip(schedule.programs, outcomes, strict=True):
            assert outcome.computed == [str(action) for action in program if action.kind in kinds]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_stage_is_reduced_once_after_its_last_gradient(case, steps):
    for m, (schedule, expected, outcomes) in steps(case).items():
        for program, outcome in zip(schedule.programs, outcomes, strict=True):
            assert outcome.told == _last_gradients_and_reductions(program)
            assert not outcome.late, (
                f"m={m}: gradients changed after they were reported as complete: {outcome.late}"
            )
            for stage, (remaining, awaited) in outcome.remaining.items():
                last = _last_gradient(program, stage)
                assert (awaited is None) == (last.kind is ActionKind.BACKWARD)
                part = expected.parts[last.microbatch or 0]
                # Gradients that are not awaited were complete before.
                due = {
                    n: part[n] if awaited is None or n in awaited else torch.zeros_like(part[n])
                    for n in remaining
                }
                assert_same(remaining, due, f"m={m}, after the call before {last}")
            awaited_names = [
                name for _, awaited in outcome.remaining.values() for name in awaited or ()
            ]
            assert sorted(outcome.completed) == sorted(awaited_names)


def _last_gradient(program, stage):
    return [
        a
        for a in program
        if a.stage == stage and a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)
    ][-1]


def _last_gradients_and_reductions(program):
    told = []
    for action in program:
        if action.kind is ActionKind.REDUCE:
            told.append(("reduce", action.stage))
        elif action == _last_gradient(program, action.stage):
            told.append(("last", action.stage))
    return told


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_weight_gradients_are_deferred_to_their_action(case, steps):
    """Before the first W of a stage, no matrix or bias of its blocks has a gradient."""
    for m, (schedule, _, outcomes) in steps(case).items():
        for rank, outcome in enumerate(outcomes):
            assert set(outcome.kept) == set(schedule.stages_of(rank))
            early = [
                name
                for _, early in outcome.kept.values()
                for name in early
                if name not in TIED.values()
            ]
            assert not early, f"m={m}: gradients before their action: {early}"
            waiting = {name for kept, early in outcome.kept.values() for name in (*kept, *early)}
            products = {name for name in outcome.gradients if ".up." in name or ".down." in name}
            head = (
                set(TIED.values()) if schedule.num_stages - 1 in schedule.stages_of(rank) else set()
            )
            assert waiting == products | head


@pytest.mark.parametrize("case", GRID, ids=str)
def test_live_activations_match_peak_in_flight(case, steps):
    for m, (schedule, _, outcomes) in steps(case).items():
        for program, outcome in zip(schedule.programs, outcomes, strict=True):
            assert outcome.held == peak_in_flight(program), f"m={m}"


@pytest.mark.parametrize("case", [case for case in GRID if case.p > 1], ids=str)
def test_output_is_freed_after_send(case, steps):
    *_, outcomes = steps(case)[-MICROBATCHES[-1]]
    assert [outcome.unsent for outcome in outcomes] == [0] * case.p


# ---- recomputation, accumulation, dtypes, failures -----------------------------------------------

PAIRS = [case for case in GRID if case.p == 2 and case.v < 3]


def _run_recomputed(rank, case, policy):
    return Rank(case.build(1), recompute=policy).step(case.build(3), make_batch(3))


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_recomputation_keeps_gradients_and_runs_layers_twice(case, policy, pool):
    outcomes = pool.run(_run_recomputed, world_size=2, args=(case, policy))
    assert_same(summed(outcomes), unsplit(3, stages=2 * case.v).gradients, policy)
    for rank, outcome in enumerate(outcomes):
        layers = len([name for name in outcome.gradients if name.endswith("up.bias")])
        assert outcome.calls == 2 * 3 * layers, "each layer must run twice per microbatch"
        early = [
            name
            for _, early in outcome.kept.values()
            for name in early
            if name not in TIED.values()
        ]
        assert not early, f"rank {rank}: gradients before their action: {early}"
        assert sum(len(kept) for kept, _ in outcome.kept.values()) >= 4 * layers * (case in SPLIT)


def _run_several_steps(rank, case):
    """Accumulate gradients over batches of different shapes, with evaluation in between."""
    here, found = Rank(case.build(1)), []
    for m, seed, training in SEVERAL:
        outcome = here.step(
            case.build(m, training=training), make_batch(m, seed=seed), training=training
        )
        found.append((outcome, here.transport.headers))
    return found


SEVERAL = [(3, 0, True), (2, 0, False), (2, 1, True), (5, 1, False), (3, 0, True), (2, 0, False)]
"""(microbatches, seed, training)."""


@pytest.fixture(scope="module")
def several(pool):
    """Return a function that gives each rank's step outcomes and numbers of received headers."""
    return cache(lambda case: pool.run(_run_several_steps, world_size=2, args=(case,)))


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_gradient_accumulation_with_changing_shapes_and_evaluation(case, several):
    ranks, schedule = several(case), case.build(1)
    last = schedule.rank_of(schedule.num_stages - 1)
    total = {}
    before = {}
    for index, (m, seed, training) in enumerate(SEVERAL):
        outcomes, where = [found[index][0] for found in ranks], f"step {index}"
        expected = unsplit(m, seed=seed, stages=2 * case.v)
        assert [outcomes[last].losses[i] for i in range(m)] == pytest.approx(
            expected.losses, rel=1e-12
        )
        if training:
            total = {
                name: total.get(name, 0) + gradient for name, gradient in expected.gradients.items()
            }
        else:
            assert all(
                torch.equal(summed(outcomes)[name], value) for name, value in before.items()
            ), where
            assert not any(outcome.told for outcome in outcomes), where
        before = summed(outcomes)
        assert_same(before, total, where)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_header_is_sent_once_per_shape(case, several):
    ranks, schedule = several(case), case.build(1)
    shapes = set()
    for index, (m, seed, training) in enumerate(SEVERAL):
        shapes |= {
            (training, tuple(microbatch.ids.shape)) for microbatch in make_batch(m, seed=seed)
        }
        for rank, found in enumerate(ranks):
            behind = [s for s in schedule.stages_of(rank) if s and schedule.rank_of(s - 1) != rank]
            assert found[index][1] == len(behind) * len(shapes), f"step {index}, rank {rank}"


def _run_bfloat16(rank, case):
    return Rank(case.build(1), dtype=torch.bfloat16).step(case.build(3), make_batch(3))


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_bfloat16_gradients_match_whole_model(case, pool):
    found = summed(pool.run(_run_bfloat16, world_size=2, args=(case,)))
    expected = unsplit(3, stages=2 * case.v, dtype=torch.bfloat16).gradients
    for name, value in expected.items():
        assert found[name].dtype is torch.bfloat16
        assert (found[name] - value).norm() < 0.02 * value.norm(), name


@pytest.mark.parametrize("case", cases(1), ids=str)
def test_failed_step_leaves_no_state(case):
    here, batch = Rank(case.build(1)), make_batch(3)
    broken = [*batch[:2], dataclasses.replace(batch[2], ids=batch[2].ids + 1000)]
    with pytest.raises(IndexError):
        here.step(case.build(3), broken)
    here.net.zero_grad()
    assert_same(
        here.step(case.build(3), batch).gradients,
        unsplit(3, stages=1).gradients,
        "the step after",
    )


def test_schedule_from_file_matches_whole_model(pool, tmp_path):
    path = str(tmp_path / "mine.csv")
    dump_schedule(Case("zb_v", 3, 2).build(4), path)
    outcomes = pool.run(_run_file, world_size=3, args=(Case(path, 3, 2),))
    assert_same(summed(outcomes), unsplit(4, stages=6).gradients, "from a file")
    assert all(outcome.kept for outcome in outcomes)


def _run_file(rank, case):
    return Rank(case.build(4)).step(case.build(4), make_batch(4))
