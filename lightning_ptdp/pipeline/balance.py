"""Stages of equal cost, computed from the costs of the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import ModelParts
from lightning_ptdp.schedule.partition import check_num_layers, explicit_partition, partition_layers
from lightning_ptdp.shims.transformers import image_token_of
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.world.layout import ParallelLayout


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
    known here; the eighth means "little, but not nothing".

    A vision tower counts like the layers, as if it computed one patch for each token of the sequence.
    Samples with few images cost less. Later stages call the tower's parts on zeros, without its
    matrices.

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
    costs = [multiply_adds(module.get_submodule(layer.name)) or 1.0 for layer in layers]
    costs = [
        cost + between * (layer.is_first and layer.container > 0)
        for cost, layer in zip(costs, layers, strict=True)
    ]
    return partition_layers(costs, num_stages=layout.num_stages, first_cost=before, last_cost=after)


_LOOKUP_COST = 1 / 8
"""Cost of an element of an embedding, in multiply-adds (see ``layer_ranges``)."""


def multiply_adds(module: nn.Module) -> float:
    """Return the multiply-adds per token, with memory traffic converted to multiply-adds."""
    matrices = [
        (m, p.numel())
        for m in module.modules()
        for p in m._parameters.values()
        if p is not None and p.dim() > 1
    ]
    return sum(
        elements * (_LOOKUP_COST if isinstance(m, nn.Embedding) else _visited(m, module))
        for m, elements in matrices
    )


def _visited(module: nn.Module, layer: nn.Module) -> float:
    """Return the fraction of a module's weights that one token uses.

    For experts, this is the share that the layer's router chooses. The router's ``top_k`` gives the
    number of chosen experts, as in all Hugging Face models.
    """
    num_experts = getattr(module, "num_experts", None)
    top_ks = [k for child in layer.modules() if isinstance(k := getattr(child, "top_k", None), int)]
    return top_ks[0] / num_experts if isinstance(num_experts, int) and top_ks else 1.0


# ---- Places of a model's modules, kept between the check before launch and the cut ---------------


@dataclass(frozen=True)
class KnownParts:
    """Places of a whole model's modules.

    They are kept, because finding them takes several runs without data.

    Attributes:
        parts: The places.
        plan: The plan by which they were found.
        image_token: Id of the tokens that stand for images, if the model takes images.
        found_for: Names and classes of the modules, and the plan's fields about places.
    """

    parts: ModelParts
    plan: ParallelPlan
    image_token: int | None
    found_for: tuple[object, ...]

    @classmethod
    def of(
        cls, module: nn.Module, plan: ParallelPlan, known: KnownParts | None = None
    ) -> KnownParts:
        """Return the places by the plan and the model, or ``known`` if it still applies.

        Hooks may have changed the model since ``known`` was found.

        Raises:
            ValueError: See ``find_parts``.
        """
        options = {
            name: getattr(plan, name)
            for name in ("blocks", "before", "between", "after", "everywhere")
        }
        modules = (
            f"{name}: {type(child).__qualname__}"
            for name, child in module.named_modules(remove_duplicate=False)
        )
        found_for = (*options.values(), *modules)
        if known is not None and known.found_for == found_for:
            return known
        return cls(find_parts(module, **options), plan, image_token_of(module), found_for)
