"""The shape of a model that is given by its configuration alone.

The model is built on the meta device and traced like any other (``model_trace.py``).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.gpt import GPT, make_linear
from lightning_ptdp.models.layers import AttentionCore
from lightning_ptdp.models.memory_saving import RMSNorm
from lightning_ptdp.models.model_config import BertConfig, GPTConfig, split_widths
from lightning_ptdp.models.own_plans import bert_plan, gpt_plan
from lightning_ptdp.models.rotary import Rotary
from lightning_ptdp.planner.examples import call_with
from lightning_ptdp.planner.foreign_sizes import Latent, PlannedGPT
from lightning_ptdp.planner.model_trace import trace_shape
from lightning_ptdp.planner.precision_bytes import Precision
from lightning_ptdp.planner.shapes import Divided, ModelShape
from lightning_ptdp.planner.software import Software
from lightning_ptdp.tensor_parallel import Column, ParallelPlan

__all__ = ["configured_shape"]


@functools.lru_cache(maxsize=64)
def configured_shape(
    config: GPTConfig | BertConfig,
    *,
    sequence_length: int,
    precision: Precision,
    software: Software,
    on_cpu: bool,
) -> ModelShape:
    """Return the shape of the model that ``config`` describes.

    Args:
        config: The model.
        sequence_length: s in tokens.
        precision: Precision of the counted bytes.
        software: Software whose reads and writes are counted.
        on_cpu: Whether the model runs on CPUs.
    """
    mixtures = config.layers_with_experts if isinstance(config, GPTConfig) else 0
    counts = [count for count in (config.num_layers - mixtures, mixtures) if count]
    # One layer of each kind. What exceeds a capacity depends on values.
    fewer: Any = {"dense_layers": len(counts) - 1, "capacity_factor": None} if mixtures else {}
    small = replace(config, num_layers=len(counts), **fewer)
    with torch.device("meta"):
        model, plan = _built(small)
    shape = trace_shape(
        model,
        plan,
        call_with(model, None, sequence_length=sequence_length),
        precision=precision,
        software=software,
        on_cpu=on_cpu,
        sequence_length=sequence_length,
    )
    # by the names of the configuration, which the user knows
    divided = (
        Divided(name="num_heads", size=config.num_heads),
        Divided(name="num_kv_heads", size=config.kv_heads, copied=True),
        *(Divided(name=name, size=size) for name, size in split_widths(config).items()),
    )
    runs = tuple(zip(counts, shape.layers, strict=True))
    return replace(shape, divided=divided, runs=runs)


def _built(config: GPTConfig | BertConfig) -> tuple[nn.Module, ParallelPlan]:
    if isinstance(config, BertConfig):
        return Bert(config), bert_plan(config, prefix="")
    model, plan = GPT(config), gpt_plan(config, prefix="")
    if isinstance(config, PlannedGPT) and config.latent is not None:
        for block in model.blocks:
            block.attention = _LatentAttention(config, config.latent)
        tensor = {name: kind for name, kind in plan.tensor.items() if "qkv" not in name}
        columns = {f"blocks.*.attention.{name}": Column() for name in ("queries", "key_values")}
        plan = replace(plan, tensor=tensor | columns, numbers={})
    return model, plan


class _LatentAttention(nn.Module):
    """Latent attention; (b, s, h) -> (b, s, h). It is traced and never trained."""

    def __init__(self, config: GPTConfig, latent: Latent) -> None:
        super().__init__()
        self.latent, self.heads = latent, config.num_heads
        h, n = config.hidden_size, config.num_heads
        self.query_down: nn.Module = nn.Identity()
        if latent.queries:
            self.query_down = nn.Sequential(
                make_linear(config, latent.queries), RMSNorm(latent.queries)
            )
        width = latent.plain + latent.turned
        self.queries = nn.Linear(latent.queries or h, n * width, bias=False)
        self.down = make_linear(config, latent.keys + latent.turned)
        self.norm = RMSNorm(latent.keys)
        self.key_values = nn.Linear(latent.keys, n * (latent.plain + latent.values), bias=False)
        self.rotary = Rotary(latent.turned, config.rope_base)
        self.core = AttentionCore(config.dropout, is_causal=True)
        self.projection = nn.Linear(n * latent.values, h, bias=False)

    def forward(self, x_bsh: Tensor, *_: object) -> Tensor:
        of = self.latent
        q_bsnd = torch.unflatten(self.queries(self.query_down(x_bsh)), -1, (self.heads, -1))
        narrow, shared = self.down(x_bsh).split((of.keys, of.turned), -1)
        k_v = torch.unflatten(self.key_values(self.norm(narrow)), -1, (self.heads, -1))
        k_bsnd, v_bsnd = k_v.split((of.plain, of.values), -1)
        q_bsnd, to_turn = q_bsnd.split((of.plain, of.turned), -1)
        to_turn = torch.cat((to_turn, shared.unsqueeze(2)), 2)
        turned = self.rotary(to_turn, turned=self.heads + 1)
        queries, key = turned.split((self.heads, 1), 2)
        q_bsnd = torch.cat((q_bsnd, queries), -1)
        k_bsnd = torch.cat((k_bsnd, key.expand(-1, -1, self.heads, -1)), -1)
        return self.projection(self.core(q_bsnd, k_bsnd, v_bsnd).flatten(2))
