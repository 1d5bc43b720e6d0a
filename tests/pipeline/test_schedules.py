"""What the schedules promise: order, memory, names, and that all of them are proven."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from lightning_ptdp.pipeline import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    Schedule,
    actions,
    build_schedule,
    lowering,
    peak_in_flight,
    schedules,
    simulate,
)
from lightning_ptdp.pipeline.verify import verify_schedule

RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD)


def build(name: str, p: int, v: int, m: int, training: bool = True) -> Schedule:
    return build_schedule(name, pipeline_parallel_size=p, virtual_pipeline_size=v, num_microbatches=m, training=training)


def allowed(name: str, p: int, v: int) -> bool:
    if p == 1:
        return v == 1
    return {"1f1b": v == 1, "interleaved_1f1b": v > 1}.get(name, True)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_proven(name: str, p: int) -> None:
    for v in range(1, 5):
        for m in range(1, 18):
            if not allowed(name, p, v):
                continue
            schedule = build(name, p, v, m)  # build_schedule verifies
            assert schedule.num_stages == p * v
            assert len(schedule.programs) == p
            compute = [action for program in schedule.programs for action in program if action.kind in COMPUTE]
            assert len(compute) == 2 * p * v * m
            if p == 1:
                assert all(action.kind in (*COMPUTE, ActionKind.REDUCE) for action in schedule.programs[0])
                assert peak_in_flight(schedule.programs[0]) == 1


@pytest.mark.parametrize(("p", "v", "m"), [(11, 2, 21), (13, 3, 38), (16, 2, 31), (16, 4, 47), (31, 2, 61), (9, 6, 17)])
def test_large_sizes_with_a_remainder(p: int, v: int, m: int) -> None:
    for name in ("gpipe", "interleaved_1f1b"):
        assert build(name, p, v, m).num_microbatches == m


@pytest.mark.parametrize("p", range(1, 9))
def test_evaluation_has_forwards_alone(p: int) -> None:
    for v in range(1, 5 if p > 1 else 2):
        for m in range(1, 18):
            schedule = build("auto", p, v, m, training=False)
            assert not schedule.training
            assert schedule.name == "forward_only"
            kinds = {action.kind for program in schedule.programs for action in program}
            assert kinds <= {ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD}


def test_the_peak_is_the_most_held_at_any_time() -> None:
    program = [Action.parse(word) for word in ("F0.0", "F0.1", "B0.0", "B0.1", "F0.2", "B0.2", "R0")]
    assert peak_in_flight(program) == 2
    assert peak_in_flight([]) == 0


def test_1f1b_holds_what_the_paper_says() -> None:
    for p in range(1, 9):
        for m in range(1, 18):
            orders = schedules.one_f_one_b(p, 1, m)
            assert [peak_in_flight(order) for order in orders] == [min(m, p - rank) for rank in range(p)]


def test_interleaved_holds_what_its_docstring_says() -> None:
    for p in range(2, 9):
        for v in range(2, 5):
            for m in range(1, 18):
                largest = m if m < 2 * p else -(-m // (m // p))
                for rank, order in enumerate(schedules.interleaved_one_f_one_b(p, v, m)):
                    assert peak_in_flight(order) == min(v * m, (v - 1) * largest + 2 * (p - rank - 1) + 1)


def test_gradients_of_a_stage_are_summed_in_the_order_of_microbatches() -> None:
    for name, v in (("gpipe", 1), ("gpipe", 3), ("1f1b", 1), ("interleaved_1f1b", 3)):
        for program in build(name, 4, v, 9).programs:
            for kind in COMPUTE:
                for stage in {action.stage for action in program}:
                    order = [action.microbatch for action in program if (action.kind, action.stage) == (kind, stage)]
                    assert order == list(range(9))


@pytest.mark.parametrize(
    ("function", "name", "v", "m", "training"),
    [
        (schedules.gpipe, "gpipe", 1, 8, True),
        (schedules.one_f_one_b, "1f1b", 1, 8, True),
        (schedules.interleaved_one_f_one_b, "interleaved_1f1b", 2, 4, True),
        (schedules.forward_only, "auto", 2, 8, False),
    ],
)
def test_docstrings_show_the_timeline(function: object, name: str, v: int, m: int, training: bool) -> None:
    drawn = simulate(build(name, 4, v, m, training), Costs(forward=1, backward=1)).text()
    shown = [line.strip() for line in (inspect.getdoc(function) or "").splitlines() if line.strip().startswith("rank ")]
    assert shown == drawn.splitlines()


def test_the_printed_programs_are_those_of_the_docstring() -> None:
    shown = [line.strip() for line in (actions.__doc__ or "").splitlines() if line.strip().startswith("rank ")]
    schedule = build("1f1b", 2, 1, 2)
    assert shown == schedule.text().splitlines()
    parsed = tuple(tuple(Action.parse(word) for word in line.split()[2:]) for line in shown)
    assert parsed == schedule.programs


@pytest.mark.parametrize("text", ["", "F", "F3", "X3.1", "R3.1", "F-1.0", "F3.1 ", "f3.1", "SF.1"])
def test_what_is_not_an_action(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as F3\.1"):
        Action.parse(text)


def test_receives_are_posted_one_computation_ahead() -> None:
    for name, p, v, m in (("1f1b", 4, 1, 8), ("gpipe", 4, 2, 8), ("interleaved_1f1b", 4, 2, 8), ("interleaved_1f1b", 3, 2, 2)):
        for program in build(name, p, v, m).programs:
            order = [action for action in program if action.kind in COMPUTE]
            done = 0
            for action in program:
                if action.kind in COMPUTE:
                    done += 1
                elif action.kind in RECEIVES:
                    kind = ActionKind.FORWARD if action.kind is ActionKind.RECEIVE_FORWARD else ActionKind.BACKWARD
                    needed_at = order.index(Action(kind, action.stage, action.microbatch))
                    assert done == max(needed_at - 1, 0)


def test_a_larger_lookahead_posts_earlier_and_is_legal() -> None:
    orders = schedules.one_f_one_b(4, 1, 8)
    for lookahead in (1, 2, 5):
        programs = lowering.lower(orders, pipeline_parallel_size=4, num_stages=4, lookahead=lookahead)
        verify_schedule(Schedule("1f1b", 4, 1, 8, programs), training=True)


def test_reductions_follow_the_last_gradient_at_once() -> None:
    for program in build("interleaved_1f1b", 4, 2, 8).programs:
        for position, action in enumerate(program):
            if action.kind is ActionKind.REDUCE:
                before = program[position - 1]
                assert before.stage == action.stage
                assert before.microbatch == 7
                assert before.kind in (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD)


def test_the_result_is_cached() -> None:
    assert build("auto", 4, 2, 8) is build("interleaved_1f1b", 4, 2, 8)
    assert build("auto", 4, 1, 8).name == "1f1b"


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "words"),
    [
        ("1f1", 2, 1, 4, ["schedule='1f1'", "did you mean '1f1b'", "'gpipe'"]),
        ("interleaved", 2, 2, 4, ["did you mean 'interleaved_1f1b'"]),
        ("zzz", 2, 1, 4, ["schedule='zzz'", "'auto'"]),
        ("1f1b", 2, 2, 4, ["virtual_pipeline_size=2", "interleaved_1f1b", "virtual_pipeline_size=1"]),
        ("interleaved_1f1b", 2, 1, 4, ["virtual_pipeline_size=1", "2 or more", "'1f1b'"]),
        ("auto", 1, 2, 4, ["virtual_pipeline_size=2", "pipeline_parallel_size to 2"]),
        ("auto", 2, 1, 0, ["num_microbatches=0", "positive"]),
        ("auto", True, 1, 1, ["pipeline_parallel_size=True"]),
        ("auto", 2, 1.5, 1, ["virtual_pipeline_size=1.5"]),
    ],
)
def test_mistakes_are_named_with_the_mend(name: str, p: int, v: int, m: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        build(name, p, v, m)
    for word in words:
        assert word in str(error.value)


def test_the_front_door_needs_neither_torch_nor_matplotlib() -> None:
    # An empty package stands in for lightning_ptdp, whose own front door may import torch.
    package = repr(str(next(iter(sys.modules["lightning_ptdp"].__path__))))
    code = (
        "import sys, types; package = types.ModuleType('lightning_ptdp'); "
        f"package.__path__ = [{package}]; sys.modules['lightning_ptdp'] = package; "
        "import lightning_ptdp.pipeline, lightning_ptdp.pipeline.timeline; "
        "print({'torch', 'lightning', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
