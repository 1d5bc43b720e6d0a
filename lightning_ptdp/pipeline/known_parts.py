"""Places of a model's modules, kept between the check before launch and the cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import ModelParts
from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["KnownParts"]


@dataclass(frozen=True)
class KnownParts:
    """Places of a whole model's modules.

    They are kept, because finding them takes several runs without data.

    Attributes:
        parts: The places.
        found_for: Names and classes of the modules, and the plan's fields about places.
    """

    parts: ModelParts
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
        said = {
            name: getattr(plan, name)
            for name in ("blocks", "before", "between", "after", "everywhere")
        }
        modules = (
            f"{name}: {type(child).__qualname__}"
            for name, child in module.named_modules(remove_duplicate=False)
        )
        found_for = (*said.values(), *modules)
        return (
            known
            if known is not None and known.found_for == found_for
            else cls(find_parts(module, **said), found_for)
        )
