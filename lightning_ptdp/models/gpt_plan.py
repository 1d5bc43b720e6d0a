"""How a GPT is cut: which layers are split over the tensor-parallel ranks, and what the pipeline's stages are made of.

As in Megatron-LM (arXiv 1909.08053, section 3): the first matrix of each half block is split by output columns, the second by
input rows, so that a half block needs one all-reduce in each direction; embedding and head are split along the vocabulary.
"""

from __future__ import annotations

import math

from lightning_ptdp.models.gpt_config import GPTConfig
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, PerCopy, Position, Row, Vocabulary

__all__ = ["check_tensor_parallel", "gpt_plan"]


def gpt_plan(config: GPTConfig, prefix: str = "model") -> ParallelPlan:
    """The plan of a ``GPT(config)`` that is found under the name ``prefix`` ("" if it is the root)."""
    root = f"{prefix}." if prefix else ""
    block = f"{root}blocks.*"
    q_width, kv_width, f = config.hidden_size, config.kv_heads * config.head_dim, config.ffn_size
    heads = (config.num_heads, config.kv_heads, config.kv_heads)
    up = {f"{block}.mlp.up": Column()} if config.mlp == "gelu" else {f"{block}.mlp.gate_up": Column(parts=(f, f))}
    positions = {f"{root}wpe": Position()} if config.position == "learned" else {}
    tensor: dict[str, Kind] = {
        f"{root}wte": Vocabulary(),
        **positions,
        f"{block}.attention.qkv": Column(parts=(q_width, kv_width, kv_width), heads=heads, copy_heads=True),
        f"{block}.attention.projection": Row(),
        **up,
        f"{block}.mlp.down": Row(),
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


def check_tensor_parallel(config: GPTConfig, tensor_parallel_size: int) -> None:
    """Check that every rank gets whole heads and an equal share of the feed-forward part.

    The vocabulary needs no check: it is padded to a multiple. Of fewer heads of keys and values than ranks, every rank gets one.

    Raises:
        ValueError: A size does not divide; the message lists the degrees that work.
    """
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "ffn_hidden_size": config.ffn_size}
    common = math.gcd(config.num_heads, config.ffn_size)
    for name, size in sizes.items():
        copied = name == "num_kv_heads" and tensor_parallel_size % size == 0
        if size % tensor_parallel_size and not copied:
            degrees = [t for t in range(1, common + 1) if common % t == 0]
            working = ", ".join(str(t) for t in degrees if config.kv_heads % t == 0 or t % config.kv_heads == 0)
            raise ValueError(
                f"{name}={size} is not divisible by tensor_parallel_size={tensor_parallel_size}; this model works with a "
                f"tensor_parallel_size of {working}"
            )
