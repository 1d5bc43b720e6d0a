"""One layer of experts on two ranks: output, gradients and bytes sent."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.tensor_parallel import Experts, shard_module
from lightning_ptdp.tensor_parallel.kinds import ModulePlace
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

pytest.importorskip("transformers")

TOKENS, WIDTH, EXPERTS, CHOSEN = 12, 16, 4, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """An expert module of transformers; ``routing`` "one" sends all tokens to one expert."""

    name: str
    dtype: torch.dtype = torch.float64
    routing: str = "own"


def make(name, dtype):
    from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_local_experts": EXPERTS,
    }
    config, kind = {
        "mixtral": (MixtralConfig(**sizes), MixtralExperts),
        "gpt_oss": (GptOssConfig(**sizes), GptOssExperts),
        "nemotron_h": (
            NemotronHConfig(hidden_size=WIDTH, moe_intermediate_size=24, n_routed_experts=EXPERTS),
            NemotronHExperts,
        ),
    }[name]
    config._experts_implementation = "grouped_mm"
    module = kind(config).to(dtype)
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(case, ranks):
    """Return hidden states, indices, weights, and the gradient of the output."""
    torch.manual_seed(2)
    x, grad = torch.randn(2, ranks * TOKENS, WIDTH, dtype=case.dtype)
    weights, index = torch.rand(ranks * TOKENS, EXPERTS, dtype=case.dtype).topk(CHOSEN, -1)
    return x, torch.zeros_like(index) if case.routing == "one" else index, weights, grad


def results(module, x, index, weights, grad):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    output = module(x, index, weights)
    output.backward(grad)
    assert x.grad is not None and weights.grad is not None
    found = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return {"output": output.detach(), "x": x.grad, "weights": weights.grad, **found}


def parallel(rank, case):
    """Return this rank's results for its tokens, and the bytes of each all-to-all."""
    mesh = ProcessMesh.create(
        layout=ParallelLayout(world_size=2, expert_parallel_size=2), rank=rank
    )
    module, _ = shard_module(
        make(case.name, case.dtype),
        Experts(),
        ModulePlace(group=mesh.group("expert"), sequence_parallel=False, shared={}, name="experts"),
    )
    bytes_, send = [], dist.all_to_all_single

    def counted(output, source, *args, **kwargs):
        bytes_.append(source.nbytes)
        return send(output, source, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        return results(module, *(each.chunk(2)[rank] for each in tokens(case, 2))), bytes_


@pytest.mark.parametrize(
    "case",
    [
        Case(name="mixtral"),
        Case(name="mixtral", dtype=torch.float32),
        Case(name="mixtral", dtype=torch.float32, routing="one"),
        Case(name="gpt_oss"),
        Case(name="gpt_oss", routing="one"),
        Case(name="nemotron_h", dtype=torch.float32),
    ],
    ids=lambda case: f"{case.name} {case.dtype} {case.routing}",
)
def test_two_ranks_equal_single_process(case, pool):
    whole = make(case.name, case.dtype)
    whole.config._experts_implementation = "eager"
    expected = results(whole, *tokens(case, 2))
    item, index = case.dtype.itemsize, tokens(case, 2)[1]
    for rank, (found, sent) in enumerate(pool.run(parallel, world_size=2, args=(case,))):
        for name, value in found.items():
            wanted = expected[name].chunk(2)[rank]
            torch.testing.assert_close(
                value, wanted, rtol=1e-9 if item == 8 else 1e-4, atol=1e-9 if item == 8 else 1e-5
            )
        came = int((index // (EXPERTS // 2) == rank).sum())
        here, there = (count * WIDTH * item for count in (TOKENS * CHOSEN, came))
        assert sent == [8 * EXPERTS, here, there, here, there], (
            "expected counts, rows, outputs, and the gradients of outputs and rows"
        )


def test_dispatch_needs_no_scatter_add(pool):
    for names in pool.run(
        operations, world_size=2, args=(Case(name="mixtral", dtype=torch.float32),)
    ):
        assert (
            not {"aten::index_add_", "aten::index_put_", "aten::_index_put_impl_", "aten::nonzero"}
            & names.keys()
        )
        # Four in forward (to ranks, to experts, and both inverses), four in backward, and four of
        # indices and weights.
        assert names["aten::index_select"] == 12
        assert names["aten::sort"] == 1
        assert names["aten::_grouped_mm"] == 6


def operations(rank, case):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        parallel(rank, case)
    return {event.key: event.count for event in profile.key_averages()}
