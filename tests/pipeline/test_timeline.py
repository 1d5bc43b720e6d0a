"""Pictures and traces of timelines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ptdp.pipeline import Schedule, Timeline, build_schedule, simulate
from lightning_ptdp.pipeline.timeline import chrome_trace, draw_timeline, main


def timeline(p: int = 4, v: int = 2, m: int = 8) -> Timeline:
    return simulate(build_schedule("auto", pipeline_parallel_size=p, virtual_pipeline_size=v, num_microbatches=m))


def test_the_picture_has_the_width_and_the_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    draw_timeline(timeline(), tmp_path / "timeline.png", width=1600)
    pixels_hwc = imread(tmp_path / "timeline.png")
    assert pixels_hwc.shape[1] == 1600
    row_w3 = pixels_hwc[pixels_hwc.shape[0] // 6, :, :3]
    blue = (row_w3[:, 2] > row_w3[:, 1] + 0.1).sum()
    green = (row_w3[:, 1] > row_w3[:, 2] + 0.1).sum()
    # Rank 0 spends 16 of 57 units in forwards and 32 in backwards.
    assert 0.2 < blue / 1600 < 0.35
    assert 0.4 < green / 1600 < 0.65


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 1), (2, 1, 3), (8, 4, 64)])
def test_any_size_can_be_drawn(tmp_path: Path, p: int, v: int, m: int) -> None:
    draw_timeline(timeline(p, v, m), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_an_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    draw_timeline(Timeline(Schedule("empty", 1, 1, 1, ((),)), ((),)), tmp_path / "timeline.png")


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_ptdp.pipeline.timeline import main; "
        f"main(['--pp', '2', '--microbatches', '2', '--output', {str(tmp_path / 't.png')!r}]); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_trace_holds_every_span() -> None:
    drawn = timeline()
    trace = json.loads(json.dumps(chrome_trace(drawn)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(map(len, drawn.spans)) == 4 * 2 * 8 * 2
    assert {event["tid"] for event in spans} == {0, 1, 2, 3}
    first = next(event for event in spans if event["name"] == "B7.0")
    assert (first["cat"], first["dur"], first["args"]) == ("backward", 2e6, {"stage": 7, "microbatch": 0})
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == [f"pipeline rank {rank}" for rank in range(4)]


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "4", "--vpp", "2", "--microbatches", "8", "--schedule", "interleaved_1f1b"]
    for name in ("timeline.png", "timeline.json"):
        main([*sizes, "--output", str(tmp_path / name)])
        assert (tmp_path / name).exists()
    assert "bubble 18.8%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "1f1"], "did you mean '1f1b'"),
        (["--vpp", "2", "--schedule", "1f1b"], "virtual_pipeline_size=2"),
        (["--backward", "-1"], "backward=-1.0"),
        (["--output", "timeline.gif"], "must end in .png or .json"),
    ],
)
def test_the_command_explains_mistakes(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--pp", "2", "--microbatches", "2", "--output", str(tmp_path / "t.png"), *arguments])
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
