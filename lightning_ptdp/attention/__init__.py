"""Attention: one protocol, its implementations, and the interception of a model's calls.

``attention_protocol.py`` lists the implementations, and puts one of them in the place of the
attention that a model calls (``intercepted``). ``ATTENTIONS`` has those that run over a sequence
split by ``sequence_chunks.py``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from lightning_ptdp.attention.all_to_all import AllToAllAttention
from lightning_ptdp.attention.attention_protocol import (
    AttentionTraffic,
    ContextParallelError,
    DistributedAttention,
    KeyedAttention,
    additive,
    document_mask,
    find_documents,
    intercepted,
)
from lightning_ptdp.attention.ring import RingAttention
from lightning_ptdp.attention.sequence_chunks import (
    check_sequence,
    gather_sequence,
    positions,
    shard_sequence,
    unshard_sequence,
)
from lightning_ptdp.attention.sliced_attention import FullMask, SlicedAttention, known_mask

__all__ = [
    "ATTENTIONS",
    "AttentionKind",
    "AttentionTraffic",
    "ContextParallelError",
    "KeyedAttention",
    "SlicedAttention",
    "FullMask",
    "additive",
    "check_sequence",
    "document_mask",
    "find_documents",
    "gather_sequence",
    "intercepted",
    "known_mask",
    "positions",
    "shard_sequence",
    "unshard_sequence",
]

AttentionKind = Literal["ring", "all_to_all"]
"""Values of the option ``context_parallel_attention``."""

ATTENTIONS: Mapping[str, type[DistributedAttention]] = MappingProxyType(
    {kind.name: kind for kind in (RingAttention, AllToAllAttention)}
)
