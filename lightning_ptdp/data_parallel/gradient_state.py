"""States of the gradients and of the parameters of a bucket.

Both lives are circles, and every step is asserted::

    EMPTY --begin--> ACCUMULATING --the last backward--> REDUCING --finish--> REDUCED --> EMPTY
                      |        ^
                      +-begin--+  (the next batch of an accumulation)

    WHOLE --the optimizer's step--> SHARDED --publish--> GATHERING --wait--> WHOLE
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["GradientState", "ParameterState"]


class GradientState(Enum):
    """State of the gradients that are reduced together."""

    EMPTY = auto()
    """No gradient counts: before the first batch of a step."""
    ACCUMULATING = auto()
    """Backwards add to the gradients."""
    REDUCING = auto()
    """The sum over the replicas has been launched; nothing may write to the gradients."""
    REDUCED = auto()
    """The gradients are those of the optimizer's step."""

    def to(self, state: GradientState) -> GradientState:
        """Return ``state``, which must be able to follow."""
        assert state in _NEXT[self], f"gradients go from {self.name} to {state.name}"
        return state


class ParameterState(Enum):
    """State of the parameters that replicas gather together."""

    WHOLE = auto()
    """Every rank has the values of the last step."""
    SHARDED = auto()
    """Each rank has stepped on its own part, and has old values of the others."""
    GATHERING = auto()
    """The parts are on their way; nothing may read the parameters."""

    def to(self, state: ParameterState) -> ParameterState:
        """Return ``state``, which must be the next one."""
        following = self.value % len(ParameterState) + 1
        assert state.value == following, f"parameters go from {self.name} to {state.name}"
        return state


_NEXT = {
    GradientState.EMPTY: (GradientState.EMPTY, GradientState.ACCUMULATING),
    GradientState.ACCUMULATING: (
        GradientState.EMPTY,
        GradientState.ACCUMULATING,
        GradientState.REDUCING,
    ),
    GradientState.REDUCING: (GradientState.REDUCED,),
    GradientState.REDUCED: (GradientState.EMPTY,),
}
