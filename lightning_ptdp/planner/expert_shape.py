"""Shape of a layer's experts for the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_ptdp.models.model_config import GPTConfig
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["ExpertShape", "experts_of"]


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts that a layer's router chooses from; the router, and experts that every token
    visits, are ordinary products.

    Attributes:
        number: E, experts of the layer.
        chosen: k, of them a token visits.
        hidden: h, channels of a token.
        width: f, inner channels of one.
        gated: Whether they have a gate beside the inner channels, as SwiGLU's.
        bias: Whether they add biases.
    """

    number: int
    chosen: int
    hidden: int
    width: int
    gated: bool = True
    bias: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(outputs, inputs) of one expert's matrices: up, with the gate if there is one, and
        down."""
        return ((2 if self.gated else 1) * self.width, self.hidden), (self.hidden, self.width)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of one expert."""
        return sum(outputs * (inputs + self.bias) for outputs, inputs in self.matrices)

    def local(self, layout: ParallelLayout) -> int:
        """Parameters of experts that a rank has of a layer; their last biases are whole."""
        width = self.width // layout.expert_tensor_parallel_size
        return self.number // layout.expert_parallel_size * replace(self, width=width).parameters

    @property
    def flops(self) -> int:
        """Operations of a token's forward, a multiply-add being two."""
        return 2 * self.chosen * sum(outputs * inputs for outputs, inputs in self.matrices)


def experts_of(model: GPTConfig) -> ExpertShape | None:
    """Return the shape of the model's experts; None if it has none."""
    if model.num_experts is None:
        return None
    return ExpertShape(
        number=model.num_experts,
        chosen=model.experts_per_token,
        hidden=model.hidden_size,
        width=model.expert_size,
    )
