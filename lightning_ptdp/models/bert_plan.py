"""How a BERT is cut: which layers are split over the tensor-parallel ranks, and what the pipeline's stages are made of.

As ``gpt_plan`` (arXiv 1909.08053, section 3). Sequence parallelism splits the sequence within the blocks only: the sentence head reads
the first token, which is in one rank's slice, and the masked-LM head takes tokens from everywhere.
"""

from __future__ import annotations

from lightning_ptdp.models.bert_config import BertConfig
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, Position, Row, Vocabulary

__all__ = ["bert_plan"]


def bert_plan(config: BertConfig, prefix: str = "model") -> ParallelPlan:
    """The plan of a ``Bert(config)`` that is found under the name ``prefix`` ("" if it is the root)."""
    root = f"{prefix}." if prefix else ""
    block, h, n = f"{root}blocks.*", config.hidden_size, config.num_heads
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
