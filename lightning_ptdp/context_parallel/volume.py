"""What context parallelism sends, by formula; tests/context_parallel/test_volume.py counts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["AttentionKind", "Volume", "attention_volume", "check_attention_kind"]

AttentionKind = Literal["ring", "all_to_all"]


def check_attention_kind(kind: str) -> None:
    """Check the option ``context_parallel_attention``.

    Raises:
        ValueError: It is unknown.
    """
    if kind not in get_args(AttentionKind):
        raise ValueError(f"context_parallel_attention={kind!r} must be 'ring' or 'all_to_all'")


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What one rank sends in one attention layer.

    Attributes:
        forward_bytes: Bytes to other ranks in the forward.
        backward_bytes: In the backward.
        forward_messages: Sends (ring) or all-to-alls in the forward.
        backward_messages: In the backward.
    """

    forward_bytes: int
    backward_bytes: int
    forward_messages: int
    backward_messages: int


def attention_volume(
    kind: AttentionKind,
    *,
    context_parallel_size: int,
    samples: int,
    sequence_length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
) -> Volume:
    """Bytes and messages of a layer without masks.

    Ring: 2 (c-1) blocks of b m (s/c) d elements forward (keys and values, in one message), and as many again backward, followed by as
    many of gradients in float32 (float64 for float64). All-to-all: (c-1)/c of q, k, v and the output in each direction; m is raised to a
    multiple of c by copies.

    Args:
        kind: Of the attention.
        context_parallel_size: c.
        samples: b.
        sequence_length: s, of the whole sequence.
        num_heads: n, on this rank.
        num_kv_heads: m, on this rank.
        head_dim: d.
        element_size: Bytes of an element of q, k and v.
    """
    c = context_parallel_size
    head = samples * (sequence_length // c) * head_dim
    if c == 1:
        return Volume(forward_bytes=0, backward_bytes=0, forward_messages=0, backward_messages=0)
    if kind == "ring":
        blocks = 2 * (c - 1) * num_kv_heads * head
        return Volume(
            forward_bytes=blocks * element_size,
            backward_bytes=blocks * (element_size + max(4, element_size)),
            forward_messages=c - 1,
            backward_messages=2 * (c - 1),
        )
    heads = 2 * num_heads + 2 * math.lcm(num_kv_heads, c)
    sent = heads * head * element_size // c * (c - 1)
    return Volume(forward_bytes=sent, backward_bytes=sent, forward_messages=4, backward_messages=4)
