"""Save -> load -> save keeps every element for any two layouts.

A single process plays all ranks in turn. A layout shards layers of unequal cost over p v stages,
matrices over t ranks (padded vocabulary, fused projection), and with ZeRO the optimizer state over
the d c ranks that hold the same parameters. The first and the last stage share a tied embedding.
"""

import itertools
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.checkpoint import (
    load_tensors,
    read_full,
    read_metadata,
)
from lightning_ptdp.checkpoint.local_rectangles import rectangles_of
from lightning_ptdp.checkpoint.save import write_checkpoint
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.schedule.partition import partition_layers
from tests.checkpoint.layouts import PADDING, shard

pytestmark = pytest.mark.thorough

LAYERS = 5
Tensors = dict[str, tuple[torch.Tensor, Placement]]


@dataclass(frozen=True)
class Layout:
    """Parallel degrees by their letters."""

    t: int = 1
    p: int = 1
    v: int = 1
    d: int = 1
    c: int = 1
    zero: bool = False

    def coordinates(self):
        """Return (stage, tensor rank, replica) of every chunk of every rank."""
        return itertools.product(range(self.p * self.v), range(self.t), range(self.d * self.c))


LAYOUTS = [
    Layout(t, p, v, d, c, zero)
    for t, p, v, d, c in itertools.product((1, 2), repeat=5)
    for zero in ((False, True) if d * c > 1 else (False,))
    if p > 1 or v == 1
]


def _full():
    """Return the parameters and their kinds of sharding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": ((29, 6), "vocabulary"), "norm.weight": ((6,), "replicated")}
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.qkv.weight": ((16, 6), "fused"),
            f"h.{layer}.qkv.bias": ((16,), "fused"),
            f"h.{layer}.down.weight": ((6, 8), "row"),
            f"h.{layer}.ln.weight": ((6,), "replicated"),
        }
    return {
        name: (torch.randn(shape, generator=generator), kind)
        for name, (shape, kind) in shapes.items()
    }


def _names(layout, stage):
    stages = partition_layers(
        [1.0] * LAYERS, num_stages=layout.p * layout.v, first_cost=0.5, last_cost=0.7
    )
    first, last = stage == 0, stage == len(stages) - 1
    blocks = [f"h.{layer}." for layer in range(*stages[stage])]
    return [
        name
        for name in _full()
        if name.startswith(tuple(blocks))
        or (name == "wte.weight" and (first or last))
        or (name == "norm.weight" and last)
    ]


def _held(layout, stage, tensor_rank, replica):
    """Return the parameters of a stage on one rank, and their optimizer state.

    With ``layout.zero`` the state covers only the replica's range of each parameter.
    """
    full, found = _full(), {}
    for name in _names(layout, stage):
        value, kind = full[name]
        local, sharding = shard(value, kind, size=layout.t, rank=tensor_rank)
        found[f"model/{name}"] = (local, sharding)
        state, _ = shard(value * 3, kind, size=layout.t, rank=tensor_rank)
        if not layout.zero:
            found[f"optimizer/0/exp_avg/{name}"] = (state, sharding)
            continue
        parts = layout.d * layout.c
        start, stop = (number * local.numel() // parts for number in (replica, replica + 1))
        place = sharding.flattened(start, stop)
        found[f"optimizer/0/exp_avg/{name}"] = (state.flatten()[start:stop], place)
    return found


def _load(layout, source):
    """Return the rectangles of all ranks, loaded from ``source`` and compared if it is given."""
    rectangles = []
    for coordinate in layout.coordinates():
        expected = _held(layout, *coordinate)
        tensors = expected
        if source is not None:
            tensors = {
                name: (torch.full_like(tensor, PADDING), place)
                for name, (tensor, place) in expected.items()
            }
            load_tensors(source, tensors)
            for name, (tensor, place) in tensors.items():
                for (_, found), (_, wanted) in zip(
                    place.held(tensor), place.held(expected[name][0]), strict=True
                ):
                    assert torch.equal(found, wanted), f"{name} in {layout}"
        rectangles += rectangles_of(tensors)
    return rectangles


def _save(path, layout, source):
    write_checkpoint(
        path,
        rectangles=_load(layout, source),
        state={},
        metadata={"aliases": {"head.weight": "wte.weight"}},
    )
    return read_metadata(path)


def _check(path):
    model, states = read_full(path), read_full(path, prefix="optimizer/0/exp_avg/")
    assert model["head.weight"] is model["wte.weight"]
    assert model.keys() - {"head.weight"} == states.keys() == _full().keys()
    for name, (value, _) in _full().items():
        assert torch.equal(model[name], value) and torch.equal(states[name], value * 3), name


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_checkpoint_survives_resharding_through_all_layouts(tmp_path):
    layouts = random.Random(0).sample(LAYOUTS, len(LAYOUTS))
    assert len(layouts) == 42
    tensors = _save(tmp_path / "0", layouts[0], None).tensors
    for number, layout in enumerate(layouts[1:], start=1):
        assert _save(tmp_path / str(number), layout, tmp_path / str(number - 1)).tensors == tensors
        shutil.rmtree(tmp_path / str(number - 1))
    _check(tmp_path / str(len(layouts) - 1))


degrees = st.builds(
    Layout,
    t=st.sampled_from([1, 2, 4]),
    p=st.integers(1, 3),
    d=st.integers(1, 3),
    c=st.integers(1, 2),
    zero=st.booleans(),
)


@settings(deadline=None, max_examples=12)
@given(before=degrees, after=degrees)
def test_checkpoint_is_equal_in_any_two_layouts(before, after):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        _save(path / "one", before, None)
        _save(path / "two", after, path / "one")
        _check(path / "two")
