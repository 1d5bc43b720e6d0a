"""Plans of Hugging Face models that declare no plan, one row per model.

To support another model, add a row: where its classes are defined, where its blocks are, and the
kinds of the modules in a block. Names in a row are relative to the bare model (or to a block). A
kind that depends on sizes is a function of the configuration. Modules that a model of the family
lacks (such as position biases that are switched off) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_ptdp.models.plans import block_parts as of
from lightning_ptdp.models.plans.block_parts import (
    Block,
    Config,
    WhyNot,
    attention,
    feed_forward,
    joined,
    per_rank,
    vocabulary_of,
)
from lightning_ptdp.tensor_parallel import Kind, ParallelPlan, Partial, PerCopy, PerRank, Row, Whole
from lightning_ptdp.tensor_parallel.local_sizes import Numbers


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of the models in one file of transformers.

    Attributes:
        classes: Names of the bare model's class and of the classes with a language-model head.
        base: Attribute of a model with a head that holds the bare model.
        blocks: Repeated container.
        block: Modules in a block, and their kinds.
        after: Modules of the bare model that run after the blocks.
        beside: Kinds of other modules of the bare model.
        numbers: Modules in a block, and their attributes that count what is split; or a function of
            the configuration.
        why_not: Kinds of parallelism that are not possible, and why.
    """

    classes: tuple[str, ...]
    base: str
    blocks: str
    block: Block
    after: tuple[str, ...] = ()
    beside: Mapping[str, Kind] = field(default_factory=dict)
    numbers: Numbers | Callable[[Config], Numbers] = field(default_factory=dict)
    why_not: WhyNot = field(default_factory=dict)


# ---- blocks that several families have -----------------------------------------------------------

_GROUPED: Block = {
    **attention("self_attn"),
    "self_attn.k_proj": of.by_kv_heads,
    "self_attn.v_proj": of.by_kv_heads,
}
_GATED = feed_forward("mlp.gate_proj mlp.up_proj", "mlp.down_proj", region="mlp")
_BERT: Block = {
    **attention("attention.self", "query key value", None), "attention.output.dense": Row(),
    **feed_forward("intermediate.dense", "output.dense"),
}  # fmt: skip
_OPT: Block = {**attention("self_attn", out="out_proj"), **feed_forward("fc1", "fc2")}
_VIT: Block = {**attention("attention"), **feed_forward("mlp.fc1", "mlp.fc2")}
_SPEECH: Block = {
    **attention("attention", out="out_proj"), **feed_forward("feed_forward.intermediate_dense", "feed_forward.output_dense"),
}  # fmt: skip
_GPT2: Block = {
    **attention("attn", "c_attn", "c_proj", by=of.fused, region=None),
    **feed_forward("mlp.c_fc", "mlp.c_proj"),
}
_BLOOM = feed_forward("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

_PATCHES: WhyNot = {
    "sequence": "its sequence is the patches of an image and additional tokens, and few sizes "
    "divide this length"
}
_FRAMES: WhyNot = {
    "sequence": "its sequence is the frames that convolutions compute from audio, of any length"
}


def _encoder(prefix: str, base: str, **more: Any) -> Family:
    names = tuple(
        f"{prefix}{end}"
        for end in ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM")
    )
    more = {"blocks": "encoder.layer", "block": _BERT, "after": ("pooler",), **more}
    return Family(classes=(*names, f"{prefix}ForNextSentencePrediction"), base=base, **more)


def _decoder(prefix: str, base: str, **more: Any) -> Family:
    return Family(
        classes=tuple(f"{prefix}{end}" for end in ("Model", "ForCausalLM", "LMHeadModel")),
        base=base,
        **more,
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _decoder(
            "GPT2", "transformer", blocks="h", block=_GPT2, after=("ln_f",), numbers=per_rank("attn", "split_size", "num_heads"),
        ),
        "gpt_bigcode": _decoder(
            "GPTBigCode", "transformer", blocks="h", after=("ln_f",),
            block={**_GPT2, **attention("attn", "c_attn", "c_proj", by=of.falcon_fused)},
            numbers=lambda config: per_rank("attn", "embed_dim", "num_key_value_groups" if config.multi_query else "num_heads"),
        ),
        "gptj": _decoder(
            "GPTJ", "transformer", blocks="h", after=("ln_f",), numbers=per_rank("attn", "num_attention_heads"),
            block={**attention("attn", out="out_proj"), **feed_forward("mlp.fc_in", "mlp.fc_out")},
        ),
        "gpt_neo": _decoder(
            "GPTNeo", "transformer", blocks="h", after=("ln_f",), numbers=per_rank("attn.attention", "num_heads"),
            block={**attention("attn.attention", out="out_proj"), **feed_forward("mlp.c_fc", "mlp.c_proj")},
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
            "GptOss", "model", blocks="layers", block={**_GROUPED, "self_attn": of.with_sinks, "mlp": Whole()}, after=("norm",),
            numbers=lambda config: {"self_attn": {"num_key_value_groups": PerCopy(heads=config.num_key_value_heads)}},
        ),
        "opt": Family(
            classes=("OPTForCausalLM",), base="model.decoder", blocks="layers", after=("final_layer_norm", "project_out"),
            block=_OPT, numbers=per_rank("self_attn", "num_heads"),
            why_not={"sequence": "its feed-forward parts flatten samples and tokens into one "
                                 "dimension"},
        ),
        "biogpt": _decoder("BioGpt", "biogpt", blocks="layers", block=_OPT, after=("layer_norm",)),
        "persimmon": _decoder(
            "Persimmon", "model", blocks="layers", after=("final_layernorm",), numbers=per_rank("self_attn", "num_heads"),
            block={
                **attention("self_attn", "query_key_value", "dense"), "self_attn.q_layernorm": Partial(),
                "self_attn.k_layernorm": Partial(), **_BLOOM,
            },
        ),
        "falcon": _decoder(
            "Falcon", "transformer", blocks="h", after=("ln_f",),
            block={
                **_BLOOM,
                **attention("self_attention", "query_key_value", "dense", by=of.falcon_fused),
                "self_attention": of.with_bias("alibi", "attention_mask"),
            },
            numbers=lambda config: {
                "self_attention": {"num_heads": PerRank(), "num_kv_heads": PerRank(heads=1 if of.has_one_kv_head(config) else None)}
            },
        ),
        "bloom": _decoder(
            "Bloom", "transformer", blocks="h", after=("ln_f",), numbers=per_rank("self_attention", "num_heads"),
            block={**_BLOOM, **attention("self_attention", "query_key_value", "dense", region=of.with_bias("alibi"))},
        ),
        "mpt": _decoder(
            "Mpt", "transformer", blocks="blocks", after=("norm_f",), numbers=per_rank("attn", "n_heads"),
            block={
                **attention("attn", "Wqkv", "out_proj", by=of.fused, region=of.with_bias("position_bias")),
                **feed_forward("ffn.up_proj", "ffn.down_proj"),
            },
        ),
        "bert": _encoder("Bert", "bert"),
        "roberta": _encoder("Roberta", "roberta"),
        "camembert": _encoder("Camembert", "roberta"),
        "xlm_roberta": _encoder("XLMRoberta", "roberta"),
        "electra": _encoder("Electra", "electra"),
        "megatron_bert": _encoder(
            "MegatronBert", "bert", after=("encoder.ln", "pooler"),
            numbers=per_rank("attention.self", "num_attention_heads", "all_head_size"),
        ),
        "esm": _encoder("Esm", "esm", after=("encoder.emb_layer_norm_after", "pooler", "contact_head")),
        "mpnet": _encoder(
            "MPNet", "mpnet", beside={"encoder.relative_attention_bias": Partial()},
            block={
                **attention("attention.attn", "q k v", "o", region=of.with_bias("position_bias")),
                **feed_forward("intermediate.dense", "output.dense"),
            },
            numbers=per_rank("attention.attn", "num_attention_heads", "all_head_size"),
        ),
        "nomic_bert": _encoder("NomicBert", "nomic_bert", blocks="layers", block={**attention("self_attn"), **_GATED}),
        "modernbert": _encoder(
            "ModernBert", "model", blocks="layers", after=("final_norm",),
            block={**attention("attn", "Wqkv", "Wo", by=of.fused), "mlp.Wi": of.gated, "mlp.Wo": Row()},
        ),
        "distilbert": _encoder(
            "DistilBert", "distilbert", blocks="transformer.layer",
            block={**attention("attention", "q_lin k_lin v_lin", "out_lin"), **feed_forward("ffn.lin1", "ffn.lin2")},
        ),
        "deberta_v2": _encoder(
            "DebertaV2", "deberta", numbers=per_rank("attention.self", "num_attention_heads"),
            block={
                "attention": Whole(), "attention.output.dense": Row(), **feed_forward("intermediate.dense", "output.dense"),
                **attention("attention.self", "query_proj key_proj value_proj pos_key_proj pos_query_proj", None, region=None),
            },
        ),
        "albert": _encoder(
            "Albert", "albert", blocks="encoder.albert_layer_groups.*.albert_layers",
            block={**attention("attention", "query key value", "dense", region=None), **feed_forward("ffn", "ffn_output")},
            why_not={
                "pipeline": "'albert_layer_groups' has one layer that is called repeatedly, "
                            "and all stages would need it",
                "sequence": "'albert_layer_groups' has one layer that is called repeatedly, "
                            "so there is no first and last layer",
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
"""Rows by the folder of transformers that defines the classes."""


def family_plan(family: Family, module: nn.Module, prefix: str = "") -> ParallelPlan:
    """Return the plan of a model of the family with the name ``prefix``, bare or with a head."""
    inner = family.base if _has(module, family.base) else ""
    base = joined(prefix, inner)
    config = module.get_submodule(inner).config
    container = joined(base, family.blocks)
    block = joined(container, "*")
    tensor = of.kinds_of(family.block, config, block) | of.kinds_of(family.beside, config, base)
    numbers = family.numbers(config) if callable(family.numbers) else family.numbers
    before, after = _order(module, prefix, base=base, blocks=container, after=family.after)
    cuts = "pipeline" not in family.why_not
    return ParallelPlan(
        blocks=container if cuts else None,
        tensor=of.present(tensor, module, prefix) | vocabulary_of(module, prefix),
        before=before if cuts else (),
        after=after if cuts else (),
        sequence=None if "sequence" in family.why_not else "blocks",
        numbers=of.present(
            {joined(block, name): values for name, values in numbers.items()}, module, prefix
        ),
        why_not=family.why_not,
    )


def _has(module: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in module.named_modules())


def _order(
    module: nn.Module, prefix: str, *, base: str, blocks: str, after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (modules that run before the blocks, modules that run after them).

    In the bare model, modules that are not listed in ``after`` run before the blocks. Outside of
    it, modules run after them.
    """
    after_blocks = {joined(base, name) for name in after}
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    parent = module
    path = prefix
    relative = blocks.removeprefix(f"{prefix}.") if prefix else blocks
    for step in relative.split("."):
        for key, child in parent.named_children():
            name = joined(path, key)
            if key != step and list(child.parameters()):
                outside = bool(base) and not f"{name}.".startswith(f"{base}.")
                groups[2 if outside else name in after_blocks].append(name)
        parent = getattr(parent, step, nn.Module())
        path = joined(path, step)
    return tuple(groups[0]), (*groups[1], *groups[2])
