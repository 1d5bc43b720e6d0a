"""A local parameter: its place in the model, and the tensor on which the optimizer steps.

Gradients, norms, checkpoints and summaries read nothing else about a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_ptdp.parameters.placement import Placement


@dataclass(eq=False, kw_only=True)
class ManagedParameter:
    """One local parameter.

    Attributes:
        parameter: The module's parameter.
        placement: Its place in the full tensor, and its copies on other ranks.
        name: Global name, the first under which the uncut model registers it.
        order: Position among the uncut model's parameters.
        stages: Local pipeline stages that use it.
        held: Values that this rank keeps between the steps: the parameter's, or a flat part.
        held_placement: Place of ``held`` in the full tensor.
        stays_whole: The optimizer must step on all of the local tensor, not on a range of it.
        stepped: Tensor on which the optimizer steps: the parameter, its float32 main copy, or a
            flat part of either; None if other ranks step on all of it.
        stepped_placement: Place of ``stepped`` in the full tensor.
        rounded: The part of the parameter that receives ``stepped`` after a step; None if
            ``stepped`` is no main copy.
        gradient: The gradient of ``stepped``, a part of a bucket; None if it is the parameter's.
    """

    parameter: nn.Parameter
    placement: Placement
    name: str = ""
    order: int = 0
    stages: tuple[int, ...] = (0,)
    stays_whole: bool = False
    held: Tensor | None = field(init=False)
    held_placement: Placement = field(init=False)
    stepped: nn.Parameter | None = field(init=False)
    stepped_placement: Placement = field(init=False)
    rounded: Tensor | None = field(init=False)
    gradient: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.hold(self.parameter)
        self.step_on(self.parameter)

    def hold(self, values: Tensor | None, placement: Placement | None = None) -> None:
        """Set the values that this rank keeps between the steps; None: others keep all of them."""
        self.held, self.held_placement = values, placement or self.placement

    @property
    def chunk(self) -> int | None:
        """Return the stage whose backward completes the gradient; None if several contribute."""
        return self.stages[0] if len(self.stages) == 1 else None

    @property
    def steps_on_copy(self) -> bool:
        """Return True if the optimizer does not step on the parameter itself."""
        return self.stepped is not self.parameter

    def step_on(
        self,
        stepped: nn.Parameter | None,
        placement: Placement | None = None,
        *,
        rounded: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> None:
        """Set the tensor on which the optimizer steps; see the attributes."""
        self.stepped, self.stepped_placement = stepped, placement or self.placement
        self.rounded = rounded
        self.gradient = gradient


ManagedParameters = Mapping[nn.Parameter, ManagedParameter]
"""All parameters of a rank, by identity."""
