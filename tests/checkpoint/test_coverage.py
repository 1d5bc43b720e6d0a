"""Tests of the check that rectangles cover a tensor exactly once."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.checkpoint.local_rectangles import check_cover
from lightning_ptdp.parameters.rectangle import Rectangle


@st.composite
def cut(draw):
    """Draw a shape and rectangles that partition it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    parts = [Rectangle((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        begin, end = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(begin[dim], end[dim]))
        parts.append(Rectangle(begin, (*end[:dim], at, *end[dim + 1 :])))
        parts.append(Rectangle((*begin[:dim], at, *begin[dim + 1 :]), end))
    return shape, draw(st.permutations(parts))


def _counts(shape, parts):
    counts = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        counts[part.slices] += 1
    return counts


@settings(deadline=None, max_examples=60)
@given(drawn=cut(), data=st.data())
def test_cover_check_agrees_with_counting(drawn, data):
    shape, parts = drawn
    check_cover("w", shape, parts, "to save")
    dropped = data.draw(st.integers(0, len(parts) - 1))
    again = data.draw(st.integers(0, len(parts) - 1))
    changed = [part for number, part in enumerate(parts) if number != dropped or again == dropped]
    changed += [parts[again]] if data.draw(st.booleans()) else []
    counts = _counts(shape, changed)
    if counts.eq(1).all():
        check_cover("w", shape, changed, "to save")
        return
    with pytest.raises(CheckpointError) as error:
        check_cover("w", shape, changed, "to save")
    named = tuple(
        slice(*map(int, part.split(":"))) for part in re.findall(r"\d+:\d+", str(error.value))
    )
    region = counts[named]
    assert region.eq(0).all() if "is not covered" in str(error.value) else region.gt(1).any()


def test_rectangle_outside_tensor_is_refused():
    with pytest.raises(
        CheckpointError,
        match=r"'w': of the rectangles to save, \[0:5, 0:3\] is outside the tensor of shape \(4, 3\)",
    ):
        check_cover("w", (4, 3), [Rectangle((0, 0), (5, 3))], "to save")


def test_cover_check_of_scalar_and_empty_tensor():
    check_cover("w", (), [Rectangle((), ())], "to save")
    check_cover("w", (0, 3), [], "to save")
    with pytest.raises(CheckpointError, match=r"cover 0 of 1 elements"):
        check_cover("w", (), [], "to load")


def test_cover_check_handles_40000_rectangles():
    side = 200
    squares = [Rectangle.at((row, column), (1, 1)) for row in range(side) for column in range(side)]
    check_cover("w", (side, side), squares, "to save")
    with pytest.raises(
        CheckpointError,
        match="the 20000 rectangles to save do not cover every element exactly once",
    ):
        check_cover("w", (side, side), squares[::2], "to save")
