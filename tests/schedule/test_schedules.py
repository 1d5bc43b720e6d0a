"""Tests of the guarantees of schedules: order, memory, names and verification."""

import inspect
import itertools
import re
import sys
from fractions import Fraction

import pytest

from lightning_ptdp.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    actions,
    check_schedule,
    peak_in_flight,
    schedule_microbatches,
    schedule_placement,
    simulate,
)
from lightning_ptdp.schedule.generators import may_split_backward
from lightning_ptdp.schedule.generators.compute_orders import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from tests.errors import raises_with
from tests.processes import run
from tests.schedule.builders import build

pytestmark = pytest.mark.thorough

COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT)
V_SHAPED = ("zb_v", "dualpipe_v")


def allowed(name, p, v):
    if p == 1:
        return v == 1
    fits = {
        "1f1b": v == 1,
        "zb_h1": v == 1,
        "interleaved_1f1b": v > 1,
        "zb_v": v == 2,
        "dualpipe_v": v == 2,
    }
    return fits.get(name, True)


@pytest.mark.parametrize("p", range(1, 8))
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_every_size_is_verified(name, p):
    for v in range(1, 5):
        for m in range(1, 18):
            if not allowed(name, p, v):
                continue
            schedule = build(name, p, v, m)  # build verifies the schedule
            assert schedule.num_stages == p * v
            assert len(schedule.programs) == p
            assert schedule.placement == schedule_placement(name)
            compute = [
                action
                for program in schedule.programs
                for action in program
                if action.kind in COMPUTE
            ]
            assert schedule.splits_backward == (name in ("zb_h1", *V_SHAPED) and p > 1)
            assert may_split_backward(name) == (name in ("zb_h1", *V_SHAPED))
            assert len(compute) == (3 if schedule.splits_backward else 2) * p * v * m
            if p == 1:
                assert all(
                    action.kind in (*COMPUTE, ActionKind.REDUCE) for action in schedule.programs[0]
                )
                assert peak_in_flight(schedule.programs[0]) == 1


@pytest.mark.parametrize(
    ("p", "v", "m"), [(11, 2, 21), (13, 3, 38), (16, 2, 31), (16, 4, 47), (31, 2, 61), (9, 6, 17)]
)
def test_large_schedules_with_remainder_are_built(p, v, m):
    for name in ("gpipe", "interleaved_1f1b"):
        assert build(name, p, v, m).num_microbatches == m


@pytest.mark.parametrize("p", range(1, 7))
def test_evaluation_has_only_forwards(p):
    for v in range(1, 5 if p > 1 else 2):
        for m in range(1, 18):
            for name in ("auto", "zb_v") if v == 2 else ("auto",):
                schedule = build(name, p, v, m, training=False)
                assert not schedule.training
                assert schedule.name == "forward_only"
                assert schedule.placement == schedule_placement(name)
                kinds = {action.kind for program in schedule.programs for action in program}
                assert kinds <= {
                    ActionKind.FORWARD,
                    ActionKind.SEND_FORWARD,
                    ActionKind.RECEIVE_FORWARD,
                }


def test_peak_in_flight_is_maximum_over_program():
    program = [
        Action.parse(word) for word in ("F0.0", "F0.1", "B0.0", "B0.1", "F0.2", "B0.2", "R0")
    ]
    assert peak_in_flight(program) == 2
    assert peak_in_flight([]) == 0


def test_1f1b_peak_memory_matches_paper():
    for p in range(1, 9):
        for m in range(1, 18):
            orders = one_f_one_b(p, 1, m)
            assert [peak_in_flight(order) for order in orders] == [
                min(m, p - rank) for rank in range(p)
            ]


def test_interleaved_peak_memory_matches_docstring():
    for p in range(2, 9):
        for v in range(2, 5):
            for m in range(1, 18):
                largest = m if m < 2 * p else -(-m // (m // p))
                for rank, order in enumerate(interleaved_one_f_one_b(p, v, m)):
                    assert peak_in_flight(order) == min(
                        v * m, (v - 1) * largest + 2 * (p - rank - 1) + 1
                    )


def test_gradients_are_accumulated_in_microbatch_order():
    for name, v in (
        ("gpipe", 1),
        ("gpipe", 3),
        ("1f1b", 1),
        ("interleaved_1f1b", 3),
        ("zb_h1", 1),
        ("zb_v", 2),
        ("dualpipe_v", 2),
    ):
        for program in build(name, 4, v, 9).programs:
            for kind in COMPUTE:
                for stage in {action.stage for action in program}:
                    order = [
                        action.microbatch
                        for action in program
                        if (action.kind, action.stage) == (kind, stage)
                    ]
                    assert order == list(range(9)) or (kind is ActionKind.WEIGHT and not order)


def in_parts(timeline, columns):
    """Return the lines of a timeline of p < 10 ranks, wrapped after ``columns`` columns."""
    lines = timeline.splitlines()
    width = 5 * columns
    starts = range(8, max(map(len, lines)), width)
    return [(line[:8] + line[start : start + width]).rstrip() for start in starts for line in lines]


@pytest.mark.parametrize(
    ("function", "names", "v", "m", "training", "columns"),
    [
        (gpipe, ["gpipe"], 1, 8, True, 99),
        (one_f_one_b, ["1f1b"], 1, 8, True, 99),
        (interleaved_one_f_one_b, ["interleaved_1f1b"], 2, 4, True, 99),
        (forward_only, ["auto", "zb_v"], 2, 8, False, 99),
        (zb_h1, ["zb_h1"], 1, 6, True, 99),
        (zb_v, ["zb_v"], 2, 8, True, 17),
        (dualpipe_v, ["dualpipe_v"], 2, 8, True, 17),
    ],
)
def test_docstrings_show_simulated_timeline(function, names, v, m, training, columns):
    drawn = [
        simulate(build(name, 4, v, m, training), Costs(forward=1, backward=1, weight=1)).text()
        for name in names
    ]
    assert ranks_of(function) == [
        line for timeline in drawn for line in in_parts(timeline, columns)
    ]


def ranks_of(documented):
    """Return the lines of ranks in a docstring."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    return [line.strip() for line in lines if re.match(r"rank \d", line.strip())]


def test_docstring_shows_printed_programs():
    shown = ranks_of(actions)
    schedule = build("1f1b", 2, 1, 2)
    assert shown == schedule.text().splitlines()
    parsed = tuple(tuple(Action.parse(word) for word in line.split()[2:]) for line in shown)
    assert parsed == schedule.programs


@pytest.mark.parametrize("text", ["", "F", "F3", "X3.1", "R3.1", "F-1.0", "F3.1 ", "f3.1", "SF.1"])
def test_invalid_action_text_is_refused(text):
    with pytest.raises(ValueError, match=r"such as F3\.1"):
        Action.parse(text)


def test_built_schedules_are_cached():
    assert build("auto", 4, 2, 8) is build("interleaved_1f1b", 4, 2, 8)
    assert build("auto", 4, 1, 8).name == "1f1b"
    assert build("zb_v", 4, 2, 8, training=False) == build("dualpipe_v", 4, 2, 8, training=False)


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "words"),
    [
        ("1f1", 2, 1, 4, ["schedule='1f1'", "Did you mean '1f1b'", "'gpipe'"]),
        ("interleaved", 2, 2, 4, ["Did you mean 'interleaved_1f1b'"]),
        ("zzz", 2, 1, 4, ["schedule='zzz'", "'auto'"]),
        (
            "1f1b",
            2,
            2,
            4,
            ["virtual_pipeline_size=2", "interleaved_1f1b", "virtual_pipeline_size=1"],
        ),
        ("interleaved_1f1b", 2, 1, 4, ["virtual_pipeline_size=1", "2 or more", "'1f1b'"]),
        ("auto", 1, 2, 4, ["virtual_pipeline_size=2", "pipeline_parallel_size=2"]),
        ("auto", 2, 1, 0, ["num_microbatches=0", "positive"]),
        (
            "zb_h1",
            2,
            2,
            4,
            ["virtual_pipeline_size=2", "schedule='zb_v'", "virtual_pipeline_size=1"],
        ),
        ("zb_v", 2, 1, 4, ["virtual_pipeline_size=1", "Use virtual_pipeline_size=2", "'zb_h1'"]),
        (
            "zb_v",
            2,
            3,
            4,
            ["virtual_pipeline_size=3", "Use virtual_pipeline_size=2", "'interleaved_1f1b'"],
        ),
        ("dualpipe_v", 2, 4, 4, ["virtual_pipeline_size=4", "Use virtual_pipeline_size=2"]),
        ("zb_w", 2, 2, 4, ["Did you mean 'zb_v'"]),
        ("zb_v", 2, 2, True, ["num_microbatches=True"]),
        ("auto", True, 1, 1, ["pipeline_parallel_size=True"]),
        ("auto", 2, 1.5, 1, ["virtual_pipeline_size=1.5"]),
    ],
)
def test_invalid_name_or_size_is_refused(name, p, v, m, words):
    with pytest.raises(ValueError) as error:
        build(name, p, v, m)
    for word in words:
        assert word in str(error.value)
    if m > 1:
        with pytest.raises(ValueError) as earlier:
            check_schedule(name, pipeline_parallel_size=p, virtual_pipeline_size=v)
        assert str(earlier.value) == str(error.value)


def test_placement_and_microbatches_of_named_schedules():
    assert {
        name: schedule_placement(name) for name in SCHEDULES if schedule_placement(name) == "v"
    } == dict.fromkeys(V_SHAPED, "v")
    assert all(schedule_microbatches(name) is None for name in SCHEDULES)
    with pytest.raises(ValueError, match="Did you mean 'zb_v'"):
        schedule_placement("zb-v")


@pytest.mark.parametrize(("p", "v"), [(1, 2), (2, 3), (3, 2), (4, 3)])
def test_group_size_keeps_bubble_and_bounds_memory(p, v):
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 17, 20):
        for group_size in (p, p + 1, 2 * p, 3 * p - 1, 40):
            orders = interleaved_one_f_one_b(p, v, m, group_size)
            largest = max(len(group) for group in microbatch_groups(orders[0], p))
            assert largest <= max(group_size, 2 * p - 1)
            assert p == 1 or peak_in_flight(orders[0]) == min(
                v * m, (v - 1) * largest + 2 * (p - 1) + 1
            )
            if p > 1:
                schedule = build("auto", p, v, m, group_size=group_size)
                assert m < p or simulate(schedule).bubble_fraction == Fraction(p - 1, v * m)


def microbatch_groups(order, p):
    """Return the runs of consecutive forwards of one chunk."""
    forwards = [action for action in order if action.kind is ActionKind.FORWARD]
    return [list(run) for _, run in itertools.groupby(forwards, key=lambda action: action.stage)]


@pytest.mark.parametrize(
    ("name", "v", "group_size", "words"),
    [
        (
            "interleaved_1f1b",
            2,
            3,
            ["group_size=3", "pipeline_parallel_size=4", "microbatch_group_size=4 or more"],
        ),
        ("interleaved_1f1b", 2, 0, ["group_size=0", "positive"]),
        ("zb_v", 2, 4, ["group_size=4", "only, but schedule='zb_v'", "'interleaved_1f1b'"]),
        ("auto", 1, 4, ["group_size=4", "only, but schedule='1f1b'"]),
    ],
)
def test_invalid_group_size_is_refused(name, v, group_size, words):
    with raises_with(words):
        build(name, 4, v, 8, group_size=group_size)


def test_schedule_package_imports_neither_torch_nor_matplotlib():
    # An empty package replaces lightning_ptdp, whose own __init__ may import torch.
    package = repr(str(next(iter(sys.modules["lightning_ptdp"].__path__))))
    code = (
        "import sys, types; package = types.ModuleType('lightning_ptdp'); "
        f"package.__path__ = [{package}]; sys.modules['lightning_ptdp'] = package; "
        "import lightning_ptdp.schedule, lightning_ptdp.schedule.schedule_timeline; "
        "print({'torch', 'lightning', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"
