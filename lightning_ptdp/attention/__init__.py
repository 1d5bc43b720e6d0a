"""Attention: one protocol, its implementations, and the interception of a model's calls.

``attention_protocol.py`` lists the implementations. ``attention_kinds.py`` registers those that run
over a sequence split by ``sequence_chunks.py``. ``interception.py`` puts one of them in the place of
the attention that a model calls.
"""

from lightning_ptdp.attention.attention_kinds import ATTENTIONS, AttentionKind
from lightning_ptdp.attention.attention_protocol import (
    AttentionTraffic,
    ContextParallelError,
    KeyedAttention,
    additive,
    document_mask,
    find_documents,
)
from lightning_ptdp.attention.interception import intercepted
from lightning_ptdp.attention.sequence_chunks import (
    check_sequence,
    gather_sequence,
    positions,
    shard_sequence,
)
from lightning_ptdp.attention.sliced_attention import SlicedAttention

__all__ = [
    "ATTENTIONS",
    "AttentionKind",
    "AttentionTraffic",
    "ContextParallelError",
    "KeyedAttention",
    "SlicedAttention",
    "additive",
    "check_sequence",
    "document_mask",
    "find_documents",
    "gather_sequence",
    "intercepted",
    "positions",
    "shard_sequence",
]
