"""Kinds of attention over a sequence that is split over context ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from lightning_ptdp.attention.all_to_all import AllToAllAttention
from lightning_ptdp.attention.attention_protocol import DistributedAttention
from lightning_ptdp.attention.ring import RingAttention

__all__ = ["ATTENTIONS", "AttentionKind"]

AttentionKind = Literal["ring", "all_to_all"]
"""Values of the option ``context_parallel_attention``."""

ATTENTIONS: Mapping[str, type[DistributedAttention]] = MappingProxyType(
    {kind.name: kind for kind in (RingAttention, AllToAllAttention)}
)
