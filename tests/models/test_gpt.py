"""GPT: sizes, initial values, the meta device, tied weights and blocks split by heads."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ptdp.models import GPT, GPTConfig, active_parameters, num_parameters
from lightning_ptdp.models.gpt import SwiGLU
from lightning_ptdp.models.memory_saving import rotary_tables
from tests.models.builds import eager_and_lazy
from tests.models.configs import GPT2, LLAMA, MIXTRAL, VARIANTS

EVERY_VARIANT = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


def tokens(config, *, batch=2, length=10, seed=3):
    return torch.randint(
        config.vocabulary_size, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


@EVERY_VARIANT
def test_parameter_count_is_exact(config):
    assert num_parameters(config) == sum(p.numel() for p in GPT(config).parameters())


def test_parameter_count_matches_published_models():
    assert num_parameters(GPTConfig.gpt2()) == 124_439_808
    llama_7b = GPTConfig.llama(
        vocabulary_size=32000, sequence_length=2048, num_layers=32, hidden_size=4096, num_heads=32
    )
    assert num_parameters(llama_7b) == 6_738_415_616
    # arXiv 2401.04088: 47B, 13B
    assert (num_parameters(MIXTRAL), active_parameters(MIXTRAL)) == (46_702_792_704, 12_879_925_248)


@EVERY_VARIANT
def test_attention_is_causal_and_every_parameter_gets_gradient(config):
    torch.manual_seed(0)
    model, ids = GPT(config), tokens(config)
    logits = model(ids)
    assert logits.shape == (2, 10, config.vocabulary_size)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    ids[:, 6] = (ids[:, 6] + 1) % config.vocabulary_size
    changed = (model(ids) - logits).abs().amax(dim=(0, 2))
    assert (changed[:6] == 0).all()
    assert (changed[6:] > 0).all()


@BOTH
def test_logits_depend_on_token_order(config):
    torch.manual_seed(0)
    logits = GPT(config)(torch.tensor([[7, 5, 9], [5, 7, 9]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1], atol=1e-4)


def test_initial_values():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig.gpt2(
            vocabulary_size=500, sequence_length=64, num_layers=8, hidden_size=128, num_heads=4
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(
                parameter, torch.full_like(parameter, float("norm" in name and "weight" in name))
            ), name
        else:
            std = (
                0.02 / math.sqrt(16)
                if name.endswith(("projection.weight", "down.weight"))
                else 0.02
            )
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 20, name


@EVERY_VARIANT
def test_meta_model_gets_same_values_as_eager_model(config):
    eager, lazy = eager_and_lazy(lambda: GPT(config))
    ids = tokens(config)
    assert torch.equal(eager(ids), lazy(ids))


def test_reset_in_order_reproduces_initial_values():
    torch.manual_seed(5)
    model = GPT(LLAMA)
    values = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))


def test_head_is_tied_to_embedding():
    model = GPT(GPT2)
    assert model.head.weight is model.wte.weight
    assert "head.weight" not in dict(model.named_parameters())
    before = model.wte.weight.detach().clone()
    model.head.reset_parameters()
    assert torch.equal(model.wte.weight, before)
    assert GPT(LLAMA).head.weight.shape == (61, 32)


def test_too_long_sequence_is_refused():
    with pytest.raises(ValueError, match=r"25 tokens .*sequence_length=24"):
        GPT(GPT2)(tokens(GPT2, length=25))


@BOTH
def test_fake_tensors_and_inference_mode_leave_no_state(config):
    model, ids = GPT(config), tokens(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.zeros(2, 10, dtype=torch.int64)).shape == (2, 10, config.vocabulary_size)
    with torch.inference_mode():
        expected = model(ids)
    logits = model(ids)
    logits.sum().backward()
    assert torch.equal(expected, logits)


def test_rotary_angles_are_float32_in_bf16_model():
    rotary = GPT(LLAMA).bfloat16().blocks[0].attention.rotary
    cos, _ = rotary_tables(torch.arange(5000), rotary.head_dim, rotary.base)
    assert cos.dtype == torch.float32
    assert cos[4999, 0].item() == pytest.approx(math.cos(4999.0), abs=1e-5)


def test_dropout_is_active_in_training_only():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig.gpt2(
            vocabulary_size=50,
            sequence_length=16,
            num_layers=1,
            hidden_size=16,
            num_heads=2,
            dropout=0.5,
        )
    )
    ids = tokens(model.config)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def take(linear, *, rows=None, columns=None):
    """Keep some output rows (bias too) or input columns of a layer."""
    weight, bias = linear.weight.data, linear.bias
    if rows is not None:
        linear.weight.data = torch.cat([weight[part] for part in rows])
        if bias is not None:
            bias.data = torch.cat([bias.data[part] for part in rows])
    if columns is not None:
        linear.weight.data = weight[:, columns]


def nth(rank, size, total, start=0):
    return slice(start + rank * total // size, start + (rank + 1) * total // size)


@pytest.mark.parametrize(
    "config", [GPT2, LLAMA, VARIANTS["layer norm, rope, gelu"]], ids=["gpt2", "llama gqa", "rope"]
)
def test_block_equals_sum_of_its_head_shards(config):
    """The same code runs with fewer heads, so that tensor parallelism needs no other model."""
    size = 2
    q, kv, f = config.hidden_size, config.kv_heads * config.head_dim, config.ffn_size
    parts = {"attention": [], "mlp": []}
    x = torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for rank in range(size + 1):  # the last one is the whole block
        torch.manual_seed(1)
        block = GPT(config).blocks[0]
        for linear in (
            m for m in block.modules() if isinstance(m, nn.Linear) and m.bias is not None
        ):
            nn.init.normal_(linear.bias)
        attention, mlp = block.attention, block.mlp
        if rank < size:
            heads = [nth(rank, size, q), nth(rank, size, kv, q), nth(rank, size, kv, q + kv)]
            take(attention.qkv, rows=heads)
            take(attention.projection, columns=nth(rank, size, q))
            if isinstance(mlp, SwiGLU):
                take(mlp.gate_up, rows=[nth(rank, size, f), nth(rank, size, f, f)])
            else:
                take(mlp.up, rows=[nth(rank, size, f)])
            take(mlp.down, columns=nth(rank, size, f))
            if rank > 0 and config.bias:  # the bias of the summed output is added once
                attention.projection.bias.data.zero_()
                mlp.down.bias.data.zero_()
        parts["attention"].append(attention(x))
        parts["mlp"].append(mlp(x))
    for name, (*cut, whole) in parts.items():
        torch.testing.assert_close(sum(cut), whole, rtol=1e-5, atol=1e-6, msg=name)
