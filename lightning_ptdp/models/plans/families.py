"""Hugging Face models that declare no plan, one row per model.

To support another model, add a row: where its classes are defined, where its blocks are, and the
kinds of the modules in a block. Names in a row are relative to the bare model (or to a block). A
kind that depends on sizes is a function of the configuration. Modules that a model of the family
lacks (such as position biases that are switched off) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning_ptdp.models.plans import block_parts as of
from lightning_ptdp.models.plans.block_parts import (
    Block,
    Config,
    Family,
    WhyNot,
    attention,
    feed_forward,
    per_rank,
)
from lightning_ptdp.tensor_parallel import (
    AttentionHeads,
    Column,
    Kind,
    Partial,
    PerCopy,
    PerRank,
    Row,
    Whole,
)

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


def _encoder(
    prefix: str, base: str, blocks: str = "encoder.layer", block: Block = _BERT, **more: Any
) -> Family:
    names = (
        "Model",
        "ForMaskedLM",
        "ForPreTraining",
        "LMHeadModel",
        "ForCausalLM",
        "ForNextSentencePrediction",
    )
    return Family(
        classes=tuple(f"{prefix}{end}" for end in names),
        base=base,
        blocks={blocks: block},
        **{"after": ("pooler",), **more},
    )


def _vision(prefix: str, base: str, blocks: str = "layers") -> Family:
    after = ("layernorm", "pooler")
    return _encoder(prefix, base, blocks, _VIT, after=after, why_not=_PATCHES)


def _decoder(
    prefix: str,
    base: str = "transformer",
    blocks: str = "h",
    *,
    block: Block,
    after: tuple[str, ...] = ("ln_f",),
    **more: Any,
) -> Family:
    classes = tuple(f"{prefix}{end}" for end in ("Model", "ForCausalLM", "LMHeadModel"))
    return Family(classes=classes, base=base, blocks={blocks: block}, after=after, **more)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _decoder(
            "GPT2", block=_GPT2, numbers=per_rank("attn", "split_size", "num_heads"),
        ),
        "gpt_bigcode": _decoder(
            "GPTBigCode",
            block={**_GPT2, **attention("attn", "c_attn", "c_proj", by=of.falcon_fused)},
            numbers=lambda config: per_rank("attn", "embed_dim", "num_key_value_groups" if config.multi_query else "num_heads"),
        ),
        "gptj": _decoder(
            "GPTJ", numbers=per_rank("attn", "num_attention_heads"),
            block={**attention("attn", out="out_proj"), **feed_forward("mlp.fc_in", "mlp.fc_out")},
        ),
        "gpt_neo": _decoder(
            "GPTNeo", numbers=per_rank("attn.attention", "num_heads"),
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
            classes=("OPTForCausalLM",), base="model.decoder", blocks={"layers": _OPT}, after=("final_layer_norm", "project_out"),
            numbers=per_rank("self_attn", "num_heads"),
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
            "Falcon",
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
            "Bloom", numbers=per_rank("self_attention", "num_heads"),
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
        "vit": _vision("ViT", "vit"),
        "deit": _vision("DeiT", "deit"),
        "beit": _vision("Beit", "beit"),
        "dinov2": _vision("Dinov2", "dinov2", blocks="encoder.layer"),
        "audio_spectrogram_transformer": _vision("AST", "audio_spectrogram_transformer"),
        "wav2vec2": Family(
            classes=("Wav2Vec2Model", "Wav2Vec2ForCTC"), base="wav2vec2", blocks={"encoder.layers": _SPEECH}, after=("adapter",),
            why_not=_FRAMES,
        ),
        "hubert": Family(classes=("HubertModel", "HubertForCTC"), base="hubert", blocks={"encoder.layers": _SPEECH}, why_not=_FRAMES),
    }
)  # fmt: skip
"""Rows by the folder of transformers that defines the classes."""


# ---- Encoder-decoders: T5, BART and models with the same structure -------------------------------

_SIDES = ("encoder", "decoder")


def _attentions(self_attn: str, memory: str, split: str, out: str, *, heads: str) -> Block:
    """Return the kinds of the attentions in a block.

    The attribute ``heads`` of the configuration gives their number of heads. An attention to the
    encoder's output has two inputs, so one region cannot contain all of its projections.
    """

    def by_heads(config: Config) -> Kind:
        return Column(heads=getattr(config, heads))

    return {
        **attention(self_attn, split, out, by=by_heads),
        **attention(memory, split, out, by=by_heads, region=None),
    }


def _two_stacks(
    classes: tuple[str, ...], base: str, path: str, *blocks: Block, **more: Any
) -> Family:
    """Return a row of an encoder and a decoder; ``path`` is the container of each one's blocks."""
    containers = {f"{side}.{path}": block for side, block in zip(_SIDES, blocks, strict=True)}
    return Family(classes=classes, base=base, blocks=containers, **more)


def _t5(name: str) -> Family:
    self_attn = "layer.*.SelfAttention"
    memory = "layer.*.EncDecAttention"
    dense = "layer.*.DenseReluDense"
    # The first block of a stack looks up the position bias, and passes the bias of its heads to the
    # next blocks.
    block = {
        **_attentions(self_attn, memory, "q k v relative_attention_bias", "o", heads="num_heads"),
        **feed_forward(f"{dense}.wi {dense}.wi_0 {dense}.wi_1", f"{dense}.wo", region=dense),
    }
    numbers = per_rank(self_attn, "n_heads", "inner_dim") | per_rank(memory, "n_heads", "inner_dim")
    classes = (f"{name}Model", f"{name}ForConditionalGeneration")
    after = ("encoder.final_layer_norm", "decoder.final_layer_norm", "lm_head")
    return _two_stacks(classes, "", "block", block, block, after=after, numbers=numbers)


def _bart(name: str) -> Family:
    def block(side: str) -> Block:
        heads = f"{side}_attention_heads"
        attentions = _attentions(
            "self_attn", "encoder_attn", "q_proj k_proj v_proj", "out_proj", heads=heads
        )
        return {**attentions, **feed_forward("fc1", "fc2")}

    classes = tuple(f"{name}{end}" for end in ("Model", "ForConditionalGeneration", "MTModel"))
    numbers = per_rank("self_attn", "num_heads") | per_rank("encoder_attn", "num_heads")
    after = ("encoder.layer_norm", "decoder.layer_norm")
    return _two_stacks(
        classes, "model", "layers", *map(block, _SIDES), after=after, numbers=numbers
    )


def _without_heads(name: str, base: str, head: str, **more: Any) -> Family:
    """Return the row of models whose attentions are replicated.

    These attentions cannot be split by heads alone.
    """
    block = feed_forward("fc1", "fc2")
    return _two_stacks((f"{name}Model", f"{name}{head}"), base, "layers", block, block, **more)


def _distils(config: Config) -> WhyNot:
    why = (
        "distil=True runs 'encoder.conv_layers' between the blocks of its encoder (build it "
        "with distil=False)"
    )
    return {"pipeline": why} if config.distil else {}


ENCODER_DECODERS: Mapping[str, Family] = MappingProxyType(
    {
        "t5": _t5("T5"),
        "mt5": _t5("MT5"),
        "bart": _bart("Bart"),
        "mbart": _bart("MBart"),
        "pegasus": _bart("Pegasus"),
        "marian": _bart("Marian"),
        "whisper": _bart("Whisper"),
        "led": _without_heads("LED", "led", "ForConditionalGeneration"),
        "informer": _without_heads("Informer", "model", "ForPrediction", why_not=_distils),
    }
)
"""Rows of encoder-decoders, by the folder of transformers that defines the classes."""


# ---- torch's own transformers --------------------------------------------------------------------
#
# Modules around them, such as an embedding and a head, are replicated. A pipeline orders them by
# their registration.

_LAYER: Block = {"self_attn": AttentionHeads(), "linear1": Column(), "linear2": Row()}

TRANSFORMER_ENCODER = Family(
    classes=("TransformerEncoder",), base="", blocks={"layers": _LAYER}, after=("norm",)
)
TRANSFORMER = Family(
    classes=("Transformer",),
    base="",
    blocks={
        "encoder.layers": _LAYER,
        "decoder.layers": {**_LAYER, "multihead_attn": AttentionHeads()},
    },
    after=("encoder.norm", "decoder.norm"),
)
