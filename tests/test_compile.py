"""Blocks that their user compiles give the same answer in every layout: what is ours in them is not the compiler's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ptdp.models import GPT, gpt_plan
from lightning_ptdp.parallelize import parallelize
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests import parity
from tests.parity import LitTiny, Run, assert_same, fit, gpt_config
from tests.pool import Pool

T, C, P, V, M, S, R = (
    "tensor_parallel_size",
    "context_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "num_microbatches",
    "schedule",
    "recompute",
)
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "d2 sharded": ({"shard_optimizer": True}, True),
    "t2": ({T: 2}, True),
    "t2sp": ({T: 2, "sequence_parallel": True}, True),
    "c2": ({C: 2}, True),
    "c2 all to all": ({C: 2, "context_parallel_attention": "all_to_all"}, True),
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


def _kept_by_a_block(rank: int, compiled: bool) -> int:
    """Bytes that a block of one of two tensor ranks keeps for its backward, without its parameters."""
    config = gpt_config(Run(llama=True))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = ProcessMesh.create(layout=ParallelLayout(world_size=2, tensor_parallel_size=2, sequence_parallel=True), rank=0)
    model = GPT(config)
    plan = gpt_plan(config, prefix="")
    parallelize(model, convert=lambda: None, plan=lambda _: plan, mesh=mesh, seed=0, device=torch.device("cpu"))
    block, kept = model.blocks[1], dict[int, int]()
    forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True) if compiled else block.forward

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = forward(torch.randn(2, 8, 16, requires_grad=True))
    y.sum().backward()
    return sum(kept.values()) - sum(p.untyped_storage().nbytes() for p in block.parameters())


def test_a_compiled_block_keeps_no_gathered_sequence(pool: Pool) -> None:
    (eager,), (compiled,) = (pool.run(_kept_by_a_block, world_size=1, args=(as_graph,)) for as_graph in (False, True))
    assert compiled <= eager  # whose layers gather again what they need


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_answer(name: str, pool: Pool) -> None:
    layout, is_one_graph = LAYOUTS[name]
    settings = {"layers": 4, "steps": 3, "clip": None}
    expected = pool.run(fit, world_size=1, args=(Run(**settings),))[0]
    for found in pool.run(fit_compiled, world_size=2, args=(Run(world_size=2, layout=layout, **settings),)):
        assert_same(found, expected, tolerance=1e-4)
        assert (found["breaks"] == 0) == is_one_graph
        assert found["graphs"] > 0 or name == "p2 zb_h1 full"
