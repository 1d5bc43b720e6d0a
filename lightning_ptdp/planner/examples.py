"""Arguments to call a model with when it runs without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ptdp.planner.traced_blocks import Run

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Arguments of a module's forward: one, several, or several by name.

The first dimension of each tensor is the batch.
"""

_LENGTHS = ("sequence_length", "max_position_embeddings", "n_positions")


def call_with(module: nn.Module, example: Example | None, *, sequence_length: int | None) -> Run:
    """Return a function that calls ``module`` with a batch of a given size.

    The arguments are ``example``, or the module's ``example_input_array``, at this batch size.
    Without either, a Hugging Face model inside the module is called with its own arguments. A model
    with an embedding is called with token ids.

    Args:
        module: The whole model.
        example: Arguments of its forward.
        sequence_length: s in tokens; None if it is unknown.

    Raises:
        ValueError: The arguments of the module, or the length of its sequences, are unknown.
    """
    inputs = _example(module, example)
    if inputs is not None:
        return lambda model, samples: _call(model, _sized(inputs, samples))
    for name, child in module.named_modules():
        if isinstance(getattr(child, "dummy_inputs", None), Mapping):
            if (input_key := getattr(child, "main_input_name", "input_ids")) not in (
                "input_ids",
                "pixel_values",
            ):
                raise ValueError(
                    f"{type(child).__name__} takes {input_key}. Pass example=, an example input of "
                    "its forward, to plan"
                )
            tokens = 1 if input_key == "pixel_values" else _known(sequence_length, module)
            return lambda model, samples: model.get_submodule(name)(
                **_inputs(child, samples, tokens)
            )
    if any(isinstance(child, nn.Embedding) for child in module.modules()):
        tokens = _known(sequence_length, module)
        return lambda model, samples: model(torch.zeros(samples, tokens, dtype=torch.long))
    raise ValueError(
        f"the inputs of {type(module).__name__} are unknown. Pass example=, an example input "
        "of its forward, to plan, or set the module's example_input_array"
    )


def longest_sample(module: nn.Module, example: Example | None = None) -> int | None:
    """Return the tokens of the longest sample by the module's configuration, or None.

    The length of the ids in the example takes precedence.
    """
    leaves = tree_leaves(_example(module, example))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    ids = next((leaf for leaf in tensors if not leaf.is_floating_point()), None)
    if ids is not None and ids.dim() > 1:
        return ids.size(1)
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is not None:
            sizes = config.get_text_config() if hasattr(config, "get_text_config") else config
            for name in _LENGTHS:
                if isinstance(length := getattr(sizes, name, None), int) and length > 0:
                    return length
    return None


def _example(module: nn.Module, example: Example | None) -> Any:
    return getattr(module, "example_input_array", None) if example is None else example


def _known(sequence_length: int | None, module: nn.Module) -> int:
    if sequence_length is None:
        raise ValueError(
            f"the sequence length of {type(module).__name__} is unknown. Pass sequence_length= "
            "(--sequence of ptdp plan) or example=, an example input of its forward, or set "
            "the module's example_input_array"
        )
    return sequence_length


def _call(model: nn.Module, example: Example) -> object:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _sized(example: Any, samples: int) -> Any:
    return tree_map(
        lambda leaf: (
            torch.zeros((samples, *leaf.shape[1:]), dtype=leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
        ),
        example,
    )


def _inputs(model: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """Return the inputs of a Hugging Face model."""
    config: Any = model.config
    inputs: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {
            "pixel_values": torch.zeros(samples, getattr(config, "num_channels", 3), height, width)
        }
    inputs["input_ids"] = torch.zeros(samples, length, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs
