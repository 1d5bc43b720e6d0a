"""With dropout by key, training with dropout gives the same answer in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.letters import SP, C, M, P, R, S, T, V
from tests.parity import Frozen, Run, assert_same, fit
from tests.pool import Pool

pytestmark = pytest.mark.thorough

KEYED = {"keyed_dropout": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "m4": (1, {M: 4}),
    "d2": (2, {}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "t4": (4, {T: 4}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "p2 full": (2, {P: 2, M: 4, R: "full"}),
    "t2 selective": (2, {T: 2, R: "selective"}),
    "t2p2v2sp zb_v full": (4, {T: 2, P: 2, V: 2, M: 4, SP: True, S: "zb_v", R: "full"}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_answer(name: str, pool: Pool, reference: Any) -> None:
    settings = {"dropout": 0.2, "steps": 4}
    world_size, layout = LAYOUTS[name]
    found = pool.run(
        fit,
        world_size=world_size,
        args=(Run(world_size=world_size, layout=layout | KEYED, **settings),),
    )[0]
    expected = reference(layout=KEYED, **settings)
    assert_same(found, expected)
    assert not torch.allclose(
        torch.tensor(expected["losses"]), torch.tensor(reference(steps=4)["losses"])
    ), "dropout must matter"


def test_attention_weights_of_a_slice_are_refused(pool: Pool) -> None:
    run = Run(world_size=2, layout={C: 2} | KEYED, dropout=0.2, steps=1)
    with pytest.raises(AssertionError, match="keyed_dropout=True with attention dropout"):
        pool.run(fit, world_size=2, args=(run,))
