"""Sharded gradients: each rank keeps only its part of their sums."""

from dataclasses import replace

import pytest

from tests.letters import M, P, Z
from tests.parity import assert_weights_near
from tests.sharded_places import PLACES
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

GRADIENTS = {Z: "gradients", "bucket_mb": 1e-2}


# test_every_schedule.py trains the pipelines with accumulation.
CASES = [(name, 1 if P in layout else 2) for name, (_, layout) in PLACES.items()]


@pytest.mark.parametrize(("name", "accumulate"), [*CASES, ("d2", 1), ("d4 in two levels", 1)])
def test_training_equals_single_process(name, accumulate, parity):
    world_size, layout = PLACES[name]
    run = Run(accumulate=accumulate, global_batch=16)
    parity.check(run, (world_size, {**layout, **GRADIENTS}))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_one_microbatch_equals_sharded_optimizer_bitwise(precision, parity):
    run = Run(precision=precision, steps=2)
    optimizer, gradients = (
        parity.ranks(run.on((4, {**GRADIENTS, Z: shard}))) for shard in ("optimizer", "gradients")
    )
    for one, other in zip(optimizer, gradients, strict=True):
        assert one["losses"] == other["losses"]
        assert_weights_near(other["final"], one["final"], tolerance=0)


def test_llama_with_changing_lengths_and_incomplete_last_batch(parity):
    """Replicas share an incomplete batch otherwise than one process trains on it."""
    run = Run(llama=True, samples=29, steps=6, changing_lengths=True)
    place = (4, {P: 2, M: 2, **GRADIENTS})
    expected = parity.result(run.on((4, {P: 2, M: 2, "bucket_mb": 1e-2})))
    parity.check(run, place, expected=expected)


def test_plain_loss_of_eagerly_built_model(parity):
    run = Run(eager=True, count_tokens=False, ignore_padding=False, accumulate=2)
    parity.check(run, (2, {M: 2, **GRADIENTS}))


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_float16_skips_steps_like_sharded_optimizer(level, parity):
    run = replace(Run(steps=4), precision="16-mixed")
    found, expected = (
        parity.ranks(run.on((2, {**GRADIENTS, Z: shard})))[0] for shard in (level, "optimizer")
    )
    assert found["losses"] == expected["losses"]
