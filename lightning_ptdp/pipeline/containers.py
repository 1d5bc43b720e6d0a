"""The repeated containers of a model, the modules around them, and the layers of each stage.

A pipeline cuts the sequence of all layers, container after container::

    containers   encoder.block          decoder.block
    layers       0    1    2    3       4    5    6    7
    stages       0 .......  1 ................  2 .....
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from lightning_ptdp.schedule.partition import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.world.layout import ParallelLayout

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
    entrance: str

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


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Positions of the modules with parameters relative to the repeated containers.

    A module may be in two lists.

    Attributes:
        blocks: Dotted names of the containers, in call order; "" is the module itself.
        before: Names of the modules that run before the first container; they belong to the first
            stage.
        between: Names of the modules that run before a further container; they belong to the stages
            where one begins.
        after: Names of the modules that run after the last container; they belong to the last
            stage.
        everywhere: Names of the modules, among or inside of these, that every stage keeps.
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()

    def is_everywhere(self, name: str) -> bool:
        """Return True if every stage keeps module ``name`` or a module around it."""
        return any(f"{name}.".startswith(f"{replicated}.") for replicated in self.everywhere)

    def outermost_after(self, model: nn.Module) -> Iterator[str]:
        """Yield the names in ``after``.

        A module that contains one kept by every stage is replaced by its children.
        """
        names = list(self.after)
        while names:
            name = names.pop(0)
            if not any(f"{replicated}.".startswith(f"{name}.") for replicated in self.everywhere):
                yield name
            elif not self.is_everywhere(name):
                names[:0] = [
                    f"{name}.{key}" for key, _ in model.get_submodule(name).named_children()
                ]

    @property
    def shown(self) -> str:
        """Return the names of the containers, for a message."""
        return " and ".join(f"'{name}'" for name in self.blocks)


# ---- Stages of equal cost, computed from the costs of the layers ---------------------------------


def layer_ranges(
    module: nn.Module,
    *,
    parts: ModelParts,
    layout: ParallelLayout,
    partition: Sequence[int] | Sequence[str] | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the half-open layer ranges of all stages.

    The ranges follow ``partition`` if it is given. Otherwise the stages are balanced by cost,
    including embedding and head.

    The cost of a microbatch is counted in multiply-adds per token of its forward, one for each
    element of a matrix. The backward takes twice that on every stage, so it changes no comparison.
    Attention scores are left out, because they are the same in every layer.

    An embedding multiplies nothing, but moves memory. It has V x h elements. For each microbatch,
    the device writes a gradient of zeros, scatters the tokens' gradients into it and adds it to the
    sum: 4 passes of 4 bytes, 16 V h bytes. A head of the same size takes 6 V h floating-point
    operations per token. Assume a device that does about 100 floating-point operations while it
    moves one byte (an accelerator at the rate that training reaches), and T tokens per microbatch.
    The embedding then costs 16 * 100 / (6 T) of such a head, about an eighth at T = 2048. T is not
    known here; an eighth stands for a small, nonzero cost.

    A vision tower counts like the layers, as if it computed one patch for each token of the
    sequence. Samples with few images cost less. Later stages call the tower's parts on zeros,
    without its matrices.

    Args:
        module: The whole module.
        parts: Positions of its modules relative to the containers.
        layout: The degrees of parallelism.
        partition: Layers of each stage, or names of the first layer of each stage.

    Raises:
        ValueError: There are fewer layers than stages, or ``partition`` does not fit.
    """
    layers = layers_of(module, parts.blocks)
    if partition is not None:
        return explicit_partition(
            partition, layers=[layer.name for layer in layers], num_stages=layout.num_stages
        )
    check_num_layers(
        len(layers),
        pipeline_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_size=layout.virtual_pipeline_size,
    )
    before, between, after = (
        sum(multiply_adds(module.get_submodule(name)) for name in names)
        for names in (parts.before, parts.between, parts.after)
    )
    costs = [
        (multiply_adds(module.get_submodule(layer.name)) or 1.0)
        + between * (layer.is_first and layer.container > 0)
        for layer in layers
    ]
    return partition_layers(costs, num_stages=layout.num_stages, first_cost=before, last_cost=after)


_LOOKUP_COST = 1 / 8
"""Cost of an element of an embedding, in multiply-adds (see ``layer_ranges``)."""


def multiply_adds(module: nn.Module) -> float:
    """Return the multiply-adds per token, with memory traffic converted to multiply-adds."""
    return sum(
        p.numel() * (_LOOKUP_COST if isinstance(m, nn.Embedding) else _visited(m, module))
        for m in module.modules()
        for p in m.parameters(recurse=False)
        if p.dim() > 1
    )


def _visited(module: nn.Module, layer: nn.Module) -> float:
    """Return the fraction of a module's weights that one token uses.

    For experts, this is the share that the layer's router chooses. The router's ``top_k`` gives the
    number of chosen experts, as in all Hugging Face models.
    """
    num_experts = getattr(module, "num_experts", None)
    top_ks = [k for child in layer.modules() if isinstance(k := getattr(child, "top_k", None), int)]
    return top_ks[0] / num_experts if isinstance(num_experts, int) and top_ks else 1.0
