"""Output head fused with a cross entropy computed in chunks of the vocabulary.

The full logits never exist. The forward pass keeps log Z of every token. The backward pass
recomputes each chunk's logits (a third more products of the head), replaces them by their gradient,
and multiplies this gradient with the weight and the input.

Chunks split the vocabulary and not the tokens. The weight gradient of a row is then one product
over all tokens, accumulated once per microbatch.

Shapes: n tokens, h hidden channels, w local rows of the vocabulary, k rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ptdp.forward.fused import fused
from lightning_ptdp.forward.matrix_product import add_product
from lightning_ptdp.shims.torch import adds_to_gradient, has_module_hooks
from lightning_ptdp.tensor_parallel.cross_entropy import (
    Reduction,
    TokenLoss,
    checked_targets,
    reduced,
    sum_over,
    vocabulary_parallel_cross_entropy,
)
from lightning_ptdp.tensor_parallel.kinds.vocabulary import VocabularyParallelHead
from lightning_ptdp.tensor_parallel.logits import local_logits
from lightning_ptdp.tensor_parallel.region import enter
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from lightning_ptdp.world.mesh import Group

DEFAULT_CHUNK_MB = 256.0
"""Size of the logits that exist at a time: enough rows for a product that fills a GPU."""


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk_mb: float = DEFAULT_CHUNK_MB,
) -> Tensor:
    """Compute ``F.cross_entropy`` of ``head(hidden)`` without storing the logits.

    The value and the gradient are computed in float32.

    Args:
        hidden: The head's input (..., h). Under sequence parallelism it is this rank's slice of the
            sequence if the plan splits the sequence up to the head.
        head: The model's ``nn.Linear`` (h -> V), or the module by which the strategy replaced it.
            Its weight may be split over ranks, tied to an embedding, or frozen. A head that is not
            a plain ``nn.Linear``, or that has hooks, is called as a whole.
        target: Token ids (...) int64.
        ignore_index, label_smoothing, z_loss, reduction: As in
            ``vocabulary_parallel_cross_entropy``.
        chunk_mb: Maximum size of the logits that exist at a time, in MiB of float32. Smaller logits
            are computed as a whole and not recomputed.

    Returns:
        float32 (float64 for float64 logits); (...) for ``reduction="none"``, else ().

    Raises:
        IndexError: A target is neither in [0, V) nor ``ignore_index`` (on CUDA a device-side
            assertion).
        ValueError: ``chunk_mb`` is not positive.
    """
    check_chunk(chunk_mb=chunk_mb)
    rows = min(chunk_mb * 2**18 / max(1, target.numel()), 2**31)
    parts = _parts_of(head, max(1, int(rows)))
    if parts is None:
        logits, words, group = local_logits(head(hidden))
        return vocabulary_parallel_cross_entropy(
            logits,
            target,
            vocabulary=words,
            group=group,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
        )
    x_nh = enter(parts.group, getattr(head, "sequence_parallel", False), hidden).flatten(0, -2)
    target_n = target.reshape(-1)
    assert len(x_nh) == len(target_n), (tuple(hidden.shape), tuple(target.shape))
    counted_n, target_n = checked_targets(target_n, ignore_index, parts.words)
    formula = TokenLoss(parts.words, label_smoothing, z_loss)
    loss_n = _LinearCrossEntropy.apply(
        x_nh, parts.weight, parts.bias, target_n, counted_n, parts, formula
    )
    return reduced(loss_n.view(target.shape), counted_n, reduction)


def check_chunk(**sizes: float) -> None:
    """Check values of ``chunk_mb``, passed under the option name to report.

    Raises:
        ValueError: A value is not positive.
    """
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(
                f"{name}={size} must be greater than 0. Use infinity to compute all logits at once"
            )


@dataclass(frozen=True, eq=False)
class _Parts:
    """The head's weight, iterated in chunks of rows; padding rows are in no chunk.

    Attributes:
        weight: (w, h).
        bias: (w), or None.
        words: Range of the local rows.
        group: The ranks that hold the other rows.
        rows: k.
    """

    weight: Tensor
    bias: Tensor | None
    words: VocabularyRange
    group: Group
    rows: int

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.words.count, self.rows):
            yield slice(start, min(start + self.rows, self.words.count))

    def matrix(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Return the rows (k, h) of the weight in a dtype."""
        return self.weight.detach()[part].to(dtype)

    def logits(self, part: slice, x: Tensor, matrix: Tensor) -> Tensor:
        """Return the logits (n, k) in the dtype of ``x``."""
        bias = None if self.bias is None else self.bias.detach()[part].to(x.dtype)
        return F.linear(x, matrix, bias)

    def first(self, part: slice) -> int:
        """Return the id of the first word of ``part``."""
        return self.words.start + part.start


def _parts_of(head: nn.Module, rows: int) -> _Parts | None:
    """Return the head's chunks, or None if the head must be called or its logits are small."""
    if has_module_hooks(head):
        return None
    if isinstance(head, VocabularyParallelHead):
        words = head.vocabulary
        group = head.group
    elif isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        words = VocabularyRange(size=head.weight.size(0))
        group = Group()
    else:
        return None
    return _Parts(head.weight, head.bias, words, group, rows) if rows < words.rows else None


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss of every token, zero for ignored tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nh: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_n: Tensor,
        counted_n: Tensor,
        parts: _Parts,
        formula: TokenLoss,
    ) -> Tensor:
        dtype = torch.promote_types(x_nh.dtype, torch.float32)
        log_sum_n = x_nh.new_full((len(x_nh),), -torch.inf, dtype=dtype)
        add = fused(TokenLoss.summary, x_nh.device)
        sums = log_sum_n, torch.zeros_like(log_sum_n), torch.zeros_like(log_sum_n)
        for part in parts:
            logits_nk = parts.logits(part, x_nh, parts.matrix(part, x_nh.dtype))
            sums = add(formula, logits_nk, target_n - parts.first(part), *sums)
        log_sum_n, picked_n, total_n = sums
        if parts.group.size > 1:
            largest_n = sum_over(log_sum_n.clone(), parts.group, op="max")
            picked_n, total_n, z_n = sum_over(
                torch.stack((picked_n, total_n, (log_sum_n - largest_n).exp_())), parts.group
            )
            log_sum_n = largest_n + z_n.log()
        ctx.save_for_backward(x_nh, target_n, counted_n, log_sum_n)
        ctx.parts = parts
        ctx.formula = formula
        return formula.value(log_sum_n, picked_n, [total_n], log_sum_n).masked_fill(~counted_n, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        x_nh, target_n, counted_n, log_sum_n = ctx.saved_tensors
        parts, formula, (wants_x, wants_weight, wants_bias, *_) = (
            ctx.parts,
            ctx.formula,
            ctx.needs_input_grad,
        )
        # Select, do not multiply by 0: the mean over no targets has an infinite gradient.
        grad_n = torch.where(counted_n, grad_n, 0.0)
        grad_x = torch.zeros_like(x_nh, dtype=log_sum_n.dtype) if wants_x else None
        # A compiled graph must not have side effects, so it cannot accumulate into ``weight.grad``.
        adds = (
            wants_weight
            and not torch.compiler.is_compiling()
            and parts.weight.grad is not None
            and adds_to_gradient(parts.weight)
        )
        grad_weight = (
            parts.weight.grad if adds else torch.zeros_like(parts.weight) if wants_weight else None
        )
        grad_bias = torch.zeros_like(parts.bias) if wants_bias else None
        gradient = fused(TokenLoss.gradient, x_nh.device)
        with torch.autocast(x_nh.device.type, enabled=False):
            for part in parts:
                matrix_kh = parts.matrix(part, x_nh.dtype)
                logits_nk = parts.logits(part, x_nh, matrix_kh)
                grad_nk = gradient(
                    formula,
                    logits_nk,
                    target_n - parts.first(part),
                    log_sum_n,
                    grad_n,
                    out=logits_nk if logits_nk.dtype == log_sum_n.dtype else None,
                )
                del logits_nk
                if grad_bias is not None:
                    grad_bias[part] = grad_nk.sum(0, dtype=grad_bias.dtype)
                if grad_x is not None:
                    add_product(grad_x, grad_nk, matrix_kh)
                if grad_weight is not None:
                    add_product(grad_weight[part], grad_nk.t(), x_nh)
        return (
            None if grad_x is None else grad_x.to(x_nh.dtype),
            None if adds else grad_weight,
            grad_bias,
            None,
            None,
            None,
            None,
        )
