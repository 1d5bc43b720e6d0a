"""Quantized parameters of other libraries, recognized by name so that none need be imported.

tests/huggingface/test_quantized.py checks the names."""

from __future__ import annotations

from torch import nn

__all__ = ["is_four_bit", "quantized_parameters"]


def quantized_parameters(model: object) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` that bitsandbytes or torchao has quantized, by name."""
    return {
        name: parameter
        for name, parameter in (model.named_parameters() if isinstance(model, nn.Module) else ())
        if type(parameter).__module__.partition(".")[0] in ("bitsandbytes", "torchao")
    }


def is_four_bit(parameter: nn.Parameter) -> bool:
    """Return True for a weight of bitsandbytes' ``Linear4bit``, which has plain bytes."""
    return type(parameter).__name__ == "Params4bit"
