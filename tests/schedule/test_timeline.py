"""Plots and traces of timelines."""

import json
import sys

import numpy as np
import pytest

from lightning_ptdp.schedule import Schedule, Timeline
from lightning_ptdp.schedule.schedule_timeline import chrome_trace, draw_timelines
from tests.schedule.builders import simulated

pytestmark = pytest.mark.pure

BLUE, GREEN, AMBER, PURPLE = range(4)
IDLE = (237, 237, 237)


def timeline(p=4, v=2, m=8, name="auto", **costs):
    return simulated(name, p, v, m, **costs)


def picture(folder, *timelines, **options):
    """Return the pixels of a plot."""
    draw_timelines(timelines, folder / "timeline.png", **options)
    return pixels(folder / "timeline.png")


def pixels(path):
    """Return the pixels of an image file, (h, w, 3), 0 to 255."""
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def shares(row_w3):
    """Return the shares of blue, green, amber and purple pixels in a row.

    Both shades of the chunks count.
    """
    red, green, blue = row_w3.T
    masks = (
        (blue > green + 25) & (green > red + 10),
        (green > blue + 25) & (green > red + 25),
        (red > green + 10) & (green > blue + 25),
        (blue > green + 25) & (red > green + 10),
    )
    return [float(mask.mean()) for mask in masks]


def is_idle(row_w3):
    return (abs(row_w3 - np.array(IDLE)) < 6).all(-1)


def rows_of(picture_hw3, count):
    """Return one pixel row of each of the ``count`` rows of boxes, found by their colours."""
    coloured = [bool(sum(shares(row)) > 0.2) for row in picture_hw3]
    edges = np.flatnonzero(np.diff([0, *coloured, 0]))
    runs = [
        (start, stop)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if stop - start > 15
    ]
    assert len(runs) == count
    return [picture_hw3[start + 4] for start, _ in runs]


def test_plot_has_requested_width_and_colours(tmp_path):
    drawn = picture(tmp_path, timeline(), width=1600)
    assert drawn.shape[1] == 1600
    for row in rows_of(drawn, 4):
        # Every rank spends 16 of 57 units in forwards and 32 in backwards; the axis takes about
        # 0.93 of the width.
        blue, green, amber, purple = shares(row)
        assert blue == pytest.approx(0.93 * 16 / 57, abs=0.03)
        assert green == pytest.approx(0.93 * 32 / 57, abs=0.03)
        assert amber == purple == 0


def test_weight_gradients_and_reductions_have_their_own_colours(tmp_path):
    drawn = picture(tmp_path, timeline(4, 1, 8, "zb_h1", backward=1, reduce=4))
    blue, green, amber, _ = shares(rows_of(drawn, 4)[0])
    assert blue == pytest.approx(green, abs=0.02) and green == pytest.approx(amber, abs=0.02)
    assert blue > 0.2
    purple = max(shares(row)[PURPLE] for row in drawn)
    assert purple == pytest.approx(0.93 * 4 / 31, abs=0.02)


def test_stacked_timelines_share_time_axis(tmp_path):
    long, short = timeline(2, 1, 8), timeline(2, 1, 4)
    rows = rows_of(picture(tmp_path, long, short), 4)
    drawn = [float(np.flatnonzero(is_idle(row) | (row.sum(-1) < 720)).max()) for row in rows]
    left = float(np.flatnonzero(is_idle(rows[1])).min())
    assert drawn[0] == pytest.approx(drawn[1], abs=3)
    assert (drawn[2] - left) / (drawn[0] - left) == pytest.approx(15 / 27, abs=0.01)


def test_second_chunk_of_v_placement_is_light(tmp_path):
    row = rows_of(picture(tmp_path, timeline(2, 2, 1, "zb_v", backward=1)), 2)[1]
    forwards = [tuple(pixel) for pixel in row if shares(pixel[None])[BLUE]]
    # Rank 1 runs stage 1, its first chunk, and then stage 2.
    assert forwards[3][0] < 60 and forwards[-4][0] > 140


EMPTY = Timeline(Schedule("empty", 1, 1, 1, ((),)), ((),))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3), (8, 4, 64), None])
@pytest.mark.parametrize("memory", [False, True])
def test_any_size_can_be_drawn(tmp_path, sizes, memory):
    drawn = timeline(*sizes) if sizes else EMPTY
    titled = {"titles": ["a title"], "measured": True} if sizes else {}
    draw_timelines([drawn], tmp_path / "timeline.png", memory=memory, **titled)
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_memory_curve_increases_plot_height(tmp_path):
    without, with_ = (picture(tmp_path, timeline(), memory=memory) for memory in (False, True))
    assert with_.shape[0] > without.shape[0] + 100


def test_drawing_does_not_import_pyplot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    draw_timelines([timeline()], tmp_path / "timeline.png")


def test_missing_matplotlib_error_names_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        draw_timelines([timeline()], tmp_path / "timeline.png")


def test_trace_contains_every_span():
    drawn = timeline(reduce=3)
    trace = json.loads(json.dumps(chrome_trace(drawn)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    computations = [event for event in spans if event["cat"] != "gradient reduction"]
    assert len(computations) == sum(map(len, drawn.spans)) == 4 * 2 * 8 * 2
    assert len(spans) - len(computations) == 8
    assert {event["tid"] for event in computations}.isdisjoint(
        event["tid"] for event in spans if event not in computations
    )
    first = next(event for event in spans if event["name"] == "B7.0")
    assert (first["cat"], first["dur"], first["args"]) == (
        "backward",
        2e6,
        {"stage": 7, "microbatch": 0},
    )
    threads = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert threads[first["tid"]] == "pipeline rank 3"
    assert sorted(threads.values()) == [
        f"pipeline rank {rank}{kind}" for rank in range(4) for kind in ("", ": reductions")
    ]
    held = [
        event["args"]["held"]
        for event in trace["traceEvents"]
        if event["ph"] == "C" and "rank 0" in event["name"]
    ]
    assert max(held) == drawn.peak_in_flight[0]


def test_several_timelines_are_processes_of_one_trace():
    trace = chrome_trace(timeline(2, 1, 2), timeline(2, 1, 3), titles=["measured", "ideal"])
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {0: "measured", 1: "ideal"}
    counts = [
        sum(e["ph"] == "X" and e["pid"] == pid for e in trace["traceEvents"]) for pid in (0, 1)
    ]
    assert counts == [8, 12]
