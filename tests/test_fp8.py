"""Linear layers in float8.

They are equal to torchao's, equal in every layout up to rounding, and close to bf16.
"""

import ast
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_ptdp
from lightning_ptdp.base.requirements import RequirementError
from lightning_ptdp.blocks.fp8 import apply_fp8, check_fp8
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.tensor_parallel import Column, ColumnParallelLinear, RowParallelLinear
from tests.errors import raises_with
from tests.letters import M, P, T, V
from tests.parity import assert_near, distance
from tests.tensor_parallel.toy import tensor_group
from tests.tiny_gpt import Run

SCALINGS = ("tensorwise", "rowwise")
CPU = torch.device("cpu")
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:fp8 on a CPU")]


class Conv1D(nn.Module):
    """Copy of the transformers class, which is recognized by its name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def spread(x, *, first=-3):
    """Scale rows and columns so differently that each needs its own float8 scale."""
    rows, columns = (
        torch.logspace(first, -first, x.numel() // x.size(-1)),
        torch.logspace(2, -2, x.size(-1)),
    )
    return x * rows.view(*x.shape[:-1], 1) * columns


def results(layer, x):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    # Small where the input is large, so that all tokens contribute equally to sums.
    (y * spread(torch.linspace(-1, 1, y.numel()).view_as(y), first=3)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


# ---- equality with torchao -----------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(3, 16, 32), (5, 32)], ids=["3 dimensions", "5 tokens"])
def test_linear_layer_matches_torchao(scaling, shape):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    plain = nn.Linear(32, 48)
    config = Float8LinearConfig.from_recipe_name(scaling)
    object.__setattr__(config, "emulate", True)
    peer = Float8Linear.from_float(plain, config)
    with torch.no_grad():
        plain.weight.copy_(spread(plain.weight))
    x = spread(torch.randn(shape))
    expected = results(peer, x)
    plain.zero_grad()
    turned = Conv1D(32, 48)
    turned.load_state_dict({"weight": plain.weight.t(), "bias": plain.bias})
    blocks = nn.ModuleList([plain, turned])
    exact = F.linear(x, plain.weight, plain.bias)
    note = apply_fp8(blocks, scaling=scaling, blocks="", device=CPU)
    assert note.startswith(f"fp8='{scaling}' computes in float8: ")
    for layer in blocks:
        found = results(layer, x)
        found[2] = found[2].t() if layer is turned else found[2]
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
        assert 1e-3 < (found[0] - exact).norm() / exact.norm() < 0.1


def test_only_linear_layers_of_blocks_use_float8():
    model = GPT(
        GPTConfig.gpt2(
            vocabulary_size=64, sequence_length=16, num_layers=2, hidden_size=32, num_heads=2
        )
    )
    model.blocks[1].adapter = nn.Linear(32, 4)
    note = apply_fp8(model, scaling="rowwise", blocks="blocks", device=CPU)
    names = ("attention.qkv", "attention.projection", "mlp.up", "mlp.down")
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert sorted(replaced) == sorted(
        f"blocks.{index}.{name}" for index in range(2) for name in names
    ), replaced
    assert all(f"blocks.*.{name}" in note for name in names)


def test_multihead_attention_is_not_converted_to_float8():
    block = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, batch_first=True)
    apply_fp8(nn.ModuleList([block]), scaling="rowwise", blocks="", device=CPU)
    assert [name for name, module in block.named_modules() if "forward" in vars(module)] == [
        "linear1",
        "linear2",
    ]


# ---- every layout --------------------------------------------------------------------------------


def shards(rank):
    group = tensor_group(rank)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 32), torch.randn(64), torch.randn(2, 16, 32)
    whole = nn.Linear(32, 64)
    whole.load_state_dict({"weight": weight, "bias": bias})
    apply_fp8(nn.ModuleList([whole]), scaling="rowwise", blocks="", device=CPU)
    mine = slice(rank * 32, rank * 32 + 32)
    expected = whole(x)
    for enters in (True, False):
        column = ColumnParallelLinear(
            nn.Parameter(weight[mine]), nn.Parameter(bias[mine]), enters=enters, group=group
        )
        apply_fp8(nn.ModuleList([column]), scaling="rowwise", blocks="", device=CPU)
        assert torch.equal(column(x), expected[..., mine]), (
            "the scales of a shard differ from those of the full weight"
        )
    back = nn.Linear(64, 32, bias=False)
    row = RowParallelLinear(nn.Parameter(back.weight.detach()[:, mine].clone()), group=group)
    apply_fp8(nn.ModuleList([row]), scaling="tensorwise", blocks="", device=CPU)
    found, exact = row(expected.detach()[..., mine]), back(expected.detach())
    assert 1e-3 < (found - exact).norm() / exact.norm() < 0.1


def test_shards_are_scaled_locally(pool):
    pool.run(shards, world_size=2)


LAYOUTS = {
    "p2 zb_h1 full": (2, {P: 2, "schedule": "zb_h1", "recompute": "full"}),
    "p2v2 offload": (2, {P: 2, V: 2, "recompute": "offload"}),
    "t2sp": (2, {T: 2, "sequence_parallel": True}),
    "t2p2 zb_h1": (4, {T: 2, P: 2, "schedule": "zb_h1"}),
}
RUN = Run(hidden=32, clip=None, layout={M: 4})


@pytest.mark.parametrize("name", LAYOUTS)
def test_float8_layouts_match_single_process(name, parity):
    """All layouts match a single process.

    Tensor parallelism rounds differently; its error is at most 1.2 times the rounding of float8.
    """
    world_size, layout = LAYOUTS[name]
    run = replace(RUN, layout={M: 4, "fp8": "tensorwise"})
    expected, plain = parity.result(run), parity.result(RUN)
    start = expected["initial"]
    rounding = distance(expected["final"], plain["final"], plain["initial"])
    assert rounding > 1e-3, "float8 has no rounding error"
    if T not in layout:
        parity.check(run, (world_size, layout))
        return
    for found in parity.ranks(run.on((world_size, layout))):
        assert distance(found["final"], expected["final"], start) < 1.2 * rounding
        assert_near(found["losses"], expected["losses"], 1e-3, "losses")


@pytest.mark.parametrize("scaling", SCALINGS)
def test_float8_losses_are_close_to_bf16(scaling, parity):
    plain = Run(hidden=32, steps=30, clip=None, precision="bf16-mixed")
    expected = parity.result(plain)["losses"]
    assert expected[-1] < 0.95 * expected[0], "the loss does not decrease"
    found = parity.result(replace(plain, layout={"fp8": scaling}))["losses"]
    assert_near(found, expected, 0.02, "losses")


# ---- errors --------------------------------------------------------------------------------------


def blocks_of(*sizes):
    return nn.ModuleDict(
        {"h": nn.ModuleList(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)}
    )


@pytest.mark.parametrize(
    ("sizes", "t", "words"),
    [
        ([(32, 40)], 1, ["'h.0.0'", "40 x 32", "multiples of 16", "fp8=None"]),
        ([(32, 32), (32, 48)], 2, ["'h.1.0'", "24 x 32", "smaller tensor_parallel_size"]),
        ([(32, 8)], 1, ["there are none"]),
    ],
)
def test_unsupported_layer_sizes_are_refused(sizes, t, words):
    model = blocks_of(*sizes)
    kinds = {f"h.{index}.0": Column() for index in range(len(sizes))}
    with raises_with(words):
        check_fp8(model, blocks="h", kinds=kinds, tensor_parallel_size=t)


def test_torchao_outside_declared_range_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.7.0")
    with pytest.raises(
        RequirementError,
        match=r"torchao 0\.7\.0 is installed, but lightning-ptdp needs .*: pip install 'torchao",
    ):
        check_fp8(blocks_of((32, 32)), blocks="h", kinds={}, tensor_parallel_size=1)


def test_torchao_is_imported_lazily():
    """The package never imports it at module level: it is slow and optional."""
    package = Path(lightning_ptdp.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", "") or ""]
            )
            assert not any(name.startswith("torchao") for name in names), path
        assert path.name == "quantization.py" or "from torchao" not in path.read_text(), path


def test_gpu_without_float8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(
        ValueError,
        match=r"capability 8\.9.* this NVIDIA A100 has 8\.0. Use fp8=None with "
        r"precision='bf16-mixed'",
    ):
        apply_fp8(
            blocks_of((32, 32)), scaling="rowwise", blocks="h", device=torch.device("cuda", 0)
        )


def test_cpu_warns_about_float8_emulation():
    with pytest.warns(UserWarning, match="fp8 is emulated on a CPU"):
        apply_fp8(blocks_of((32, 32)), scaling="rowwise", blocks="h", device=CPU)
