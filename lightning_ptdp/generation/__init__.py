"""Text from a language model, in whatever layout it is: prompts in, the tokens that follow out."""

from typing import TYPE_CHECKING, Any

from lightning_ptdp.generation.generation_options import Sampling

if TYPE_CHECKING:
    from lightning_ptdp.generation.write import generate

__all__ = ["Sampling", "generate"]


def __getattr__(name: str) -> Any:
    """Import torch only for those who ask for a name that needs it."""
    if name == "generate":
        from lightning_ptdp.generation.write import generate

        return generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
