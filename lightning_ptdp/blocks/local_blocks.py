"""The repeated blocks that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from lightning_ptdp.pipeline.containers import Blocks, layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.placeholders import Placeholder


class LocalBlock(NamedTuple):
    """A block of this rank.

    Attributes:
        number: Its number in the sequence of all layers.
        name: Its dotted name.
        module: The block.
    """

    number: int
    name: str
    module: nn.Module


def local_blocks(module: nn.Module, blocks: Blocks | None) -> Iterator[LocalBlock]:
    """Yield the blocks of ``module`` that are not on other stages.

    ``blocks`` names the repeated containers; None: they are found.

    Raises:
        ValueError: No container is found.
    """
    layers = layers_of(module, find_blocks(module) if blocks is None else blocks)
    for number, layer in enumerate(layers):
        block = module.get_submodule(layer.name)
        if not isinstance(block, Placeholder):
            yield LocalBlock(number, layer.name, block)
