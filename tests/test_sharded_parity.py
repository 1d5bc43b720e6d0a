"""Sharded optimizers and two-level sums with every other axis; tests/data_parallel has them under
every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.letters import SP, C, D, G, M, P, S, T, V, Z
from tests.parity import Frozen, Run, assert_same, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "d2": (2, {Z: True}),
    "d2 overlapped": (2, {Z: True, G: True}),
    "d2p2v2 overlapped": (4, {Z: True, G: True, P: 2, V: 2, M: 2}),
    "d4": (4, {Z: True}),
    "d2m2": (2, {Z: True, M: 2}),
    "d2t2": (4, {Z: True, T: 2}),
    "d2t2sp": (4, {Z: True, T: 2, SP: True, M: 2}),
    "d2p2 zb_h1": (4, {Z: True, P: 2, M: 3, S: "zb_h1"}),
    "d2p2v2 dualpipe_v": (4, {Z: True, P: 2, V: 2, M: 3, S: "dualpipe_v"}),
    "d2c2": (4, {Z: True, C: 2}),
    "d4 two levels": (4, {D: 2}),
    "d4 two levels in shards": (4, {D: 2, Z: True, M: 2}),
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


@pytest.mark.parametrize("name", LAYOUTS)
def test_accumulation_clipping_ties_and_uneven_padding(
    name: str, pool: Pool, reference: Any
) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"layers": 4, "accumulate": 2, "steps": 8, "global_batch": 16}
    expected = reference(**settings)
    assert min(expected["norms"]) > 0.05, "the clipping threshold must bite"
    run = Run(world_size=world_size, layout={**layout, "bucket_mb": 1e-2}, **settings)
    for found in pool.run(fit, world_size=world_size, args=(run,)):
        assert_same(found, expected)


def test_heads_that_several_ranks_hold_alike(pool: Pool, reference: Any) -> None:
    """Shards cut through the copied rows of keys and values; they are summed and counted once."""
    settings = {"llama": True, "layers": 2, "steps": 4, "global_batch": 8}
    run = Run(world_size=8, layout={Z: True, T: 4, "bucket_mb": 1e-2}, **settings)
    for found in pool.run(fit, world_size=8, args=(run,)):
        assert_same(found, reference(**settings))
