"""Text from a language model, in whatever layout it is: prompts in, the tokens that follow out."""

from lightning_ptdp.generation.generate import generate
from lightning_ptdp.generation.sampling import Sampling

__all__ = ["Sampling", "generate"]
