"""Plans found by the class of a module."""

import pytest
import torch
from torch import nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.plans import find_plan, plan_for
from lightning_ptdp.strategy.checks.model import plan_of
from lightning_ptdp.tensor_parallel import (
    Alias,
    Column,
    ParallelPlan,
    Partial,
    PerRank,
    Region,
    Row,
    Vocabulary,
    Whole,
)
from tests.errors import raises_with
from tests.huggingface.runs import make_model
from tests.models.builds import nested

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma3", "phi3", "gpt_neox", "gpt2", "bert", "encoder"]
)
@pytest.mark.parametrize("prefix", ["", "net.model"])
def test_known_model_has_valid_plan(kind, prefix):
    model = nested(make_model(kind), prefix)
    plan = find_plan(model)
    plan.check(model, 2)
    kinds = plan.resolve(model)
    blocks = plan.blocks
    assert len(model.get_submodule(blocks)) == 4
    inside = {
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name.startswith(f"{blocks}.")
    }
    whole = {
        name.rpartition(".")[2] for name in inside - set(kinds) if ".self_attn.out_proj" not in name
    }
    assert whole == ({"qkv_proj", "o_proj"} if kind == "phi3" else set())
    assert "column" in plan.explain(model)


def test_llama_plan_splits_attention_by_heads():
    plan = plan_for(make_model("llama"))
    assert plan.tensor["model.layers.*.self_attn"] == plan.tensor["model.layers.*.mlp"] == Region()
    assert plan.tensor["model.layers.*.self_attn.q_proj"] == Column(heads=4)
    assert plan.tensor["model.layers.*.self_attn.v_proj"] == Column(heads=2, copy_heads=True)
    assert (plan.before, plan.after) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    assert plan.tensor["lm_head"] == Vocabulary()


def test_bert_plan_covers_both_heads():
    plan = plan_for(make_model("bert"), "bert_model")
    assert plan.tensor["bert_model.cls.predictions"] == Alias()
    assert plan.after == ("bert_model.bert.pooler", "bert_model.cls")
    bare = plan_for(make_model("bert").bert)
    assert (bare.before, bare.after) == (("embeddings",), ("pooler",))


def test_scaled_embedding_and_its_tied_head_are_kept_whole():
    plan = plan_for(make_model("gemma3"))
    assert Vocabulary() not in plan.tensor.values()
    untied = plan_for(make_model("gemma3", tie_word_embeddings=False))
    assert [name for name, kind in untied.tensor.items() if kind == Vocabulary()] == ["lm_head"]


def test_learned_activation_is_partial():
    """It sees a rank's features, so each rank has a part of its gradient."""
    config = transformers.ApertusConfig(hidden_size=8, num_attention_heads=2, vocab_size=16)
    with torch.device("meta"):
        plan = find_plan(transformers.ApertusForCausalLM(config))
    assert isinstance(plan.tensor["model.layers.*.mlp.act_fn"], Partial)


@pytest.mark.parametrize(
    ("name", "heads"), [("Glm4Moe", Partial()), ("Cohere", None)], ids=["one head", "all heads"]
)
def test_undeclared_norms_of_queries_and_keys(name, heads):
    """The norm of one head is partial. Norms of all heads keep the attention whole."""
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        use_qk_norm=True,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    tensor = find_plan(model).tensor
    attention = "model.layers.*.self_attn"
    assert tensor.get(f"{attention}.q_norm") == heads
    assert tensor.get(f"{attention}.q_proj") == (heads and Column(heads=4))
    assert tensor[attention] == (Region() if heads else Whole())


def test_experts_are_kept_whole():
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
    )
    plan = plan_for(model)
    plan.check(model, 2)
    kinds = plan.resolve(model)
    assert not [name for name in kinds if "experts" in name]
    assert kinds["model.layers.0.mlp"] == Whole()
    assert plan.splits_sequence("model.layers.0.input_layernorm.weight", True)
    assert not plan.splits_sequence("model.layers.0.mlp.gate.weight", True)
    plan.check(model, 2, sequence_parallel=True)


def test_unknown_model_has_no_plan():
    class Changed(transformers.GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Renamed(transformers.GPT2LMHeadModel):
        """The same model under another name."""

    config = make_model("gpt2").config
    assert plan_for(Renamed(config)) is not None
    assert plan_for(Changed(config)) is None
    assert find_plan(nn.Sequential(nn.Linear(2, 2))) is None


def test_plan_of_two_models_names_the_modules_of_both():
    models = {"a": make_model("gpt2"), "b": make_model("encoder")}
    plan = find_plan(nn.ModuleDict(models))
    expected = {
        f"{name}.{pattern}": kind
        for name, model in models.items()
        for pattern, kind in find_plan(model).tensor.items()
    }
    assert plan.tensor == expected
    assert plan.blocks is None


def test_user_plan_takes_precedence():
    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model("gpt2")

        def configure_parallel(self):
            return ParallelPlan(
                tensor={"model.lm_head": "vocabulary", "model.transformer.wte": "vocabulary"}
            )

    lit = Lit()
    assert list(plan_of(lit, PTDPConfig()).tensor) == ["model.lm_head", "model.transformer.wte"]
    mine = ParallelPlan(tensor={"model.lm_head": "column"})
    assert plan_of(lit, PTDPConfig(plan=mine)) is mine
    del Lit.configure_parallel
    assert (
        "model.transformer.h.*.attn.c_attn"
        in plan_of(lit, PTDPConfig(tensor_parallel_size=2)).tensor
    )


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        (
            {},
            3,
            ["model.layers.0.self_attn.q_proj", "number of heads=4", "tensor_parallel_size=3", "4"],
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            ["k_proj", "number of heads=3"],
        ),
        ({"intermediate_size": 49}, 2, ["mlp.gate_proj", "out_features=49"]),
    ],
)
def test_indivisible_size_is_refused(options, size, words):
    model = make_model("llama", **options)
    plan = plan_for(model)
    with raises_with(words):
        plan.check(model, size)


def test_invalid_plan_is_refused():
    model = make_model("gemma3")
    cases = [
        (
            {"tensor": {"model.embed_tokens": "vocabulary"}},
            r"embed_tokens.*forward is not that of nn.Embedding",
        ),
        (
            {"tensor": {"model.norm": "column"}},
            r"'model.norm'.*nn.Linear \(or the Conv1D of transformers\)",
        ),
        (
            {
                "tensor": {
                    "model.layers.*.self_attn": "region",
                    "model.layers.*.self_attn.q_proj": "column",
                }
            },
            "not split.*leave the region",
        ),
        (
            {"numbers": {"model.layers.*.self_attn": {"head_dims": PerRank()}}},
            "'head_dims'.*it has: .*head_dim",
        ),
        ({"tensor": {"model.layers.*.mlp.up_proj": Column(parts=(24, 24), heads=(4, 4))}}, None),
        (
            {"tensor": {"model.layers.*.mlp.up_proj": Column(heads=5)}},
            "48 is not divisible by its number of heads, 5",
        ),
        ({"sequence": "middle"}, "sequence='middle' must be"),
    ]
    for settings, message in cases:
        if message is None:
            ParallelPlan(**settings).check(model, 2)
            continue
        with pytest.raises(ValueError, match=message):
            ParallelPlan(**settings).check(model, 2)
    with pytest.raises(ValueError, match="one number of heads for each part"):
        Column(parts=(4, 4), heads=4)
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, kdim=4)})
    with pytest.raises(ValueError, match=r"kdim=4.*cannot be split"):
        ParallelPlan(tensor={"a": "attention"}).check(attention, 2)
    with pytest.raises(ValueError, match=r"num_heads=2.*tensor_parallel_size=4"):
        ParallelPlan(tensor={"a": "attention"}).check(
            nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}), 4
        )


def test_bare_torch_encoder_has_plan():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)
    plan = plan_for(encoder, "encoder")
    assert plan.tensor["encoder.layers.*.linear2"] == Row()
    assert torch.is_tensor(encoder.layers[0].self_attn.in_proj_weight)
