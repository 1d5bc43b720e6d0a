"""Shape of a layer's experts for the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_ptdp.world.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts from which a layer's router chooses.

    The router and the experts that every token visits are ordinary products.

    Attributes:
        number: E, experts of the layer.
        chosen: k, experts that a token visits.
        hidden: h, channels of a token.
        width: f, inner channels of one expert.
        gated: Whether the experts have a gate beside the inner channels, as in SwiGLU.
        bias: Whether the experts have biases.
    """

    number: int
    chosen: int
    hidden: int
    width: int
    gated: bool = True
    bias: bool = False

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (outputs, inputs) of one expert's matrices: up, with any gate, and down."""
        return ((2 if self.gated else 1) * self.width, self.hidden), (self.hidden, self.width)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of one expert."""
        return sum(outputs * (inputs + self.bias) for outputs, inputs in self.matrices)

    def local(self, layout: ParallelLayout) -> int:
        """Return the number of a layer's expert parameters on a rank.

        Biases of the second matrix are not split.
        """
        width = self.width // layout.expert_tensor_parallel_size
        return self.number // layout.expert_parallel_size * replace(self, width=width).parameters

    @property
    def flops(self) -> int:
        """Return the operations of a token's forward. A multiply-add counts as two operations."""
        return 2 * self.chosen * sum(outputs * inputs for outputs, inputs in self.matrices)
