"""Text generation with a language model in any layout.

``generate`` takes prompts as token ids and returns the tokens that follow them; ``Sampling`` holds
its options. ``scoring.score`` returns log-likelihoods of given tokens.
"""

from typing import TYPE_CHECKING, Any

from lightning_ptdp.generation.generation_options import Sampling

if TYPE_CHECKING:
    from lightning_ptdp.generation.write import generate

__all__ = ["Sampling", "generate"]


def __getattr__(name: str) -> Any:
    """Import the modules that need torch on first use."""
    if name == "generate":
        from lightning_ptdp.generation.write import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
