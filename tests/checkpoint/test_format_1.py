"""Tests that this version reads a checkpoint in format 1 and trains on from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_ptdp.checkpoint import read_full, verify_checkpoint
from tests.checkpoint.format_1 import STEPS, STORED, train
from tests.pool import Pool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "d2": (2, {"shard_optimizer": True}),
    "p2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


def test_every_byte_and_every_weight_is_what_was_trained(pool: Pool) -> None:
    verify_checkpoint(STORED)
    trained = pool.run(
        train, world_size=1, args=(1, {"precision": "bf16-true"}, STEPS, None, None)
    )[0]
    stored = read_full(STORED)
    assert stored.keys() == trained.keys()
    for name, value in trained.items():
        torch.testing.assert_close(stored[name], value, rtol=2e-2, atol=1e-3)
        assert not torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_goes_on_from_it(name: str, pool: Pool) -> None:
    uninterrupted = pool.run(train, world_size=1, args=(1, {}, 2 * STEPS, None, None))[0]
    other = pool.run(train, world_size=1, args=(1, {}, STEPS, None, None))[0]
    world_size, layout = LAYOUTS[name]
    resumed = pool.run(
        train,
        world_size=world_size,
        args=(world_size, {"layout": layout}, 2 * STEPS, None, str(STORED)),
    )[0]
    for key, value in uninterrupted.items():
        torch.testing.assert_close(
            resumed[key], value, rtol=0, atol=5e-3, msg=lambda text, n=key: f"{n}: {text}"
        )
        assert (value - other[key]).abs().max() > 1e-2, "the steps after it are seen"
