"""BERT: sizes, initial values, the meta device, masks and positions."""

import math

import pytest
import torch
from torch import nn

from lightning_ptdp.models import Bert, BertConfig, bert_flops_per_sample, bert_plan, num_parameters
from lightning_ptdp.models.model_config import check_tensor_parallel
from lightning_ptdp.pipeline.discover import find_parts
from tests.errors import raises_with
from tests.models.builds import eager_and_lazy, nested
from tests.models.configs import SIZES

CONFIGS = {
    "post": BertConfig.original(**SIZES, init_std=0.2, dropout=0.0),
    "pre": BertConfig.megatron(
        **SIZES, init_std=0.2, dropout=0.0, ffn_hidden_size=48, num_segments=3
    ),
}
BOTH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def batch(*, length=10, seed=3):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(61, (3, length), generator=draw)
    mask = (torch.arange(length) < torch.tensor([[length], [6], [8]])).long()
    return {
        "input_ids": ids,
        "token_type_ids": torch.randint(2, (3, length), generator=draw),
        "attention_mask": mask,
    }


def built(config, seed=0):
    torch.manual_seed(seed)
    return Bert(config)


@BOTH
def test_parameter_count_is_exact(config):
    assert num_parameters(config) == sum(p.numel() for p in Bert(config).parameters())


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "published", "exact"),
    [
        (12, 768, 12, 110e6, 110_106_428),  # base and large of arXiv 1810.04805, both heads
        (24, 1024, 16, 340e6, 336_226_108),
        (24, 1024, 16, 336e6, 336_226_108),  # arXiv 1909.08053, section 5.3
        (24, 2048, 32, 1.3e9, None),
        (48, 2560, 40, 3.9e9, None),
    ],
)
def test_parameter_count_matches_published_models(layers, hidden, heads, published, exact):
    for make in (BertConfig.original, BertConfig.megatron):
        config = make(num_layers=layers, hidden_size=hidden, num_heads=heads)
        number = num_parameters(config)
        assert number == pytest.approx(published, rel=0.02)
        assert exact is None or number == exact
        with torch.device("meta"):
            model = Bert(config)
        assert number == sum(p.numel() for p in model.parameters())


def test_flops_match_published_formula():
    config = BertConfig()
    h, s, v, layers = 768, 512, 30522, 12
    # arXiv 2104.04473, section 5.1, without recomputation
    whole = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    heads = 3 * (2 * h * h * (s + 1) + 4 * h)
    assert bert_flops_per_sample(config, predictions=s) == pytest.approx(whole + heads, rel=1e-12)
    saved = 3 * (s - 77) * (2 * h * v + 2 * h * h)
    assert bert_flops_per_sample(config, predictions=s) - bert_flops_per_sample(config) == saved
    assert bert_flops_per_sample(config, sequence_length=128) < bert_flops_per_sample(config) / 4


def test_initial_values():
    sizes = {**SIZES, "vocabulary_size": 500, "num_layers": 8, "hidden_size": 128}
    for config in (BertConfig.original(**sizes), BertConfig.megatron(**sizes)):
        for name, parameter in built(config).named_parameters():
            if parameter.dim() == 1:
                assert torch.equal(
                    parameter,
                    torch.full_like(parameter, float("norm" in name and "weight" in name)),
                ), name
            elif parameter.size(0) > 3:
                scaled = config.scaled_residual_init and name.endswith(
                    ("projection.weight", "down.weight")
                )
                std = 0.02 / math.sqrt(16) if scaled else 0.02
                assert parameter.std().item() == pytest.approx(
                    std * (0.8796 if config.truncated_init else 1.0), rel=0.05
                ), name
                assert not config.truncated_init or parameter.abs().max() <= 2 * std


@BOTH
def test_meta_model_gets_same_values_as_eager_model(config):
    eager_and_lazy(lambda: Bert(config))


@BOTH
def test_attention_ignores_only_padding(config):
    model, inputs = built(config), batch()
    output = model(**inputs)
    changed = inputs["input_ids"].clone()
    changed[1, 6:] = (changed[1, 6:] + 1) % 61
    again = model(**{**inputs, "input_ids": changed})
    assert torch.equal(again.masked[1, :6], output.masked[1, :6])
    assert torch.equal(again.order, output.order)
    changed[1, 5] = (changed[1, 5] + 1) % 61
    again = model(**{**inputs, "input_ids": changed})
    assert ((again.masked[1, :6] - output.masked[1, :6]).abs().amax(-1) > 0).all()
    assert not torch.equal(again.order[1], output.order[1])
    short = model(inputs["input_ids"][1:2, :6], inputs["token_type_ids"][1:2, :6])
    torch.testing.assert_close(short.masked[0], output.masked[1, :6])


@BOTH
def test_logits_at_masked_positions_equal_full_logits(config):
    model, inputs = built(config), batch()
    positions = torch.tensor([[1, 4, 0], [2, 2, 5], [7, 0, 0]])
    some, everywhere = model(**inputs, masked_positions=positions), model(**inputs)
    torch.testing.assert_close(some.masked, everywhere.masked[torch.arange(3)[:, None], positions])
    assert torch.equal(some.order, everywhere.order)


@BOTH
def test_every_parameter_gets_gradient(config):
    model = built(config)
    output = model(**batch())
    (output.masked.square().mean() + output.order.square().mean()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name
    assert model.masked_head.decoder.weight is model.embeddings.token.weight
    assert "masked_head.decoder.weight" not in dict(model.named_parameters())


def test_dropout_is_active_in_training_only():
    torch.manual_seed(0)
    model, inputs = Bert(BertConfig.original(**SIZES, dropout=0.0, attention_dropout=0.5)), batch()
    assert not torch.equal(model(**inputs).order, model(**inputs).order)
    model.eval()
    assert torch.equal(model(**inputs).order, model(**inputs).order)


def test_too_long_sequence_is_refused():
    with pytest.raises(ValueError, match=r"25 tokens .*sequence_length=24"):
        built(CONFIGS["post"])(torch.zeros(1, 25, dtype=torch.int64))


@BOTH
@pytest.mark.parametrize("prefix", ["", "inner.model"])
def test_plan_names_all_split_matrices(config, prefix):
    model = nested(Bert(config), prefix)
    plan = bert_plan(config, prefix=prefix)
    named = {name.removeprefix(f"{prefix}.") for name in plan.resolve(model)}
    whole = {
        "embeddings.segment",
        "masked_head.dense",
        "order_head.pooler",
        "order_head.classifier",
    }
    every = {n for n, m in Bert(config).named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert named == every - whole
    plan.check(model, 2, sequence_parallel=True)
    parts = find_parts(model, plan)
    assert parts.after == plan.after


def test_indivisible_tensor_parallel_size_is_refused():
    for degree in (1, 2, 4):
        check_tensor_parallel(CONFIGS["post"], degree)
    with pytest.raises(ValueError, match=r"num_heads=4 .*tensor_parallel_size=8.* of 1, 2, 4$"):
        check_tensor_parallel(CONFIGS["post"], 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, ["num_layers=0", "positive integer"]),
        ({"hidden_size": 100, "num_heads": 12}, ["hidden_size=100", "num_heads=12", "10"]),
        ({"norm_order": "both"}, ["norm_order='both'", "post", "pre"]),
        ({"gelu": "relu"}, ["gelu='relu'", "exact", "tanh"]),
        ({"attention_dropout": 1.0}, ["attention_dropout=1.0", "less than 1"]),
        ({"init_std": 0.0}, ["init_std=0.0", "greater than 0"]),
    ],
)
def test_invalid_config_is_refused(changes, words):
    with raises_with(words):
        BertConfig(**changes)
