"""The same answer in every layout: initial weights bitwise, loss curve, norms and final weights of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.parity import Run, fit
from tests.pool import Pool

T, P, V, M, SP = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "num_microbatches",
    "sequence_parallel",
)
LAYOUTS = {
    "m4": (1, {M: 4}),
    "d2": (2, {}),
    "d2m2": (2, {M: 2}),
    "t2": (2, {T: 2}),
    "t2sp": (2, {T: 2, SP: True}),
    "p2": (2, {P: 2, M: 4}),
    "p2 gpipe": (2, {P: 2, M: 4, "schedule": "gpipe"}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "p2v3 uneven": (2, {P: 2, V: 3, M: 4}),
    "p2v2 m3": (2, {P: 2, V: 2, M: 3}),
    "p2 m1": (2, {P: 2, M: 1}),
    "p4 m2": (4, {P: 4, M: 2}),
    "t2p2": (4, {T: 2, P: 2, M: 4}),
    "t2p2v2sp": (4, {T: 2, P: 2, V: 2, M: 4, SP: True}),
    "d2p2": (4, {P: 2, M: 2}),
    "d2t2p2": (8, {T: 2, P: 2, M: 2}),
}


@pytest.fixture(scope="module")
def reference(pool: Pool) -> Any:
    @cache
    def one_process(run: Run) -> dict[str, Any]:
        return pool.run(fit, world_size=1, args=(run,))[0]

    return lambda **kwargs: one_process(Frozen(**kwargs))


class Frozen(Run):
    """A run without layout, hashable for the cache."""

    def __hash__(self) -> int:
        return hash(tuple(sorted((k, repr(v)) for k, v in vars(self).items())))


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["initial"].keys() == expected["initial"].keys()
    for name, value in expected["initial"].items():
        assert torch.equal(found["initial"][name], value), f"{name} starts differently"
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=tolerance, atol=0)
    torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=tolerance, atol=0)
    for name, value in expected["final"].items():
        difference = (found["final"][name] - value).norm() / value.norm()
        assert difference < tolerance, f"{name} ends {difference:.1e} away"


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpt_with_accumulation_clipping_ties_and_uneven_padding(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"layers": 7, "accumulate": 2}
    expected = reference(**settings)
    assert min(expected["norms"]) > 0.05, "the clipping threshold must bite"
    ranks = pool.run(fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),))
    for found in ranks:
        assert_same(found, expected)
    assert len({tuple(found["losses"]) for found in ranks}) == 1, "ranks disagree about the loss"


@pytest.mark.parametrize("name", ["d2", "t2sp", "p2v2", "t2p2v2sp"])
def test_llama_without_accumulation(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"llama": True, "steps": 10, "clip": None}
    found = pool.run(fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),))[0]
    assert_same(found, reference(**settings))


@pytest.mark.parametrize("name", ["p2v2 m3", "t2p2", "d2p2"])
def test_eagerly_built_model_and_a_plain_loss(name: str, pool: Pool, reference: Any) -> None:
    world_size, layout = LAYOUTS[name]
    settings = {"eager": True, "count_tokens": False, "ignore_padding": False, "steps": 10, "accumulate": 2}
    found = pool.run(fit, world_size=world_size, args=(Run(world_size=world_size, layout=layout, **settings),))[0]
    assert_same(found, reference(**settings))


def test_last_batch_that_does_not_divide(pool: Pool, reference: Any) -> None:
    settings = {"samples": 29, "steps": 12}
    layout = {P: 2, V: 2, M: 4}
    found = pool.run(fit, world_size=2, args=(Run(world_size=2, layout=layout, **settings),))[0]
    assert_same(found, reference(**settings))
