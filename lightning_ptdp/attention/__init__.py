"""Attention: one protocol, its implementations, and the interception of a model's calls."""

from lightning_ptdp.attention.all_to_all import all_to_all_attention, check_heads
from lightning_ptdp.attention.context_parallel_error import ContextParallelError
from lightning_ptdp.attention.ring import ring_attention

__all__ = ["ContextParallelError", "all_to_all_attention", "check_heads", "ring_attention"]
