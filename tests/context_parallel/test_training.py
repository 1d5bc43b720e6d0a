"""Training with sequences cut over ranks gives the answer of one process, through ``Trainer.fit``
and with every other axis."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.letters import SP, A, C, M, P, R, S, T, V
from tests.parity import Frozen, Run, assert_same, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "c2": (2, {C: 2}),
    "c2 heads": (2, {C: 2, A: "all_to_all"}),
    "c4": (4, {C: 4}),
    "c2m4": (2, {C: 2, M: 4}),
    "d2c2": (4, {C: 2}),
    "t2c2": (4, {T: 2, C: 2}),
    "t2c2sp heads": (4, {T: 2, C: 2, SP: True, A: "all_to_all"}),
    "p2c2": (4, {P: 2, C: 2, M: 4}),
    "p2v2c2": (4, {P: 2, V: 2, C: 2, M: 4}),
    "p2v2c2 zb_v": (4, {P: 2, V: 2, C: 2, M: 4, S: "zb_v"}),
    "p2c2 full": (4, {P: 2, C: 2, M: 4, R: "full"}),
    "p2c2 selective heads": (4, {P: 2, C: 2, M: 4, S: "zb_h1", R: "selective", A: "all_to_all"}),
    "t2c4": (8, {T: 2, C: 4}),
    "p2c4": (8, {P: 2, C: 4, M: 2}),
    "t2p2c2sp": (8, {T: 2, P: 2, C: 2, M: 2, SP: True}),
    "d2p2c2": (8, {P: 2, C: 2, M: 2}),
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


def check(pool: Pool, reference: Any, name: str, **settings: Any) -> None:
    world_size, layout = LAYOUTS[name]
    ranks = pool.run(
        fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),)
    )
    for found in ranks:
        assert_same(found, reference(**settings))
    if layout.get(M, 1) > 1 or P in layout or C in layout:
        expected = reference(**settings)["logged"]
        for key in (
            expected if world_size == layout.get(P, 1) * layout.get(C, 1) * layout.get(T, 1) else ()
        ):
            assert found["logged"][key] == pytest.approx(expected[key], rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpt_with_accumulation_clipping_ties_and_uneven_padding(
    name: str, pool: Pool, reference: Any
) -> None:
    check(pool, reference, name, accumulate=2, steps=6)


@pytest.mark.parametrize("name", ["c2", "d2c2", "p2v2c2"])
def test_llama_validated_on_the_way(name: str, pool: Pool, reference: Any) -> None:
    check(pool, reference, name, llama=True, steps=6, validate_every=2)


@pytest.mark.parametrize("name", ["c2", "c2m4", "p2c2"])
def test_a_mean_loss_that_does_not_count_its_tokens(name: str, pool: Pool, reference: Any) -> None:
    """Samples without padding but for one slice, so that a mean of means would show."""
    check(pool, reference, name, count_tokens=False, ignore_padding=False, steps=6, eager=True)


def test_a_mean_loss_over_uneven_slices(pool: Pool, reference: Any) -> None:
    check(pool, reference, "c2", count_tokens=False, steps=6)


@pytest.mark.parametrize(
    ("recompute", "attention"),
    [
        ("full", "ring"),
        ("full", "all_to_all"),
        ("selective", "ring"),
        ("selective", "all_to_all"),
        ("offload", "ring"),
    ],
)
def test_recomputation_changes_no_bit_with_dropout(
    recompute: str, attention: str, pool: Pool
) -> None:
    layout = {P: 2, C: 2, M: 2, A: attention}
    settings = {"steps": 3, "dropout": 0.2, "world_size": 4}
    kept = pool.run(fit, world_size=4, args=(Run(layout=layout, **settings),))[0]
    found = pool.run(fit, world_size=4, args=(Run(layout={**layout, R: recompute}, **settings),))[0]
    assert found["losses"] == kept["losses"]
    for name, value in kept["final"].items():
        assert torch.equal(found["final"][name], value), name
