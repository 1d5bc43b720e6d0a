"""Encoder-decoders of Hugging Face: T5, BART and the models that are built as they are. A row each, as in ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lightning_ptdp.models.plans.names import joined
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, PerRank, Region, Row, Vocabulary, fits, matches
from lightning_ptdp.tensor_parallel.numbers import Number

__all__ = ["ENCODER_DECODERS", "EncoderDecoder", "encoder_decoder_plan"]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """What is known of the models of one file of transformers.

    Attributes:
        classes: Names of the bare model's class and of those with a head.
        base: The attribute under which a model with a head holds the bare one; "" if it has both stacks itself.
        blocks: The repeated container of both stacks.
        tail: What runs behind the blocks of a stack; all else in it runs before them.
        heads: The attributes of the configuration that tell the numbers of heads of encoder and decoder.
        attention: Attentions in a block.
        memory: Attentions in a block of the decoder to what the encoder returned: their projections have two inputs, so that no
            region can enter for all of them.
        split: In an attention, what is split by heads.
        output: In an attention, what is split by input features.
        block: Other modules in a block, and what becomes of them.
        numbers: The attentions' attributes that count what is split.
    """

    classes: tuple[str, ...]
    base: str
    blocks: str
    tail: str
    heads: tuple[str, str]
    attention: str
    memory: str
    split: tuple[str, ...]
    output: str
    block: Mapping[str, Kind]
    numbers: Mapping[str, Number] = field(default_factory=dict)


def _t5(name: str) -> EncoderDecoder:
    return EncoderDecoder(
        classes=(f"{name}Model", f"{name}ForConditionalGeneration"),
        base="",
        blocks="block",
        tail="final_layer_norm",
        heads=("num_heads", "num_heads"),
        attention="layer.*.SelfAttention",
        memory="layer.*.EncDecAttention",
        # The first block of a stack looks the bias of positions up, and hands its heads of it on to the others.
        split=("q", "k", "v", "relative_attention_bias"),
        output="o",
        block={
            "layer.*.DenseReluDense": Region(),
            **{f"layer.*.DenseReluDense.{name}": Column() for name in ("wi", "wi_0", "wi_1")},
            "layer.*.DenseReluDense.wo": Row(),
        },
        numbers={"n_heads": PerRank(), "inner_dim": PerRank()},
    )


def _bart(name: str) -> EncoderDecoder:
    classes = tuple(f"{name}{end}" for end in ("Model", "ForConditionalGeneration", "MTModel"))
    return EncoderDecoder(
        classes=classes,
        base="model",
        blocks="layers",
        tail="layer_norm",
        heads=("encoder_attention_heads", "decoder_attention_heads"),
        attention="self_attn",
        memory="encoder_attn",
        split=("q_proj", "k_proj", "v_proj"),
        output="out_proj",
        block={"fc1": Column(), "fc2": Row()},
        numbers={"num_heads": PerRank()},
    )


ENCODER_DECODERS: Mapping[str, EncoderDecoder] = MappingProxyType(
    {
        "t5": _t5("T5"),
        "mt5": _t5("MT5"),
        "bart": _bart("Bart"),
        "mbart": _bart("MBart"),
        "pegasus": _bart("Pegasus"),
        "marian": _bart("Marian"),
        "whisper": _bart("Whisper"),
    }
)
"""By the folder of transformers in which the classes are defined."""


def encoder_decoder_plan(pair: EncoderDecoder, module: Any, prefix: str = "") -> ParallelPlan:
    """The plan of a model of the family that is found under the name ``prefix``, bare or with a head."""
    inner = pair.base if pair.base and hasattr(module, pair.base) else ""
    base, bare = joined(prefix, inner), module.get_submodule(inner)
    fronts, tails = {}, {}
    for side in ("encoder", "decoder"):
        names = [name for name, child in bare.get_submodule(side).named_children() if any(True for _ in child.parameters())]
        fronts[side] = [joined(base, side, name) for name in names if name not in (pair.blocks, pair.tail)]
        tails[side] = [joined(base, side, name) for name in names if name == pair.tail]
    shared = [joined(base, "shared")] if hasattr(bare, "shared") else []
    inside = {base, *(joined(base, name) for name in ("encoder", "decoder", "shared"))}
    heads = [joined(prefix, name) for name, child in module.named_children() if any(True for _ in child.parameters())]
    tensor, numbers = _tensor(pair, module, prefix, base=base, config=bare.config)
    return ParallelPlan(
        blocks=tuple(joined(base, side, pair.blocks) for side in ("encoder", "decoder")),
        before=(*shared, *fronts["encoder"]),
        between=(*tails["encoder"], *fronts["decoder"]),
        after=(*tails["decoder"], *(name for name in heads if name not in inside)),
        tensor=tensor,
        numbers=numbers,
        sequence=None,
    )


def _tensor(
    pair: EncoderDecoder, module: Any, prefix: str, *, base: str, config: Any
) -> tuple[dict[str, Kind], dict[str, Mapping[str, Number]]]:
    names = [joined(prefix, name) for name, _ in module.named_modules()]
    wanted: dict[str, Kind] = {}
    numbers: dict[str, Mapping[str, Number]] = {}
    for side, heads in zip(("encoder", "decoder"), pair.heads, strict=True):
        block = joined(base, side, pair.blocks, "*")
        wanted |= {joined(block, name): kind for name, kind in pair.block.items()}
        wanted[joined(block, pair.attention)] = Region()
        for attention in (joined(block, pair.attention), joined(block, pair.memory)):
            wanted |= {joined(attention, name): Column(heads=getattr(config, heads)) for name in pair.split}
            wanted[joined(attention, pair.output)] = Row()
            numbers[attention] = pair.numbers
    wanted |= _words(module, prefix)

    def exists(pattern: str) -> bool:
        return any(matches(name, pattern) for name in names)

    return {p: kind for p, kind in wanted.items() if exists(p)}, {p: found for p, found in numbers.items() if exists(p)}


def _words(module: Any, prefix: str) -> dict[str, Kind]:
    """All embeddings and the head, which are one weight or as many, where all can be split."""
    ends = {
        joined(prefix, name): child
        for name, child in module.named_modules()
        if name.rpartition(".")[2] in ("shared", "embed_tokens", "lm_head", "proj_out")
    }
    return {name: Vocabulary() for name in ends} if all(fits(end, Vocabulary()) for end in ends.values()) else {}
