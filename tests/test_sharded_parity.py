"""Parity of sharded optimizers and two-level sums with every other axis.

tests/data_parallel tests them under every schedule.
"""

import pytest

from tests.letters import SP, C, D, G, M, P, T, V, Z
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "d2": (2, {Z: "optimizer"}),
    "d2 overlapped": (2, {Z: "optimizer", G: True}),
    "d2p2v2 overlapped": (4, {Z: "optimizer", G: True, P: 2, V: 2, M: 2}),
    "d4": (4, {Z: "optimizer"}),
    "d2m2": (2, {Z: "optimizer", M: 2}),
    "d2t2": (4, {Z: "optimizer", T: 2}),
    "d2t2sp": (4, {Z: "optimizer", T: 2, SP: True, M: 2}),
    "d2c2": (4, {Z: "optimizer", C: 2}),
    "d4 two levels": (4, {D: 2}),
    "d4 two levels in shards": (4, {D: 2, Z: "optimizer", M: 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_optimizer_matches_single_process(name, parity):
    world_size, layout = LAYOUTS[name]
    run = Run(accumulate=2, global_batch=16)
    parity.check(run, (world_size, {**layout, "bucket_mb": 1e-2}))


def test_replicated_key_value_heads_match_single_process(parity):
    """Shards split the replicated key and value rows, which are summed and counted once."""
    parity.check(Run(llama=True, layers=2, steps=2), (8, {Z: "optimizer", T: 4, "bucket_mb": 1e-2}))
