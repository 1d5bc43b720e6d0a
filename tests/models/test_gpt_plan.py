"""Tensor-parallel plan of GPT: it covers every matrix and keeps losses and gradients."""

import pytest
import torch
from torch import nn

from lightning_ptdp.models import GPT, LitGPT, gpt_plan
from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.tensor_parallel import Experts, Whole
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.models.builds import nested
from tests.models.configs import GPT2, LLAMA, VARIANTS
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import whole_gradient

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("prefix", ["", "inner.model"])
def test_plan_contains_every_matrix_and_nothing_else(config, prefix):
    model = nested(GPT(config), prefix)
    plan = gpt_plan(config, prefix=prefix)
    kinds = plan.resolve(model)
    cut = {name for name, kind in kinds.items() if not isinstance(kind, Whole | Experts)}
    routers = {name for name, _ in model.named_modules() if name.endswith("router.gate")}
    assert (
        cut
        == {name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
        - routers
    )
    plan.check(model, 1)
    parts = find_parts(model, plan)
    assert parts.blocks == (f"{prefix}.blocks".removeprefix("."),)


def test_lightning_module_checks_plan_and_layout():
    lit = LitGPT(LLAMA)
    lit.configure_model()
    lit.configure_parallel().check(lit, 2, sequence_parallel=True)
    lit.check_parallel(ParallelLayout(world_size=2, tensor_parallel_size=2))
    lit.check_parallel(ParallelLayout(world_size=4, tensor_parallel_size=4))
    with pytest.raises(ValueError, match=r"num_heads=4 .*tensor_parallel_size=8.* of 1, 2, 4$"):
        lit.check_parallel(ParallelLayout(world_size=8, tensor_parallel_size=8))


def cut_model(rank, config, sequence_parallel):
    """Return the largest relative error of this rank's losses and gradients."""
    size = torch.distributed.get_world_size()
    layout = ParallelLayout(
        world_size=size, tensor_parallel_size=size, sequence_parallel=sequence_parallel
    )
    group = ProcessMesh.create(layout=layout, rank=rank).group("tensor")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(GPT(config))
    whole, cut = models
    shardings = apply_plan(
        cut, gpt_plan(config, prefix=""), group=group, sequence_parallel=sequence_parallel
    )
    ids, labels = torch.randint(
        config.vocabulary_size, (2, 2, 12), generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for model in models:
        logits = model(ids).flatten(0, 1)
        losses.append(nn.functional.cross_entropy(logits, labels.flatten(), reduction="none"))
        losses[-1].mean().backward()
    errors = [relative_error(losses[1], losses[0])]
    full = dict(whole.named_parameters())
    for name, parameter in cut.named_parameters():
        gradient, expected = parameter.grad, full[name].grad
        gradient = whole_gradient(gradient, shardings[name], group)
        errors.append(relative_error(gradient, slice_full(expected, shardings[name])))
    return max(errors)


def relative_error(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["t2", "t2+sp"])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama gqa"])
def test_split_model_equals_full_model_on_two_ranks(pool, config, sequence_parallel):
    for error in pool.run(cut_model, world_size=2, args=(config, sequence_parallel)):
        assert error < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["t4", "t4+sp"])
def test_split_model_with_fewer_kv_heads_than_ranks(pool, sequence_parallel):
    for config in (LLAMA, VARIANTS["llama, tied, biases, one kv head"]):
        for error in pool.run(cut_model, world_size=4, args=(config, sequence_parallel)):
            assert error < 1e-5
