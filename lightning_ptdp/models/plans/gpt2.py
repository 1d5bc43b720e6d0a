"""GPT-2 of Hugging Face, bare or with a language-model head."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_ptdp.models.plans.names import joined
from lightning_ptdp.tensor_parallel import Column, Kind, ParallelPlan, PerRank, Row, Vocabulary

__all__ = ["gpt2_plan"]


def gpt2_plan(module: Any, prefix: str = "") -> ParallelPlan:
    """The plan of a ``GPT2Model`` or ``GPT2LMHeadModel`` that is found under the name ``prefix``.

    ``c_attn`` is [q | k | v] in a ``Conv1D``, whose output the attention cuts by ``split_size``.
    """
    has_head = isinstance(getattr(module, "lm_head", None), nn.Linear)
    base = joined(prefix, "transformer") if has_head else prefix
    config = module.config
    block = joined(base, "h.*")
    heads = (config.num_attention_heads,) * 3
    tensor: dict[str, Kind] = {
        joined(base, "wte"): Vocabulary(),
        f"{block}.attn.c_attn": Column(parts=(config.hidden_size,) * 3, heads=heads),
        f"{block}.attn.c_proj": Row(),
        f"{block}.mlp.c_fc": Column(),
        f"{block}.mlp.c_proj": Row(),
    }
    after = [joined(base, "ln_f")]
    if has_head:
        head = joined(prefix, "lm_head")
        tensor[head] = Vocabulary()
        after.append(head)
    return ParallelPlan(
        blocks=joined(base, "h"),
        tensor=tensor,
        before=(joined(base, "wte"), joined(base, "wpe")),
        after=tuple(after),
        sequence="blocks",
        numbers={f"{block}.attn": {"split_size": PerRank(), "num_heads": PerRank()}},
    )
