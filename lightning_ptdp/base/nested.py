"""Batches and outputs: nested mappings, sequences and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Nested = Any
"""A batch or an output: tensors and other values in mappings, sequences and dataclasses."""

IMAGE_FIELDS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")
"""Fields whose dimension 0 may count images or patches if the batch has ``input_ids``."""
_IMAGE_DIMENSIONS = 4

_LEAVES = (type(None), bool, int, float, str)


def images_by_sample(batch: Mapping[str, Any]) -> bool:
    """Return True if dimension 0 of ``pixel_values`` counts samples, not images or patches.

    Images are then padded to the same number in every sample (Idefics3).
    """
    return batch["pixel_values"].dim() > _IMAGE_DIMENSIONS and "image_sizes" not in batch


def children(value: Nested) -> Iterable[tuple[Any, Nested]] | None:
    """Return the items of a container with their keys, indices or fields; None for a leaf.

    A field of a dataclass that its constructor computes is left out, and one without a value.
    """
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return zip(names, value, strict=True) if names else enumerate(value)
    if type(value) in _LEAVES:  # the check for a mapping is slow
        return None
    if isinstance(value, Mapping):
        return value.items()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    lacks = _lacks_argument(value)
    return [
        (field.name, getattr(value, field.name))
        for field in dataclasses.fields(value)
        if (field.init or lacks) and hasattr(value, field.name)
    ]


def has_batch_size(value: Nested) -> bool:
    """Return True for a TensorDict or tensorclass, which is indexed like a tensor."""
    return isinstance(getattr(value, "batch_size", None), torch.Size)


def rebuilt(value: Nested, items: dict[Any, Nested]) -> Nested:
    """Return a container like ``value`` with other ``children``."""
    if type(value) is dict:
        return items
    if has_batch_size(value):  # its constructor would make it empty
        changed = value.clone(recurse=False)
        for key, content in items.items():
            changed.set(key, content)
        return changed
    if isinstance(value, Mapping):
        first = [value.default_factory] if isinstance(value, defaultdict) else []
        return type(value)(*first, items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        kind: Any = type(value)
        return kind(*items.values()) if hasattr(value, "_fields") else kind(items.values())
    if not _lacks_argument(value):
        return dataclasses.replace(value, **items)
    changed = copy.copy(value)
    for field, content in items.items():
        object.__setattr__(changed, field, content)
    return changed


def _lacks_argument(value: Nested) -> bool:
    """Return True if a dataclass has not kept an argument that its constructor needs."""
    fields = value.__dataclass_fields__.values()
    return any(
        "InitVar" in str(field.type) and field.default is dataclasses.MISSING for field in fields
    )


def _name(container: Nested, key: object, name: str) -> str:
    """Return the name of an item: its key or field, or the name of the sequence that holds it."""
    if isinstance(container, (list, tuple)) and not hasattr(container, "_fields"):
        return name
    return str(key)


def map_named(
    value: Nested,
    function: Callable[[str, Tensor], Nested],
    *,
    name: str = "",
) -> Nested:
    """Rebuild a value with ``function`` applied to its tensors.

    The name of a tensor is the innermost key or field above it.

    Args:
        value: The value to rebuild.
        function: Applied to the name and the tensor.
        name: Name of the key or field above ``value``.
    """
    if isinstance(value, Tensor):
        return function(name, value)
    items = children(value)
    if items is None:
        return value
    mapped = {key: map_named(item, function, name=_name(value, key, name)) for key, item in items}
    return rebuilt(value, mapped)


def map_tensors(value: Nested, on_tensor: Callable[[Tensor], Nested]) -> Nested:
    """Apply ``map_named`` without names."""
    return map_named(value, lambda _, tensor: on_tensor(tensor))


def named_tensors(value: Nested, name: str = "") -> list[tuple[str, Tensor]]:
    """Return all tensors and their names, in a fixed order."""
    if isinstance(value, Tensor):
        return [(name, value)]
    return [
        entry
        for key, item in children(value) or ()
        for entry in named_tensors(item, _name(value, key, name))
    ]


def iterate_tensors(value: Nested) -> Iterator[Tensor]:
    """Yield all tensors, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
        return
    items = children(value)
    # Needed until torch 2.14, whose compiler traces `for item in items or ()`.
    if items is not None:
        for _, item in items:
            yield from iterate_tensors(item)


def batch_size(batch: Nested) -> int:
    """Return the number of samples: the first dimension that the batch's tensors share.

    Raises:
        ValueError: There is no tensor with a first dimension, or the tensors disagree (a dimension
            of 1 is taken as broadcast). Or a tensor is sparse or nested.
    """
    tensors = [(name, tensor) for name, tensor in named_tensors(batch) if tensor.dim()]
    for name, tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name or 'a tensor'} in the batch has layout {tensor.layout}, which cannot be "
                "split into microbatches. Pad it or make it dense in the collate function, or use "
                "pipeline_parallel_size=1 and num_microbatches=1"
            )
    if any(name == "input_ids" for name, _ in tensors):
        tensors = [(name, tensor) for name, tensor in tensors if name not in IMAGE_FIELDS]
    sizes = {tensor.size(0) for _, tensor in tensors}
    sizes = sizes - {1} or sizes
    if len(sizes) != 1:
        description = (
            f"tensors whose first dimensions are {sorted(sizes)}"
            if sizes
            else "no tensor with a first dimension"
        )
        raise ValueError(
            f"the batch has {description}. To split it into microbatches, every tensor needs the "
            "samples along dimension 0. Change the collate function, or use "
            "pipeline_parallel_size=1 and num_microbatches=1"
        )
    return sizes.pop()
