"""Block passes: order, options and repeated application."""

import torch
from torch import nn

from lightning_ptdp.blocks.fp8 import Float8Linear
from lightning_ptdp.blocks.local_blocks import CompiledForward
from lightning_ptdp.blocks.recompute import Recomputed
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.parallelize import apply_block_passes
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh


def applied(module, **options):
    return apply_block_passes(
        ParallelModel(module=module, plan=ParallelPlan(blocks=""), notes=("first",)),
        config=PTDPConfig(**options),
        mesh=ProcessMesh.create(layout=ParallelLayout(world_size=1), rank=0),
        surroundings=Surroundings(),
        device=torch.device("cpu"),
    )


def forwards(module):
    """Return the types that replace the forward, outermost first."""
    found, forward = [], vars(module).get("forward")
    while forward is not None:
        own = forward.__self__
        found.append(type(own))
        forward = own.replaced
    return found


def test_recomputation_wraps_compiled_forward():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = module(torch.ones(1, 2))
    compiled = {"compile": "blocks", "compile_options": {"backend": "eager"}}
    for _ in range(2):  # a second application undoes the first
        parallel = applied(module, **compiled, recompute="full")
        assert [forwards(block) for block in module] == [[Recomputed, CompiledForward]] * 2
    assert parallel.notes == ("first",)
    assert torch.equal(module(torch.ones(1, 2)), expected)
    applied(module, compile="none")
    assert [forwards(block) for block in module] == [[], []]


def test_note_of_block_pass_is_kept():
    module = nn.Sequential(nn.Linear(16, 16))
    (first, note) = applied(module, compile="none", fp8="rowwise").notes
    assert first == "first"
    assert "fp8='rowwise' computes in float8" in note


def test_run_without_float8_removes_earlier_float8():
    module = nn.Sequential(nn.Linear(16, 16))
    for fp8 in ("rowwise", None):
        applied(nn.Sequential(module), compile="none", fp8=fp8)
        assert forwards(module[0]) == ([] if fp8 is None else [Float8Linear])


def test_block_passes_are_off_by_default():
    module = nn.Sequential(nn.Linear(2, 2))
    assert applied(module).notes == ("first",)
    assert forwards(module[0]) == []
