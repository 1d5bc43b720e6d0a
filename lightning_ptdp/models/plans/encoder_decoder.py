"""Plans of Hugging Face's encoder-decoders: T5, BART and models with the same structure.

Each has a row, as in ``families.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_ptdp.models.plans.block_parts import (
    Block,
    Config,
    WhyNot,
    attention,
    feed_forward,
    joined,
    kinds_of,
    per_rank,
    present,
)
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, Vocabulary, fits
from lightning_ptdp.tensor_parallel.local_sizes import Number, Numbers

_SIDES = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """Properties of the models in one file of transformers.

    Attributes:
        classes: Names of the bare model's class and of the classes with a head.
        base: Attribute of a model with a head that holds the bare model; "" if it has both stacks
            itself.
        blocks: Repeated container of both stacks.
        tail: Module that runs after the blocks of a stack. All other modules of the stack run
            before them.
        block: Modules in a block of encoder and decoder, and their kinds.
        numbers: Attributes of the attentions that count what is split.
        why_not: Function that returns which parallelism is not possible with a configuration, and
            why.
    """

    classes: tuple[str, ...]
    base: str
    blocks: str
    tail: str
    block: tuple[Block, Block]
    numbers: Numbers
    why_not: Callable[[Config], WhyNot] = lambda _config: {}


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


def _t5(name: str) -> EncoderDecoder:
    self_attn = "layer.*.SelfAttention"
    memory = "layer.*.EncDecAttention"
    dense = "layer.*.DenseReluDense"
    # The first block of a stack looks up the position bias, and passes the bias of its heads to the
    # next blocks.
    attentions = _attentions(
        self_attn, memory, "q k v relative_attention_bias", "o", heads="num_heads"
    )
    block = {
        **attentions,
        **feed_forward(f"{dense}.wi {dense}.wi_0 {dense}.wi_1", f"{dense}.wo", region=dense),
    }
    return EncoderDecoder(
        classes=(f"{name}Model", f"{name}ForConditionalGeneration"),
        base="",
        blocks="block",
        tail="final_layer_norm",
        block=(block, block),
        numbers=per_rank(self_attn, "n_heads", "inner_dim")
        | per_rank(memory, "n_heads", "inner_dim"),
    )


def _bart(name: str) -> EncoderDecoder:
    def block(side: str) -> Block:
        heads = f"{side}_attention_heads"
        attentions = _attentions(
            "self_attn", "encoder_attn", "q_proj k_proj v_proj", "out_proj", heads=heads
        )
        return {**attentions, **feed_forward("fc1", "fc2")}

    return EncoderDecoder(
        classes=tuple(f"{name}{end}" for end in ("Model", "ForConditionalGeneration", "MTModel")),
        base="model",
        blocks="layers",
        tail="layer_norm",
        block=(block("encoder"), block("decoder")),
        numbers=per_rank("self_attn", "num_heads") | per_rank("encoder_attn", "num_heads"),
    )


def _without_heads(name: str, base: str, *heads: str, **more: Any) -> EncoderDecoder:
    """Return the row of models whose attentions are replicated.

    These attentions cannot be split by heads alone.
    """
    classes = tuple(f"{name}{end}" for end in ("Model", *heads))
    block = feed_forward("fc1", "fc2")
    return EncoderDecoder(
        classes=classes,
        base=base,
        blocks="layers",
        tail="",
        block=(block, block),
        numbers={},
        **more,
    )


def _distils(config: Config) -> WhyNot:
    why = (
        "distil=True runs 'encoder.conv_layers' between the blocks of its encoder (build it "
        "with distil=False)"
    )
    return {"pipeline": why} if config.distil else {}


ENCODER_DECODERS: Mapping[str, EncoderDecoder] = MappingProxyType(
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
"""Rows by the folder of transformers that defines the classes."""


def encoder_decoder_plan(pair: EncoderDecoder, module: nn.Module, prefix: str = "") -> ParallelPlan:
    """Return the plan of an encoder-decoder with the name ``prefix``, bare or with a head."""
    inner = pair.base if pair.base and hasattr(module, pair.base) else ""
    base = joined(prefix, inner)
    bare = module.get_submodule(inner)
    fronts = {}
    tails = {}
    tensor: dict[str, Kind] = {}
    numbers: dict[str, Mapping[str, Number]] = {}
    for side, block in zip(_SIDES, pair.block, strict=True):
        names = _with_parameters(bare.get_submodule(side))
        fronts[side] = [
            joined(base, side, name) for name in names if name not in (pair.blocks, pair.tail)
        ]
        tails[side] = [joined(base, side, name) for name in names if name == pair.tail]
        pattern = joined(base, side, pair.blocks, "*")
        tensor |= kinds_of(block, bare.config, pattern)
        numbers |= {joined(pattern, name): values for name, values in pair.numbers.items()}
    shared = [joined(base, "shared")] if hasattr(bare, "shared") else []
    base_names = {base, *(joined(base, name) for name in (*_SIDES, "shared"))}
    heads = [joined(prefix, name) for name in _with_parameters(module)]
    plan = ParallelPlan(
        blocks=tuple(joined(base, side, pair.blocks) for side in _SIDES),
        before=(*shared, *fronts["encoder"]),
        between=(*tails["encoder"], *fronts["decoder"]),
        after=(*tails["decoder"], *(name for name in heads if name not in base_names)),
        tensor=present(tensor, module, prefix) | _words(module, prefix),
        numbers=present(numbers, module, prefix),
        sequence=None,
        why_not=pair.why_not(bare.config),
    )
    return plan if not plan.why_not else replace(plan, blocks=None, before=(), between=(), after=())


def _with_parameters(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if list(child.parameters())]


def _words(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the kinds of all embeddings and the head, if all can be split.

    They may share one weight.
    """
    ends = {
        joined(prefix, name): child
        for name, child in module.named_modules()
        if name.rpartition(".")[2] in ("shared", "embed_tokens", "lm_head", "proj_out")
    }
    if all(fits(end, Vocabulary()) for end in ends.values()):
        return {name: Vocabulary() for name in ends}
    return {}
