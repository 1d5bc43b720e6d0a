"""Blocks that their user compiles give the same answer in every layout: what is ours in them is not the compiler's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import parity
from tests.parity import LitTiny, Run, assert_same, fit
from tests.pool import Pool

T, P, V, M, S, R = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "num_microbatches",
    "schedule",
    "recompute",
)
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "d2 sharded": ({"shard_optimizer": True}, True),
    "t2sp": ({T: 2, "sequence_parallel": True}, False),
    "p2v2 full": ({P: 2, V: 2, M: 4, R: "full"}, True),
    "p2 zb_h1": ({P: 2, M: 4, S: "zb_h1"}, True),
    "p2 zb_h1 full": ({P: 2, M: 4, S: "zb_h1", R: "full"}, False),
}
"""The layout, and whether a block is one graph."""


class LitCompiled(LitTiny):
    """Its blocks are compiled, as the user of one device would do it."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            for block in self.model.blocks:
                block.compile(backend="aot_eager")


def fit_compiled(rank: int, run: Run) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "LitTiny", LitCompiled)
        found = fit(rank, run)
    return {**found, "graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_answer(name: str, pool: Pool) -> None:
    layout, is_one_graph = LAYOUTS[name]
    settings = {"layers": 4, "steps": 3, "clip": None}
    expected = pool.run(fit, world_size=1, args=(Run(**settings),))[0]
    for found in pool.run(fit_compiled, world_size=2, args=(Run(world_size=2, layout=layout, **settings),)):
        assert_same(found, expected, tolerance=1e-4)
        assert (found["breaks"] == 0) == is_one_graph
        assert found["graphs"] > 0 or name == "p2 zb_h1 full"
