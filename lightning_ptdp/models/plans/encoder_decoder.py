"""Encoder-decoders of Hugging Face: T5, BART and the models that are built as they are. A row each, as in ``families.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightning_ptdp.models.plans.names import joined
from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["ENCODER_DECODERS", "EncoderDecoder", "encoder_decoder_plan"]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """What is known of the models of one file of transformers.

    Attributes:
        classes: Names of the bare model's class and of those with a head.
        base: The attribute under which a model with a head holds the bare one; "" if it has both stacks itself.
        blocks: The repeated container of both stacks.
        tail: What runs behind the blocks of a stack; all else in it runs before them.
    """

    classes: tuple[str, ...]
    base: str
    blocks: str
    tail: str


def _t5(name: str) -> EncoderDecoder:
    return EncoderDecoder(
        classes=(f"{name}Model", f"{name}ForConditionalGeneration"), base="", blocks="block", tail="final_layer_norm"
    )


def _bart(name: str) -> EncoderDecoder:
    classes = tuple(f"{name}{end}" for end in ("Model", "ForConditionalGeneration", "MTModel"))
    return EncoderDecoder(classes=classes, base="model", blocks="layers", tail="layer_norm")


ENCODER_DECODERS: Mapping[str, EncoderDecoder] = MappingProxyType(
    {
        "t5": _t5("T5"),
        "mt5": _t5("MT5"),
        "bart": _bart("Bart"),
        "mbart": _bart("MBart"),
        "pegasus": _bart("Pegasus"),
        "marian": _bart("Marian"),
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
    inside = {base, *(joined(base, name) for name in ("encoder", "decoder", "shared"))}
    heads = [joined(prefix, name) for name, child in module.named_children() if any(True for _ in child.parameters())]
    return ParallelPlan(
        blocks=tuple(joined(base, side, pair.blocks) for side in ("encoder", "decoder")),
        before=(joined(base, "shared"), *fronts["encoder"]),
        between=(*tails["encoder"], *fronts["decoder"]),
        after=(*tails["decoder"], *(name for name in heads if name not in inside)),
        sequence=None,
    )
