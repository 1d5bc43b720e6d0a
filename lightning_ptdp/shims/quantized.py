"""Quantized parameters of other libraries, recognized by name so that none need be imported.

tests/huggingface/test_quantized.py checks the names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["is_four_bit", "quantized_parameters", "scales_of"]


def quantized_parameters(model: object) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that bitsandbytes or torchao has quantized, by name."""
    return {
        name: parameter
        for name, parameter in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if type(parameter).__module__.partition(".")[0] in ("bitsandbytes", "torchao")
    }


def scales_of(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Yield the scales of a weight of bitsandbytes, which it holds beside its elements.

    With double quantization, scales are quantized and have scales themselves.
    """
    state: Any = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (value for value in (state.absmax, state.offset) if value is not None)
        state = state.state2


def is_four_bit(parameter: nn.Parameter) -> bool:
    """Return True for a weight of bitsandbytes' ``Linear4bit``, which has plain bytes."""
    return type(parameter).__name__ == "Params4bit"
