"""``ptdp timeline``."""

import json
import sys
from pathlib import Path

import pytest

from lightning_ptdp.schedule import build_schedule, dump_schedule
from tests.processes import run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_picture_and_trace_are_written_by_default(ptdp, tmp_path):
    sizes = ["--pp", "4", "--vpp", "2", "--microbatches", "8", "--schedule", "interleaved_1f1b"]
    code, out, _ = ptdp("timeline", *sizes)
    assert code == 0
    assert out.splitlines() == [
        "schedule          v  step time  bubble  activations held, by rank",
        "interleaved_1f1b  2       28.5  18.75%  5.5 4.5 3.5 2.5",
        "written: timeline.png",
        "written: timeline.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.json", "timeline.png"]
    assert ptdp("timeline", *sizes, "--output", "a.json", "--output", "b.json")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.json",
        "b.json",
        "timeline.json",
        "timeline.png",
    ]


def test_schedules_are_compared_at_equal_work(ptdp):
    names = "gpipe,1f1b, interleaved_1f1b,zb_h1,zb_v,dualpipe_v"
    _, out, _ = ptdp(
        "timeline",
        "--pp",
        "4",
        "--vpp",
        "4",
        "--microbatches",
        "8",
        "--compare",
        names,
        "--output",
        "t.json",
    )
    rows = [line.split() for line in out.splitlines()[1:7]]
    assert [(name, v, time) for name, v, time, *_ in rows] == [
        ("gpipe", "1", "33"),
        ("1f1b", "1", "33"),
        ("interleaved_1f1b", "4", "26.25"),
        ("zb_h1", "1", "27"),
        ("zb_v", "2", "25.5"),
        ("dualpipe_v", "2", "25.5"),
    ]
    assert [row[4] for row in rows] == ["8", "4", "4.75", "4", "4", "4.5"]
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    work = [sum(e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in range(6)]
    assert work == [pytest.approx(4 * 8 * 3e6)] * 6


def test_costs_change_step_time(ptdp):
    sizes = ["timeline", "--pp", "2", "--microbatches", "4", "--output", "t.json"]

    def time(*options):
        return float(ptdp(*sizes, *options)[1].splitlines()[1].split()[2])

    assert time() == 15
    assert time("--forward", "2") == 20
    assert time("--backward", "4") == 25
    assert time("--latency", "10") > 15 + 20
    assert time("--reduce", "7") == 15 + 7
    assert time("--schedule", "zb_h1", "--weight", "0") == 15
    assert time("--schedule", "zb_h1", "--weight", "1") == 13


def test_schedule_is_loaded_from_file(ptdp):
    schedule = build_schedule(
        "zb_v", pipeline_parallel_size=2, virtual_pipeline_size=2, num_microbatches=4
    )
    dump_schedule(schedule, "mine.csv")
    code, out, err = ptdp(
        "timeline",
        "--pp",
        "2",
        "--microbatches",
        "4",
        "--schedule",
        "mine.csv",
        "--output",
        "t.json",
    )
    assert (code, err) == (0, "")
    assert "  2  " in out.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "1f1"], "Did you mean '1f1b'"),
        (["--vpp", "2", "--schedule", "1f1b"], "virtual_pipeline_size=2"),
        (["--vpp", "1", "--schedule", "zb_v"], "virtual_pipeline_size=1"),
        (["--compare", "1f1b,zb_v2"], "Did you mean 'zb_v'"),
        (["--backward", "-1"], "backward=-1.0 must not be negative"),
        (["--weight", "2.5"], "--weight 2.5 must be between 0 and --backward 2"),
        (["--latency", "-1"], "latency=-1.0"),
        (["--output", "timeline.gif"], "must end in .png or .json"),
        (["--schedule", "1f1b", "--compare", "zb_v"], "not allowed with"),
        (["--microbatches", "0"], "num_microbatches=0"),
        (["--width", "0"], "--width: '0' is not a positive integer"),
    ],
)
def test_invalid_option_is_refused(ptdp, arguments, words, tmp_path):
    code, _, err = ptdp("timeline", "--pp", "2", "--microbatches", "2", *arguments)
    assert code == 2
    assert words in err
    assert "ptdp timeline: error" in err
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_reported(ptdp, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = ptdp("timeline", "--pp", "2", "--microbatches", "2")
    assert code == 2
    assert "pip install 'matplotlib" in err


def test_trace_does_not_import_matplotlib():
    code = """
import sys
from lightning_ptdp.cli import main
assert main(["timeline", "--pp", "2", "--microbatches", "2", "--output", "t.json"]) == 0
assert main(["timeline", "--help"]) == 0
print([name for name in ("matplotlib", "PIL") if name in sys.modules])
"""
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "usage: ptdp timeline" in done.stdout
