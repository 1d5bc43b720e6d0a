"""Schedules from CSV files and from user functions: verified, with errors that name the line."""

import inspect
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_ptdp.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    CustomSchedule,
    ScheduleError,
    check_schedule,
    dump_schedule,
    load_schedule,
    schedule_file,
    schedule_microbatches,
    schedule_placement,
)
from lightning_ptdp.schedule.lowering import compute_order, lower
from tests.errors import raises_with
from tests.schedule.builders import build
from tests.schedule.orders import compute_orders

pytestmark = pytest.mark.pure

GOOD = "F0.0,F0.1,,B0.0,B0.1\n,F1.0,B1.0,F1.1,B1.1\n"
IN_A_V = "F0.0,,,F3.0,B3.0,,,B0.0\n,F1.0,F2.0,,,B2.0,B1.0,\n"


def written(folder, text):
    path = folder / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_dumped_schedule_is_loaded_unchanged(tmp_path, name):
    v = {"1f1b": 1, "zb_h1": 1, "gpipe": 3}.get(name, 2)
    schedule = build(name, 4, v, 7)
    dump_schedule(schedule, tmp_path / f"{name}.csv")
    assert load_schedule(tmp_path / f"{name}.csv") == schedule
    assert build(str(tmp_path / f"{name}.csv"), 4, v, 7) == schedule


@given(order=compute_orders())
@settings(max_examples=40, deadline=None)
def test_any_order_round_trips_through_file(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("orders") / "random.csv"
    dump_schedule(lower(order), path)
    loaded = load_schedule(path)
    if order.pipeline_parallel_size > 1:
        assert compute_order(loaded) == order
    assert loaded.programs == lower(order).programs


def test_file_columns_are_aligned_in_time(tmp_path):
    dump_schedule(build("1f1b", 2, 1, 2), tmp_path / "a.csv")
    assert (
        (tmp_path / "a.csv").read_text()
        == "# 1f1b p2 v1 m2, stages placed in a loop\nF0.0,F0.1,,B0.0,,B0.1\n,F1.0,B1.0,F1.1,B1.1\n"
    )


def test_docstring_example_is_valid_schedule(tmp_path):
    shown = [
        line.strip()
        for line in (inspect.getdoc(schedule_file) or "").splitlines()
        if line.startswith("    ")
    ]
    schedule = load_schedule(written(tmp_path, "\n".join(shown)))
    assert schedule.describe() == "mine p2 v1 m2"
    assert schedule.splits_backward


def test_blanks_comments_and_quotes_are_skipped(tmp_path):
    text = (
        '\ufeff# mine\n\n"F0.0", F0.1,,,B0.0,B0.1,, # the first rank\n,,,\n,F1.0,B1.0,F1.1,B1.1\r\n'
    )
    assert load_schedule(written(tmp_path, text)).programs == build("1f1b", 2, 1, 2).programs


def test_placement_is_detected_from_file(tmp_path):
    path = written(tmp_path, IN_A_V)
    assert schedule_placement(path) == "v"
    schedule = build(path, 2, 2, 1)
    assert (schedule.placement, schedule.stages_of(0), schedule.name) == ("v", (0, 3), "mine")
    for m in (1, 5):
        evaluation = build(path, 2, 2, m, training=False)
        assert (evaluation.name, evaluation.placement, evaluation.num_microbatches) == (
            "forward_only",
            "v",
            m,
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no computation", "one line per rank"]),
        ("F0.0,B0.0,X1.0\nF1.0,B1.0", ["line 1", "'X1.0'", "such as F3.1"]),
        ("# two\nF0.0,B0.0\nRF1.0,F1.0,B1.0", ["line 3", "RF1.0", "Remove it"]),
        ("F0.0,B0.0,R0\nF1.0,B1.0", ["line 1", "R0", "Remove it"]),
        ("F0.0,B0.0\nF1.0", ["line 2", "B1.0 is missing. Add it"]),
        ("F0.0,B0.0,W0.0\nF1.0,B1.0", ["line 2", "W1.0 is missing", "backward is split"]),
        (
            "F0.0,B0.0,F0.2,B0.2\nF1.0,B1.0,F1.2,B1.2",
            ["line 1", "F0.1 is missing", "3 microbatches"],
        ),
        ("F0.0,B0.0\n\nF1.0,B1.0,F1.0", ["line 3", "F1.0 is also in line 3", "Remove one"]),
        ("F0.0,B0.0,B1.0\nF1.0,B1.0", ["line 2", "B1.0 is also in line 1"]),
        ("F0.0,B0.0\nF1.0,F2.0,B2.0,B1.0", ["stages 0 to 2 on 2 lines", "up to 3"]),
        (
            "F0.0,B0.0\nF1.0,F99999999999.0,B1.0",
            ["line 2", "F99999999999.0", "stage 2 is missing"],
        ),
        (
            "F0.0,F3.0,F2.0,B3.0,B2.0,B0.0\nF1.0,B1.0",
            ["line 1 has F3.0", "the placement loop", "line 1 has F2.0", "the placement v"],
        ),
        ("F1.0,B1.0\nF0.0,B0.0", ["line 1 has F1.0", "has stage 0", "Move the action"]),
        (
            "F0.0,B0.0\nB1.0,F1.0",
            ["line 2 at B1.0", "B1.0 needs F1.0 before it", "earlier cell", "--> B1.0"],
        ),
        (
            "F0.0,B0.0,F0.1,B0.1\nF1.0,F1.1,B1.0,B1.1",
            ["line 1 at B0.0", "line 2 at F1.1", "waits for F0.1", "earlier cell"],
        ),
        ("F0.0,W0.0,B0.0\nF1.0,B1.0,W1.0", ["line 1 at W0.0", "needs B0.0"]),
    ],
)
def test_error_of_invalid_file_names_line_and_action(tmp_path, text, words):
    path = written(tmp_path, text)
    for load in (load_schedule, schedule_placement):
        with raises_with((path, *words)):
            load(path)


def test_unreadable_file_is_refused(tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x80")
    for name in ("nowhere.csv", "bytes.csv"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read as a schedule"):
            build(str(tmp_path / name), 2, 1, 2)


def test_file_with_other_sizes_is_refused(tmp_path):
    path = written(tmp_path, GOOD)
    assert schedule_microbatches(path) == 2
    check_schedule(path, pipeline_parallel_size=2)
    for sizes, words in (
        ((4, 1, 2), ["pipeline_parallel_size=2, not 4", "Use pipeline_parallel_size=2"]),
        ((2, 2, 2), ["virtual_pipeline_size=1, not 2"]),
        ((2, 1, 3), ["num_microbatches=2, not 3", "Use num_microbatches=2"]),
        ((2, 1, 1), ["num_microbatches=2, not 1", "drop_last=True"]),
    ):
        with raises_with((path, *words)):
            build(path, *sizes)
    with pytest.raises(ValueError, match="applies to schedule='interleaved_1f1b' only"):
        check_schedule(path, pipeline_parallel_size=2, group_size=2)


def all_forwards_first(p, v, m):
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [
        [Action(kind, rank, microbatch) for kind in kinds for microbatch in range(m)]
        for rank in range(p)
    ]


def backwards_first(p, v, m):
    return [order[::-1] for order in all_forwards_first(p, v, m)]


def in_a_v(p, v, m):
    stages = [(rank, 2 * p - 1 - rank) for rank in range(p)]
    forwards = [
        [Action(ActionKind.FORWARD, stage, i) for i in range(m) for stage in here]
        for here in stages
    ]
    return [
        [*order, *(replace(action, kind=ActionKind.BACKWARD) for action in order[::-1])]
        for order in forwards
    ]


def test_custom_schedule_is_lowered_and_verified():
    mine = CustomSchedule("mine", all_forwards_first)
    assert build(mine, 3, 1, 4).programs == build("gpipe", 3, 1, 4).programs
    assert build(mine, 3, 1, 4).name == "mine"
    assert build(mine, 3, 1, 4) is build(CustomSchedule("mine", all_forwards_first), 3, 1, 4)
    assert build(mine, 3, 2, 4, training=False) == build("auto", 3, 2, 4, training=False)
    assert schedule_placement(mine) == "loop"
    assert schedule_microbatches(mine) is None


def test_custom_schedule_with_v_placement():
    mine = CustomSchedule("mine", in_a_v, placement="v")
    for m in (1, 2, 5):
        assert build(mine, 3, 2, m).stages_of(1) == (1, 4)
        assert build(mine, 3, 2, m, training=False).placement == "v"
    for v in (1, 3):
        with pytest.raises(
            ValueError, match=r"virtual_pipeline_size=.. Use virtual_pipeline_size=2"
        ):
            check_schedule(mine, pipeline_parallel_size=3, virtual_pipeline_size=v)


def test_invalid_custom_schedule_is_refused():
    with pytest.raises(ScheduleError, match=r"mine p2 v1 m2: B0\.1 needs F0\.1 before it"):
        build(CustomSchedule("mine", backwards_first), 2, 1, 2)
    with pytest.raises(ScheduleError, match=r"rank 1 at B1\.0 waits for B2\.0, which is missing"):
        build(CustomSchedule("mine", all_forwards_first), 2, 2, 2)
    with pytest.raises(ValueError, match=r"'F0\.0', which is not an Action"):
        build(CustomSchedule("mine", lambda p, v, m: [["F0.0"]] * p), 2, 1, 1)
    with pytest.raises(ValueError, match=r"order=.* must be a function"):
        CustomSchedule("mine", all_forwards_first(2, 1, 1))
    with pytest.raises(ValueError, match="placement='w'"):
        CustomSchedule("mine", all_forwards_first, "w")
    with pytest.raises(ValueError, match="name=''"):
        CustomSchedule("", all_forwards_first)
    with pytest.raises(ValueError, match="applies to schedule='interleaved_1f1b' only"):
        build(CustomSchedule("mine", all_forwards_first), 2, 1, 2, group_size=2)
