"""Parallel plans of GPT and BERT.

A plan names the layers that are split over the tensor-parallel ranks, and the blocks of the
pipeline. As in Megatron-LM (arXiv 1909.08053, section 3), the first matrix of each half block is
split by output columns, the second by input rows. A half block therefore needs one all-reduce in
each direction. Embedding and head are split along the vocabulary.
"""

from __future__ import annotations

from lightning_ptdp.models.model_config import BertConfig, GPTConfig
from lightning_ptdp.tensor_parallel import (
    Column,
    Experts,
    Kind,
    Mean,
    ParallelPlan,
    PerCopy,
    Position,
    Row,
    Vocabulary,
    Whole,
)


def gpt_plan(config: GPTConfig, prefix: str = "model") -> ParallelPlan:
    """Return the plan of a ``GPT(config)`` with the name ``prefix`` ("" if it is the root)."""
    root = f"{prefix}." if prefix else ""
    block = f"{root}blocks.*"
    q_width = config.num_heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    heads = (config.num_heads, config.kv_heads, config.kv_heads)
    positions = {f"{root}wpe": Position()} if config.position == "learned" else {}
    tensor: dict[str, Kind] = {
        f"{root}wte": Vocabulary(),
        **positions,
        f"{block}.attention.qkv": Column(
            parts=(q_width, kv_width, kv_width), heads=heads, copy_heads=True
        ),
        f"{block}.attention.projection": Row(),
        **_feed_forward(config, block),
        f"{root}head": Vocabulary(),
    }
    return ParallelPlan(
        blocks=f"{root}blocks",
        tensor=tensor,
        before=(f"{root}wte", *positions),
        after=(f"{root}norm", f"{root}head"),
        numbers={f"{block}.attention": {"queries_per_kv": PerCopy(heads=config.kv_heads)}},
        selective=(f"{block}.attention.core",),
    )


def _feed_forward(config: GPTConfig, block: str) -> dict[str, Kind]:
    """Return the kinds of the modules of the feed-forward parts.

    Under sequence parallelism a mixture receives the whole sequence: its router computes means over
    it, and tokens are distributed to the experts again.
    """
    mixture = f"{block}.mixture"
    tensor = dict[str, Kind]()
    if config.layers_with_experts < config.num_layers:
        f = config.ffn_size
        up = (
            {f"{block}.mlp.up": Column()}
            if config.mlp == "gelu"
            else {f"{block}.mlp.gate_up": Column(parts=(f, f))}
        )
        tensor |= up | {f"{block}.mlp.down": Row()}
    if config.layers_with_experts:
        tensor |= {
            mixture: Whole(),
            f"{mixture}.experts": Experts(),
            f"{mixture}.router.mean": Mean(),
        }
    if config.shared_experts:
        f = config.shared_experts * config.expert_size
        tensor |= {
            f"{mixture}.shared.gate_up": Column(parts=(f, f)),
            f"{mixture}.shared.down": Row(),
        }
    return tensor


def bert_plan(config: BertConfig, prefix: str = "model") -> ParallelPlan:
    """Return the plan of a ``Bert(config)`` with the name ``prefix`` ("" if it is the root).

    Sequence parallelism splits the sequence only within the blocks. The sentence head reads the
    first token, which is in one rank's slice, and the masked-LM head takes tokens from all
    positions.
    """
    root = f"{prefix}." if prefix else ""
    block = f"{root}blocks.*"
    h = config.hidden_size
    n = config.num_heads
    tensor: dict[str, Kind] = {
        f"{root}embeddings.token": Vocabulary(),
        f"{root}embeddings.position": Position(),
        f"{block}.attention.qkv": Column(parts=(h, h, h), heads=(n, n, n)),
        f"{block}.attention.projection": Row(),
        f"{block}.mlp.up": Column(),
        f"{block}.mlp.down": Row(),
        f"{root}masked_head.decoder": Vocabulary(),
    }
    norm = (f"{root}norm",) if config.norm_order == "pre" else ()
    return ParallelPlan(
        blocks=f"{root}blocks",
        tensor=tensor,
        before=(f"{root}embeddings",),
        after=(*norm, f"{root}masked_head", f"{root}order_head"),
        selective=(f"{block}.attention.core",),
        sequence="blocks",
    )
