"""The repeated containers of a model and their layers.

A pipeline cuts the sequence of all layers, container after container::

    containers   encoder.block          decoder.block
    layers       0    1    2    3       4    5    6    7
    stages       0 .......  1 ................  2 .....
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

Blocks: TypeAlias = str | Sequence[str]
"""Dotted name of the repeated container, or names of several in call order.

"" is the module itself.
"""


def as_names(blocks: Blocks) -> tuple[str, ...]:
    """Return the names of the containers as a tuple."""
    return (blocks,) if isinstance(blocks, str) else tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A member of a container.

    Attributes:
        name: Dotted name in the model.
        container: Index of its container.
        is_first: Whether it is the first layer of its container.
        is_last: Whether it is the last layer of its container.
        is_followed: Whether it is the last layer of its container and another container follows.
    """

    name: str
    container: int
    is_first: bool
    is_last: bool
    is_followed: bool


def layers_of(model: nn.Module, blocks: Blocks) -> list[Layer]:
    """Return the layers of all containers, in order.

    A module that occurs twice counts twice.
    """
    layers = []
    names = as_names(blocks)
    for index, name in enumerate(names):
        keys = [
            key for key, child in model.get_submodule(name)._modules.items() if child is not None
        ]
        for key in keys:
            layer_name = f"{name}.{key}" if name else key
            layers.append(
                Layer(
                    name=layer_name,
                    container=index,
                    is_first=key == keys[0],
                    is_last=key == keys[-1],
                    is_followed=key == keys[-1] and name != names[-1],
                )
            )
    return layers


@dataclass(frozen=True, kw_only=True)
class BlockPlace:
    """Position of a stage among the containers.

    Attributes:
        container: Index of the container of its first layer.
        inside: Whether that container began on an earlier stage.
        entrance: Name of the last layer of the previous stage, whose output is received; "" on the
            first stage.
    """

    container: int
    inside: bool
    entrance: str = ""

    @property
    def received(self) -> int:
        """Return the container whose block's output the stage receives; -1 on the first stage."""
        return self.container if self.inside else self.container - 1


def places_of(layers: Sequence[Layer], ranges: Sequence[tuple[int, int]]) -> tuple[BlockPlace, ...]:
    """Return the place of each stage."""
    return tuple(
        BlockPlace(
            container=layers[start].container,
            inside=not layers[start].is_first,
            entrance=layers[start - 1].name if start else "",
        )
        for start, _ in ranges
    )
