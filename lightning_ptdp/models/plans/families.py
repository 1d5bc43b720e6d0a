"""Models of Hugging Face that declare no plan of their own: a row each.

To support another one, add a row: where its classes are defined, where its blocks are, and what becomes of the modules in a block. Names
in a row are relative to the bare model (or to a block); what depends on the sizes is a function of the configuration. A module that
a model of the family does not have (biases of positions that were not asked for) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torch import nn

from lightning_ptdp.models.plans.names import joined, vocabulary_of
from lightning_ptdp.tensor_parallel import (
    Column,
    Kind,
    ParallelPlan,
    Partial,
    PerCopy,
    PerRank,
    Region,
    Row,
    Whole,
    matches,
)
from lightning_ptdp.tensor_parallel.numbers import Number

__all__ = ["FAMILIES", "Family", "family_plan"]

Config: TypeAlias = Any
OfConfig: TypeAlias = Callable[[Config], Kind]
Block: TypeAlias = Mapping[str, Kind | OfConfig]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is known of the models of one file of transformers.

    Attributes:
        classes: Names of the bare model's class and of those with a language-model head.
        base: The attribute under which a model with a head holds the bare one.
        blocks: The repeated container.
        block: Modules in a block, and what becomes of them. A function of the configuration where sizes matter.
        after: What runs behind the blocks, of what stands beside them in the bare model.
        beside: What becomes of other modules of the bare model.
        numbers: Modules in a block, and their attributes that count what is split; or a function of the configuration.
        why_not: What is not possible, and why.
    """

    classes: tuple[str, ...]
    base: str
    blocks: str
    block: Block
    after: tuple[str, ...] = ()
    beside: Mapping[str, Kind] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Number]] | Callable[[Config], Mapping[str, Mapping[str, Number]]] = field(
        default_factory=dict
    )
    why_not: Mapping[Literal["sequence", "pipeline"], str] = field(default_factory=dict)


# ---- ways of splitting projections, by the configuration --------------------------------------------------------------


def _heads(config: Config) -> Kind:
    """A projection by heads; also a fused one that lists queries, keys and values head by head."""
    return Column(heads=config.num_attention_heads)


def _kv_heads(config: Config) -> Kind:
    return Column(heads=config.num_key_value_heads, copy_heads=True)


def _fused(config: Config) -> Kind:
    """[q | k | v], all of the model's width."""
    return Column(parts=(config.hidden_size,) * 3, heads=(config.num_attention_heads,) * 3)


def _gated(config: Config) -> Kind:
    """[gate | up] of a feed-forward part."""
    return Column(parts=(config.intermediate_size,) * 2)


def _one_kv_head(config: Config) -> Kind:
    """[q | k | v] with one head of keys and values."""
    width = config.hidden_size // config.num_attention_heads
    return Column(parts=(config.hidden_size, width, width), heads=(config.num_attention_heads, 1, 1), copy_heads=True)


def _falcon_fused(config: Config) -> Kind:
    """Group by group of a head of keys and values: its queries, its keys, its values."""
    if config.new_decoder_architecture:
        return Column(heads=config.num_kv_heads)
    return _one_kv_head(config) if config.multi_query else _heads(config)


def _bigcode_fused(config: Config) -> Kind:
    return _one_kv_head(config) if config.multi_query else _heads(config)


def _with_bias(*arguments: str) -> OfConfig:
    """A region that is given something for each head of the whole model."""

    def region(config: Config) -> Kind:
        return Region(heads=config.num_attention_heads, arguments=arguments)

    return region


def _with_sinks(config: Config) -> Kind:
    return Region(heads=config.num_attention_heads, per_head=("sinks",))


# ---- blocks that several families have -------------------------------------------------------------------------------------

_SEPARATE: Block = {"self_attn": Region(), **{f"self_attn.{name}": _heads for name in ("q_proj", "k_proj", "v_proj")}}
_GROUPED: Block = {**_SEPARATE, "self_attn.k_proj": _kv_heads, "self_attn.v_proj": _kv_heads, "self_attn.o_proj": Row()}
_GATED: Block = {"mlp": Region(), "mlp.gate_proj": Column(), "mlp.up_proj": Column(), "mlp.down_proj": Row()}
_FC: Block = {"fc1": Column(), "fc2": Row()}
_BERT: Block = {
    "attention.self": Region(),
    **{f"attention.self.{name}": _heads for name in ("query", "key", "value")},
    "attention.output.dense": Row(),
    "intermediate.dense": Column(),
    "output.dense": Row(),
}
_VIT: Block = {
    "attention": Region(),
    **{f"attention.{name}": _heads for name in ("q_proj", "k_proj", "v_proj")},
    "attention.o_proj": Row(),
    "mlp.fc1": Column(),
    "mlp.fc2": Row(),
}
_SPEECH: Block = {
    "attention": Region(),
    **{f"attention.{name}": _heads for name in ("q_proj", "k_proj", "v_proj")},
    "attention.out_proj": Row(),
    "feed_forward.intermediate_dense": Column(),
    "feed_forward.output_dense": Row(),
}
_GPT2: Block = {"attn.c_attn": _fused, "attn.c_proj": Row(), "mlp.c_fc": Column(), "mlp.c_proj": Row()}
_BLOOM: Block = {"self_attention.dense": Row(), "mlp.dense_h_to_4h": Column(), "mlp.dense_4h_to_h": Row()}

_PATCHES: Mapping[Literal["sequence", "pipeline"], str] = {
    "sequence": "its sequence is an image's patches and tokens of its own before them, a length that hardly any size divides"
}

_FRAMES: Mapping[Literal["sequence", "pipeline"], str] = {
    "sequence": "its sequence is the frames that convolutions make of sound, of whatever length"
}


def _encoder(prefix: str, base: str, **more: Any) -> Family:
    names = tuple(f"{prefix}{end}" for end in ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM"))
    more = {"blocks": "encoder.layer", "block": _BERT, "after": ("pooler",), **more}
    return Family(classes=(*names, f"{prefix}ForNextSentencePrediction"), base=base, **more)


def _decoder(prefix: str, base: str, **more: Any) -> Family:
    return Family(classes=tuple(f"{prefix}{end}" for end in ("Model", "ForCausalLM", "LMHeadModel")), base=base, **more)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _decoder(
            "GPT2", "transformer", blocks="h", block=_GPT2, after=("ln_f",),
            numbers={"attn": {"split_size": PerRank(), "num_heads": PerRank()}},
        ),
        "gpt_bigcode": _decoder(
            "GPTBigCode", "transformer", blocks="h", block={**_GPT2, "attn": Region(), "attn.c_attn": _bigcode_fused}, after=("ln_f",),
            numbers=lambda config: {
                "attn": {"embed_dim": PerRank(), "num_key_value_groups": PerRank()}
                if config.multi_query
                else {"embed_dim": PerRank(), "num_heads": PerRank()}
            },
        ),
        "gptj": _decoder(
            "GPTJ", "transformer", blocks="h", after=("ln_f",), numbers={"attn": {"num_attention_heads": PerRank()}},
            block={
                "attn": Region(), "attn.q_proj": _heads, "attn.k_proj": _heads, "attn.v_proj": _heads, "attn.out_proj": Row(),
                "mlp.fc_in": Column(), "mlp.fc_out": Row(),
            },
        ),
        "gpt_neo": _decoder(
            "GPTNeo", "transformer", blocks="h", after=("ln_f",), numbers={"attn.attention": {"num_heads": PerRank()}},
            block={
                "attn.attention": Region(), "attn.attention.q_proj": _heads, "attn.attention.k_proj": _heads,
                "attn.attention.v_proj": _heads, "attn.attention.out_proj": Row(), "mlp.c_fc": Column(), "mlp.c_proj": Row(),
            },
        ),
        "stablelm": _decoder(
            "StableLm", "model", blocks="layers", block={**_GROUPED, **_GATED}, after=("norm",),
            numbers=lambda config: {
                "self_attn": {
                    "num_heads": PerRank(), "num_key_value_heads": PerRank(heads=config.num_key_value_heads),
                    "num_key_value_groups": PerCopy(heads=config.num_key_value_heads),
                }
            },
        ),
        "gpt_oss": _decoder(
            "GptOss", "model", blocks="layers", block={**_GROUPED, "self_attn": _with_sinks, "mlp": Whole()}, after=("norm",),
            numbers=lambda config: {"self_attn": {"num_key_value_groups": PerCopy(heads=config.num_key_value_heads)}},
        ),
        "opt": Family(
            classes=("OPTForCausalLM",), base="model.decoder", blocks="layers", after=("final_layer_norm", "project_out"),
            block={**_SEPARATE, "self_attn.out_proj": Row(), **_FC}, numbers={"self_attn": {"num_heads": PerRank()}},
            why_not={"sequence": "its feed-forward parts put samples and tokens into one dimension"},
        ),
        "biogpt": _decoder(
            "BioGpt", "biogpt", blocks="layers", block={**_SEPARATE, "self_attn.out_proj": Row(), **_FC}, after=("layer_norm",),
        ),
        "persimmon": _decoder(
            "Persimmon", "model", blocks="layers", after=("final_layernorm",), numbers={"self_attn": {"num_heads": PerRank()}},
            block={
                "self_attn": Region(), "self_attn.query_key_value": _heads, "self_attn.dense": Row(), "self_attn.q_layernorm": Partial(),
                "self_attn.k_layernorm": Partial(), "mlp.dense_h_to_4h": Column(), "mlp.dense_4h_to_h": Row(),
            },
        ),
        "falcon": _decoder(
            "Falcon", "transformer", blocks="h", after=("ln_f",),
            block={**_BLOOM, "self_attention": _with_bias("alibi", "attention_mask"), "self_attention.query_key_value": _falcon_fused},
            numbers=lambda config: {
                "self_attention": {"num_heads": PerRank(), "num_kv_heads": PerRank(heads=1 if _has_one_kv_head(config) else None)}
            },
        ),
        "bloom": _decoder(
            "Bloom", "transformer", blocks="h", after=("ln_f",), numbers={"self_attention": {"num_heads": PerRank()}},
            block={**_BLOOM, "self_attention": _with_bias("alibi"), "self_attention.query_key_value": _heads},
        ),
        "mpt": _decoder(
            "Mpt", "transformer", blocks="blocks", after=("norm_f",), numbers={"attn": {"n_heads": PerRank()}},
            block={
                "attn": _with_bias("position_bias"), "attn.Wqkv": _fused, "attn.out_proj": Row(), "ffn.up_proj": Column(),
                "ffn.down_proj": Row(),
            },
        ),
        "bert": _encoder("Bert", "bert"),
        "roberta": _encoder("Roberta", "roberta"),
        "camembert": _encoder("Camembert", "roberta"),
        "xlm_roberta": _encoder("XLMRoberta", "roberta"),
        "electra": _encoder("Electra", "electra"),
        "megatron_bert": _encoder(
            "MegatronBert", "bert", after=("encoder.ln", "pooler"),
            numbers={"attention.self": {"num_attention_heads": PerRank(), "all_head_size": PerRank()}},
        ),
        "esm": _encoder("Esm", "esm", after=("encoder.emb_layer_norm_after", "pooler", "contact_head")),
        "mpnet": _encoder(
            "MPNet", "mpnet", beside={"encoder.relative_attention_bias": Partial()},
            block={
                "attention.attn": _with_bias("position_bias"), **{f"attention.attn.{name}": _heads for name in "qkv"},
                "attention.attn.o": Row(), "intermediate.dense": Column(), "output.dense": Row(),
            },
            numbers={"attention.attn": {"num_attention_heads": PerRank(), "all_head_size": PerRank()}},
        ),
        "nomic_bert": _encoder("NomicBert", "nomic_bert", blocks="layers", block={**_SEPARATE, "self_attn.o_proj": Row(), **_GATED}),
        "modernbert": _encoder(
            "ModernBert", "model", blocks="layers", after=("final_norm",),
            block={"attn": Region(), "attn.Wqkv": _fused, "attn.Wo": Row(), "mlp.Wi": _gated, "mlp.Wo": Row()},
        ),
        "distilbert": _encoder(
            "DistilBert", "distilbert", blocks="transformer.layer",
            block={
                "attention": Region(), "attention.q_lin": _heads, "attention.k_lin": _heads, "attention.v_lin": _heads,
                "attention.out_lin": Row(), "ffn.lin1": Column(), "ffn.lin2": Row(),
            },
        ),
        "deberta_v2": _encoder(
            "DebertaV2", "deberta",
            block={
                "attention": Whole(),
                **{f"attention.self.{name}_proj": _heads for name in ("query", "key", "value", "pos_key", "pos_query")},
                "attention.output.dense": Row(), "intermediate.dense": Column(), "output.dense": Row(),
            },
            numbers={"attention.self": {"num_attention_heads": PerRank()}},
        ),
        "albert": _encoder(
            "Albert", "albert", blocks="encoder.albert_layer_groups.*.albert_layers",
            block={
                "attention.query": _heads, "attention.key": _heads, "attention.value": _heads, "attention.dense": Row(),
                "ffn": Column(), "ffn_output": Row(),
            },
            why_not={
                "pipeline": "'albert_layer_groups' holds one layer that is called again and again, and all stages would need it",
                "sequence": "'albert_layer_groups' holds one layer that is called again and again, without a first and a last one",
            },
        ),
        "vit": _encoder("ViT", "vit", blocks="layers", block=_VIT, after=("layernorm", "pooler"), why_not=_PATCHES),
        "deit": _encoder("DeiT", "deit", blocks="layers", block=_VIT, after=("layernorm", "pooler"), why_not=_PATCHES),
        "beit": _encoder("Beit", "beit", blocks="layers", block=_VIT, after=("layernorm", "pooler"), why_not=_PATCHES),
        "dinov2": _encoder("Dinov2", "dinov2", block=_VIT, after=("layernorm",), why_not=_PATCHES),
        "audio_spectrogram_transformer": _encoder(
            "AST", "audio_spectrogram_transformer", blocks="layers", block=_VIT, after=("layernorm",), why_not=_PATCHES
        ),
        "wav2vec2": Family(
            classes=("Wav2Vec2Model", "Wav2Vec2ForCTC"), base="wav2vec2", blocks="encoder.layers", block=_SPEECH, after=("adapter",),
            why_not=_FRAMES,
        ),
        "hubert": Family(classes=("HubertModel", "HubertForCTC"), base="hubert", blocks="encoder.layers", block=_SPEECH, why_not=_FRAMES),
    }
)  # fmt: skip
"""By the folder of transformers in which the classes are defined."""


def _has_one_kv_head(config: Config) -> bool:
    return config.multi_query and not config.new_decoder_architecture


def family_plan(family: Family, module: Any, prefix: str = "") -> ParallelPlan:
    """The plan of a model of the family that is found under the name ``prefix``, bare or with a head."""
    has_head = bool(family.base) and _get(module, family.base) is not None
    base = joined(prefix, family.base) if has_head else prefix
    bare = _get(module, family.base) if has_head else module
    config = bare.config
    names = {joined(prefix, name) for name, _ in module.named_modules()}
    block = joined(base, family.blocks, "*")

    def exists(pattern: str) -> bool:
        return any(matches(name, pattern) for name in names)

    wanted = {joined(block, name): value if isinstance(value, Kind) else value(config) for name, value in family.block.items()}
    wanted |= {joined(base, name): kind for name, kind in family.beside.items()}
    tensor: dict[str, Kind] = {pattern: kind for pattern, kind in wanted.items() if exists(pattern)}
    tensor |= vocabulary_of(module, prefix)
    numbers = family.numbers(config) if callable(family.numbers) else family.numbers
    blocks = joined(base, family.blocks) if "pipeline" not in family.why_not else None
    before, after = _order(module, prefix, base=base, blocks=joined(base, family.blocks), after=family.after)
    return ParallelPlan(
        blocks=blocks,
        tensor=tensor,
        before=before if blocks else (),
        after=after if blocks else (),
        sequence=None if "sequence" in family.why_not else "blocks",
        numbers={joined(block, name): values for name, values in numbers.items() if exists(joined(block, name))},
        why_not=family.why_not,
    )


def _get(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _order(
    module: nn.Module, prefix: str, *, base: str, blocks: str, after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what runs before the blocks, what runs behind them). In the bare model, what is not listed runs before; beside it, behind."""
    behind = {joined(base, name) for name in after}
    found: tuple[list[str], list[str], list[str]] = ([], [], [])
    parent, here = module, prefix
    relative = blocks.removeprefix(f"{prefix}.") if prefix else blocks
    for step in relative.split("."):
        for key, child in parent.named_children():
            name = joined(here, key)
            if key != step and any(True for _ in child.parameters()):
                outside = bool(base) and not f"{name}.".startswith(f"{base}.")
                found[2 if outside else name in behind].append(name)
        parent, here = getattr(parent, step, nn.Module()), joined(here, step)
    return tuple(found[0]), (*found[1], *found[2])
