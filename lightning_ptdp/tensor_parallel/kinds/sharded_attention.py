"""``nn.MultiheadAttention`` with its heads sharded over the tensor group.

See arXiv 1909.08053, section 3. Its two projections are a column and a row layer.

Shapes: b samples, s tokens, e embedding features, n heads, d = e / n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptdp.attention import additive
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.tensor_parallel.kinds.kind import Kind, ModulePlace, check_divides
from lightning_ptdp.tensor_parallel.kinds.linear_kinds import Row
from lightning_ptdp.tensor_parallel.linear import ParallelLayer, RowParallelLinear
from lightning_ptdp.world.mesh import Group


class ParallelMultiheadAttention(ParallelLayer):
    """This rank's heads, with the parameter names of ``nn.MultiheadAttention``.

    Args:
        in_proj_weight: Local rows [q_r | k_r | v_r] of the fused projection (3 e/t, e).
        in_proj_bias: Local bias (3 e/t), or None.
        out_proj: The output projection, split by input features.
        module: The module that it replaces.
        group: The tensor group.
        sequence_parallel: The input is split along the sequence: (b, s/t, e).
    """

    shown = ("embed_dim", "num_heads")
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        in_proj_weight: nn.Parameter,
        in_proj_bias: nn.Parameter | None,
        out_proj: RowParallelLinear,
        *,
        module: nn.MultiheadAttention,
        group: Group,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(group=group, sequence_parallel=sequence_parallel)
        self.embed_dim = module.embed_dim
        self.num_heads = module.num_heads
        self.head_dim = module.head_dim
        self.dropout = module.dropout
        self.batch_first = module.batch_first
        # nn.TransformerEncoderLayer reads this before it passes all weights to a fused kernel,
        # which would ignore the group.
        self._qkv_same_embed_dim = False
        self.in_proj_weight = in_proj_weight
        self.register_parameter("in_proj_bias", in_proj_bias)
        self.out_proj = out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute the attention like ``nn.MultiheadAttention``.

        The output is complete, or this rank's slice of it under sequence parallelism.

        Raises:
            ValueError: Attention weights are requested, or an input has no batch dimension.
        """
        if need_weights:
            raise ValueError(
                "attention weights are not computed if heads are split over tensor-parallel "
                "ranks. Call the layer with need_weights=False"
            )
        if query.dim() != 3:
            raise ValueError(
                f"the input has shape {tuple(query.shape)}. It must have a batch, a sequence "
                "and a feature dimension"
            )
        q, k, v = (self._heads(x) for x in self._project(query, key, value))
        mask = (
            None
            if is_causal and key_padding_mask is None
            else self._mask(attn_mask, key_padding_mask, q)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=is_causal and mask is None
        )
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(y if self.batch_first else y.transpose(0, 1)), None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.randomness is not None and self.training:
            self.randomness.enter()  # the output projection leaves the region
        weight = self.in_proj_weight
        bias = self.in_proj_bias
        width = self.in_proj_weight.size(0) // 3
        if query is key and key is value:
            return list(self.column(query, weight, bias).split(width, dim=-1))
        biases = bias.split(width) if bias is not None else (None, None, None)
        inputs = zip((query, key, value), weight.split(width), biases, strict=True)
        return [self.column(x, part, offset, defers=False) for x, part, offset in inputs]

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape (b, s, e/t) or (s, b, e/t) -> (b, n/t, s, d)."""
        x = x if self.batch_first else x.transpose(0, 1)
        return torch.unflatten(x, -1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the additive mask of the scores, or None.

        Its shape broadcasts to (b, n/t, s, s). In torch's boolean masks, True means masked out.
        """
        masks = []
        if attn_mask is not None:
            score_mask = attn_mask
            if score_mask.dim() == 3:  # (b n, s, s): masks of all heads
                score_mask = torch.unflatten(score_mask, 0, (-1, self.num_heads)).chunk(
                    self.group.size, dim=1
                )[self.group.rank]
            masks.append(_visible(score_mask, q.dtype))
        if padding is not None:
            masks.append(_visible(padding, q.dtype)[:, None, None, :])
        return sum(masks[1:], start=masks[0]) if masks else None


def why_not(module: nn.MultiheadAttention) -> str | None:
    """Return why an ``nn.MultiheadAttention`` cannot be sharded, or None if it can."""
    if not module._qkv_same_embed_dim:
        return f"kdim={module.kdim} and vdim={module.vdim} differ from embed_dim={module.embed_dim}"
    if module.bias_k is not None or module.add_zero_attn:
        return "it was built with add_bias_kv or add_zero_attn"
    return None


def _visible(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return additive(~mask if mask.dtype is torch.bool else mask, dtype)


@dataclass(frozen=True, kw_only=True)
class AttentionHeads(Kind):
    """``nn.MultiheadAttention`` split by heads, with a column and a row projection."""

    name = "attention"
    takes = "nn.MultiheadAttention"
    types = (nn.MultiheadAttention,)
    parameters = None
    sharding = "column: q, k and v, each split by heads"
    split_dim = 0

    def check(self, name: str, module: nn.Module, size: int) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        check_divides(name, "num_heads", module.num_heads, size)
        if (reason := why_not(module)) is not None:
            raise ValueError(
                f"'{name}': {reason}, so its heads cannot be split. Leave it out of the plan"
            )

    def check_sequence(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            raise ValueError(
                f"'{name}': sequence_parallel=True needs an nn.MultiheadAttention with "
                "batch_first=True"
            )

    def placements(self, module: nn.Module, place: ModulePlace) -> dict[str, Placement]:
        placements = super().placements(module, place)
        shapes = {name: placement.full_shape for name, placement in placements.items()}
        placements["out_proj.weight"] = place.columns(
            shapes["out_proj.weight"], shapes["out_proj.weight"][1:], dim=1
        )
        for name in shapes.keys() & {"in_proj_weight", "in_proj_bias"}:
            placements[name] = place.columns(shapes[name], (shapes[name][0] // 3,) * 3)
        return placements

    def build(
        self, module: nn.Module, local: Mapping[str, nn.Parameter], place: ModulePlace
    ) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention)
        options = place.layer_options
        out = RowParallelLinear(local["out_proj.weight"], local.get("out_proj.bias"), **options)
        return ParallelMultiheadAttention(
            local["in_proj_weight"],
            local.get("in_proj_bias"),
            out,
            module=module,
            **options,
        )

    def of_child(self, name: str) -> Kind | None:
        return Row() if name == "out_proj" else None
