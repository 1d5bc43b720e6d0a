"""Batches and outputs: nested mappings, sequences and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["Nested", "batch_size", "iterate_tensors", "map_named", "map_tensors", "named_tensors"]

Nested = Any
"""A batch or an output: tensors and other values in mappings, sequences and dataclasses."""


def map_named(
    value: Nested,
    function: Callable[[str, Tensor], Nested],
    on_list: Callable[[Nested], Nested] | None = None,
    *,
    name: str = "",
) -> Nested:
    """Rebuild a value with ``function`` applied to its tensors.

    The name of a tensor is the innermost key or field above it.

    Args:
        value: The value to rebuild.
        function: Applied to the name and the tensor.
        on_list: Applied to lists and tuples without tensors and further nesting, if given.
        name: Name of the key or field above ``value``.
    """
    if isinstance(value, Tensor):
        return function(name, value)
    if isinstance(value, Mapping):
        items = {
            key: map_named(item, function, on_list, name=str(key)) for key, item in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        return type(value)(
            *(map_named(item, function, on_list, name=field) for field, item in pairs)
        )
    if isinstance(value, (list, tuple)):
        if (
            on_list is not None
            and value
            and not any(isinstance(v, (Tensor, Mapping, list, tuple)) for v in value)
        ):
            return on_list(value)
        return type(value)(map_named(item, function, on_list, name=name) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        mapped = {
            field: map_named(getattr(value, field), function, on_list, name=field)
            for field in fields
        }
        try:
            return dataclasses.replace(value, **mapped)
        except (TypeError, ValueError) as error:  # a TypeError since Python 3.13
            if "InitVar" not in str(error):
                raise
            made = [
                field.name
                for field in dataclasses.fields(value)
                if not field.init and hasattr(value, field.name)
            ]
            kept = {
                field: map_named(getattr(value, field), function, on_list, name=field)
                for field in made
            }
            return _with_fields(value, mapped | kept)
    return value


def _with_fields(value: Nested, fields: Mapping[str, Nested]) -> Nested:
    """Return a copy of a dataclass with other values of ``fields``.

    It is used if the constructor needs values that the object did not keep.
    """
    changed = copy.copy(value)
    for field, content in fields.items():
        object.__setattr__(changed, field, content)
    return changed


def map_tensors(
    value: Nested,
    on_tensor: Callable[[Tensor], Nested],
    on_list: Callable[[Nested], Nested] | None = None,
) -> Nested:
    """Apply ``map_named`` without names."""
    return map_named(value, lambda _, tensor: on_tensor(tensor), on_list)


def named_tensors(value: Nested) -> list[tuple[str, Tensor]]:
    """Return all tensors and their names, in a fixed order."""
    found: list[tuple[str, Tensor]] = []

    def keep(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor))
        return tensor

    map_named(value, keep)
    return found


def iterate_tensors(value: Nested) -> Iterator[Tensor]:
    """Return an iterator over all tensors, in a fixed order."""
    return (tensor for _, tensor in named_tensors(value))


def batch_size(batch: Nested) -> int:
    """Return the number of samples: the first dimension that the batch's tensors share.

    Raises:
        ValueError: There is no tensor with a first dimension, or the tensors disagree (a dimension
            of 1 is taken as broadcast).
    """
    sizes = {t.size(0) for t in iterate_tensors(batch) if t.dim()}
    sizes = sizes - {1} or sizes
    if len(sizes) != 1:
        found = (
            f"tensors of first dimensions {sorted(sizes)}"
            if sizes
            else "no tensor with a first dimension"
        )
        raise ValueError(
            f"the batch holds {found}; to cut it into microbatches every tensor needs the samples "
            "along dimension 0. "
            "Change the collate function, or use pipeline_parallel_size=1 and num_microbatches=1"
        )
    return sizes.pop()
