"""Blocks compiled by the strategy or the user: parity in every layout, one graph each."""

import copy
import importlib.util
import pickle
import re
from dataclasses import dataclass

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_ptdp.blocks.local_blocks import CompiledForward, compile_blocks
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.forward.own_forward import restore_forwards
from lightning_ptdp.models import GPT, gpt_plan
from lightning_ptdp.parallelize import parallelize
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ColumnParallelLinear
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.letters import SP, A, C, M, P, R, S, T, V
from tests.parity import fit
from tests.tiny_gpt import LitTiny, Run, gpt_config

pytestmark = pytest.mark.thorough

LAYOUTS = {
    "d2 sharded": {"shard": "optimizer"},
    "t2": {T: 2, R: "selective"},
    "t2sp": {T: 2, SP: True},
    "t2sp in pieces": {T: 2, SP: True, "tensor_overlap": 3},
    "c2": {C: 2, R: "full"},
    "c2 all to all": {C: 2, A: "all_to_all"},
    "p2v2": {P: 2, V: 2, M: 4, R: "full"},
    "p2 uneven": {P: 2, M: 3, R: "offload"},
}
USERS = {
    "t2sp": ({T: 2, SP: True}, 1),
    "p2 zb_h1": ({P: 2, M: 4, S: "zb_h1"}, 1),
    "p2 zb_h1 full": ({P: 2, M: 4, S: "zb_h1", R: "full"}, 0),
}
"""Layouts and their minimum number of graphs."""
RUN = Run(steps=3, clip=None)
AOT = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}


@dataclass(frozen=True, kw_only=True)
class CompiledRun(Run):
    """Training of a module that is compiled by the user."""

    def make_module(self):
        return LitCompiled(self)


class LitCompiled(LitTiny):
    """Module whose blocks are compiled as on a single device."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            for block in self.model.blocks:
                block.compile(backend="aot_eager")


def fit_counted(rank, run):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return {
        **fit(rank, run),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def _kept_by_a_block(rank, compiled):
    """Return the bytes that a block saves for its backward, without its parameters.

    The block is one of two tensor-parallel shards.
    """
    config = gpt_config(Run(llama=True))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=2, tensor_parallel_size=2, sequence_parallel=True), rank=0
    )
    model = GPT(config)
    plan = gpt_plan(config, prefix="")
    parallelize(
        model,
        convert=lambda: None,
        plan=lambda _: plan,
        mesh=mesh,
        config=PTDPConfig(),
        seed=0,
        device=torch.device("cpu"),
    )
    block, kept = model.blocks[1], {}
    forward = (
        torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        if compiled
        else block.forward
    )

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = forward(torch.randn(2, 8, 16, requires_grad=True))
    y.sum().backward()
    return sum(kept.values()) - sum(p.untyped_storage().nbytes() for p in block.parameters())


def _compilations(rank, num_layers):
    """Return the compiled graphs, and the breaks between them, of a model with experts."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = GPT(gpt_config(Run(llama=True, experts=4, layers=num_layers)))
    compile_blocks(
        model,
        policy="blocks",
        blocks=("blocks",),
        device=torch.device("cpu"),
        options={"backend": "aot_eager"},
    )
    model(torch.zeros(2, 8, dtype=torch.long))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_blocks_of_experts_share_their_graphs(pool):
    few, many = (pool.run(_compilations, world_size=1, args=(count,)) for count in (2, 5))
    assert few == many


def test_compiled_block_saves_no_more_memory_than_eager(pool):
    (eager,), (compiled,) = (
        pool.run(_kept_by_a_block, world_size=1, args=(as_graph,)) for as_graph in (False, True)
    )
    assert compiled <= eager  # the eager layers gather the sequence again in the backward


def _order_in_a_block(rank):
    """Return the collectives, waits and products of a column layer's backward, in order.

    They are read from the generated code.
    """
    from torch._inductor.utils import run_and_get_code

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=2, tensor_parallel_size=2, sequence_parallel=True), rank=0
    )
    options = {"group": mesh.group("tensor"), "sequence_parallel": True}
    model = nn.Sequential(
        nn.ModuleList([ColumnParallelLinear(nn.Parameter(torch.ones(4, 6)), **options)])
    )
    compile_blocks(
        model,
        policy="blocks",
        blocks=("0",),
        device=torch.device("cpu"),
        options={"mode": "default"},
    )
    x = torch.ones(1, 6, 6, requires_grad=True)
    _, (_, code) = run_and_get_code(lambda: model[0][0](x).backward(torch.ones(1, 12, 4)))
    return re.findall(
        r"(gather_after|reduce_scatter|wait)\w*\.default\(|extern_kernels\.(mm)\(", code
    )


def test_compiled_backward_overlaps_collectives_with_matmuls(pool):
    (found,) = pool.run(_order_in_a_block, world_size=1)
    # each collective overlaps with a product
    order = [
        "gather_after",
        "mm",
        "reduce_scatter",
        "wait",
        "mm",
        "wait",
    ]
    assert ["".join(names) for names in found] == order


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks_match_single_process(name, parity):
    place = 2, {**LAYOUTS[name], **AOT}
    for found in parity.check(RUN, place, tolerance=1e-4, fit=fit_counted):
        assert found["breaks"] == 0
        assert found["graphs"] == 1 or name == "p2 uneven"  # all blocks share it


@pytest.mark.parametrize("name", USERS)
def test_user_compiled_blocks_match_single_process(name, parity):
    (layout, graphs), expected = USERS[name], parity.result(RUN)
    run = CompiledRun(**vars(RUN))
    for found in parity.check(run, (2, layout), expected=expected, tolerance=1e-4, fit=fit_counted):
        assert found["breaks"] == 0 or graphs == 0
        assert found["graphs"] >= graphs


class _Model(L.LightningModule):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def _compiled(module, **given):
    options = {
        "policy": "blocks",
        "device": torch.device("cpu"),
        "options": AOT["compile_options"],
        **given,
    }
    restore_forwards(module, CompiledForward)
    compile_blocks(module, blocks=None, **options)
    return [
        isinstance(getattr(block.forward, "__self__", None), CompiledForward)
        for block in module.blocks
    ]


def test_blocks_compiled_by_user_are_not_compiled_again():
    module = _Model()
    module.blocks[1].compile(backend="aot_eager")
    names = list(module.state_dict())
    assert _compiled(module) == [True, False, True]  # the user's compiled block is unchanged
    assert list(module.state_dict()) == names
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert made.blocks[0].forward.__self__.module is made.blocks[0]
        torch.testing.assert_close(made.blocks(torch.ones(2, 4)), module.blocks(torch.ones(2, 4)))
    assert _compiled(module, policy="auto") == [False] * 3


def test_invalid_compile_settings_are_refused(monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"compile='block' must be one of 'none', 'blocks', 'auto'; did you mean 'blocks'",
    ):
        PTDPConfig(compile="block")
    with pytest.raises(
        ValueError,
        match=r"compile='blocks' cannot be combined with schedule='zb_h1', which .* Use schedule='1f1b'",
    ):
        PTDPConfig(compile="blocks", schedule="zb_h1", pipeline_parallel_size=2)
    with pytest.raises(
        ValueError,
        match="compile='blocks' cannot be combined with keyed_dropout=True, which intercepts",
    ):
        PTDPConfig(compile="blocks", keyed_dropout=True)
    assert PTDPConfig(compile="auto", keyed_dropout=True).compiles == "none"
    with pytest.raises(
        ValueError,
        match=r"compile_options has the unknown key 'bakend'. torch.compile accepts backend, ",
    ):
        PTDPConfig(compile="blocks", compile_options={"bakend": "inductor"})
    with pytest.raises(ValueError, match="compile_options is set, but compile='none'"):
        PTDPConfig(compile_options={})
    with pytest.raises(ValueError, match="no repeated container found in _Model"):
        PTDPStrategy(compile="blocks").check(_Model(count=1))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=PTDPStrategy(compile="blocks"), logger=False
    )
    with pytest.raises(
        ValueError,
        match=r"compile='blocks' needs a C\+\+ compiler \(g\+\+\), which was not found. Install it, or use",
    ):
        trainer.fit(_Model())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning,
        match=r"compile='auto' does not compile: compile='blocks' needs .*triton.* a C compiler",
    ):
        assert (
            _compiled(_Model(), policy="auto", device=torch.device("cuda"), options={})
            == [False] * 3
        )


def test_compiled_module_is_refused():
    for options in ({"compile": "auto"}, AOT):
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=PTDPStrategy(**options), logger=False
        )
        with pytest.raises(
            MisconfigurationException,
            match=r"torch.compile\(module\), but compile='\w+' would compile .* again",
        ):
            trainer.fit(torch.compile(_Model()))
