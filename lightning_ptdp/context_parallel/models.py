"""Static checks of a model for operations that a slice of the sequence does not support."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

__all__ = ["names_in_forward", "why_not"]


def why_not(model: nn.Module) -> str | None:
    """Return why context parallelism would change the model's result.

    None if no such operation is found.
    """
    return next(_reasons(model), None)


def _reasons(model: nn.Module) -> Iterator[str]:
    known: list[Any] = [
        module for module in model.modules() if hasattr(type(module), "main_input_name")
    ]
    for module in known:
        if (reason := _why_not_cut(module)) is not None:
            yield f"{type(module).__name__} {reason}"
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) or (
            isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        ):
            yield (
                f"'{name}' ({type(module).__name__}) mixes tokens along the sequence outside of "
                "attention, as state-space layers do, but a rank has only a slice of the sequence"
            )
    for module in known:
        if (reason := _why_not_attend(module) or _why_not_compare(module)) is not None:
            yield f"{type(module).__name__} {reason}"


def names_in_forward(module: nn.Module) -> Collection[str]:
    """Return the names (functions, attributes) that the module's forward uses.

    Empty if its code is not available.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def _why_not_cut(module: Any) -> str | None:
    if module.main_input_name != "input_ids":
        return (
            f"creates its sequence from {module.main_input_name}, but only sequences of the "
            "batch can be split"
        )
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return "has cross-attention between two sequences, but only self-attention can be split"
    return None


def _why_not_attend(module: Any) -> str | None:
    config = getattr(module, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    if getattr(type(module), "_supports_sdpa", None) is False:
        return (
            "computes its attention without torch.nn.functional.scaled_dot_product_attention, "
            "which context parallelism replaces"
        )
    if isinstance(attention, str) and attention != "sdpa":
        return (
            f"was built with attn_implementation={attention!r}, but context parallelism replaces "
            "only scaled_dot_product_attention. Build it with attn_implementation='sdpa'"
        )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return (
            "has layers of linear attention, which pass a state along the sequence, but a "
            "rank has only a slice of the sequence"
        )
    if getattr(config, "alibi", False):
        return (
            "adds position biases to its attention scores (alibi=True), but a rank has only "
            "those of its slice"
        )
    return None


def _why_not_compare(module: Any) -> str | None:
    if "start_positions" in inspect.signature(type(module).forward).parameters:
        return (
            "compares all tokens of a sequence in its loss (start_positions), but a rank has "
            "only a slice of the sequence"
        )
    if "argmax" in names_in_forward(module):
        return (
            "selects the last token of each sample that is not padding, but a rank has only a "
            "slice of the sequence"
        )
    return None
