"""Cross entropy of logits split along the vocabulary, without gathering the logits.

See arXiv 1909.08053, section 3.

The forward pass makes two small all-reduces. The first carries one number per token, the maximum.
The second carries two (three with label smoothing): the sum of exponentials, the target's logit and
the sum of logits. The backward pass needs no communication.

Shapes: n tokens, w local rows of the vocabulary (padding included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.tensor_parallel.collectives import start_all_reduce
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from lightning_ptdp.world.mesh import Group

__all__ = [
    "Reduction",
    "TokenLoss",
    "check_targets",
    "reduced",
    "sum_over",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_logsumexp",
]

Reduction = Literal["mean", "sum", "none"]


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocabulary: VocabularyRange,
    group: Group,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute ``F.cross_entropy`` of the full logits, in value and gradient.

    Every rank gets the same result.

    Args:
        logits: Local logits (..., w), any floating dtype; not modified.
        target: Token ids (...) int64, equal on all ranks.
        vocabulary: Range of the local logits; columns beyond it are padding and are ignored.
        group: The tensor group.
        ignore_index: Targets with this value have no loss.
        label_smoothing: Share of the target's probability that is spread over the full vocabulary.
        z_loss: Weight of log(Z)^2, which is added to each token's loss to keep the normalizer Z
            near 1 (arXiv 2204.02311, section 5).
        reduction: As in ``F.cross_entropy``: the mean is over targets that are not ignored, nan if
            there are none.

    Returns:
        float32 (float64 for float64 logits). The loss is computed in this dtype, and rounding it to
        bfloat16 would lose precision.

    Raises:
        IndexError: A target is neither in [0, V) nor ``ignore_index`` (on CUDA a device-side
            assertion).
    """
    assert logits.size(-1) == vocabulary.rows, (tuple(logits.shape), vocabulary)
    assert logits.shape[:-1] == target.shape, (tuple(logits.shape), tuple(target.shape))
    logits_nw, target_n = logits.reshape(-1, vocabulary.rows), target.reshape(-1)
    counted_n = target_n != ignore_index
    check_targets(target_n, counted_n, vocabulary)
    formula = TokenLoss(vocabulary, label_smoothing, z_loss)
    return reduced(
        _CrossEntropy.apply(logits_nw, target_n, counted_n, formula, group).view(target.shape),
        counted_n,
        reduction,
    )


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token as a function of its logits, and its gradient.

    Let x be the logits minus their maximum, z = sum exp x and e the smoothing. The loss is (1 - e)
    (log z - x[target]) + e (log z - mean x). Its gradient is softmax - (1 - e) onehot(target) - e /
    V. The z-loss is c (log Z)^2, where Z is the sum of exponentials of the original logits. It adds
    2 c log Z softmax to the gradient.

    Attributes:
        words: Range of the local logits.
        smoothing: e.
        z_loss: c.
    """

    words: VocabularyRange
    smoothing: float
    z_loss: float

    def place(
        self, target_n: Tensor, counted_n: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Find the counted targets in [start, stop) and their columns.

        Returns:
            A mask of the counted targets in the range, and their columns. The column is 0 for a
            target outside of the range, and -1 for a target outside of the vocabulary, so that
            indexing fails.
        """
        here_n = counted_n & (target_n >= start) & (target_n < stop)
        valid_n = ~counted_n | ((target_n >= 0) & (target_n < self.words.size))
        return here_n, torch.where(here_n, target_n - start, torch.where(valid_n, 0, -1))

    def value(
        self, log_z_n: Tensor, picked_n: Tensor, sums_n: Sequence[Tensor], log_sum_n: Tensor
    ) -> Tensor:
        """Return the loss from log z, x[target], sum x (only with smoothing) and log Z."""
        loss_n = log_z_n - picked_n
        if self.smoothing:
            loss_n = (1 - self.smoothing) * loss_n + self.smoothing * (
                log_z_n - sums_n[0] / self.words.size
            )
        return loss_n + self.z_loss * log_sum_n.square() if self.z_loss else loss_n

    def into_gradient(
        self,
        shifted_nk: Tensor,
        grad_n: Tensor,
        log_sum_n: Tensor,
        here_n: Tensor,
        column_n: Tensor,
    ) -> None:
        """Overwrite logits minus log Z (at least one column) with the loss's gradient."""
        shifted_nk.exp_()
        if self.z_loss:
            shifted_nk.mul_((1 + 2 * self.z_loss * log_sum_n).unsqueeze(-1))
        if self.smoothing:
            shifted_nk.sub_(self.smoothing / self.words.size)
        shifted_nk.mul_(grad_n.unsqueeze(-1))
        share_n = torch.where(here_n, grad_n * (self.smoothing - 1), 0.0)
        shifted_nk.scatter_add_(-1, column_n.unsqueeze(-1), share_n.unsqueeze(-1))


def reduced(loss: Tensor, counted_n: Tensor, reduction: Reduction) -> Tensor:
    """Return the tokens' losses, their sum, or their mean over counted tokens."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counted_n.sum()


class _CrossEntropy(torch.autograd.Function):
    """Loss of every token, zero for ignored tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_nw: Tensor,
        target_n: Tensor,
        counted_n: Tensor,
        formula: TokenLoss,
        group: Group,
    ) -> Tensor:
        words = formula.words
        own = logits_nw[:, : words.count]
        dtype = torch.promote_types(logits_nw.dtype, torch.float32)
        here_n, column_n = formula.place(target_n, counted_n, words.start, words.stop)

        largest_n = _largest(own, dtype, group)
        shifted_nw = own - largest_n.unsqueeze(-1)
        picked_n = (
            logits_nw.gather(-1, column_n.unsqueeze(-1)).squeeze(-1) - largest_n
        ).masked_fill(~here_n, 0.0)
        sums = [picked_n, shifted_nw.sum(-1)] if formula.smoothing else [picked_n]
        sums.append(shifted_nw.exp_().sum(-1))  # last, because it overwrites the shifted logits
        picked_n, *sums, z_n = sum_over(torch.stack(sums), group)
        log_sum_n = largest_n + z_n.log()
        ctx.save_for_backward(logits_nw, log_sum_n, column_n, here_n, counted_n)
        ctx.formula = formula
        return formula.value(z_n.log(), picked_n, sums, log_sum_n).masked_fill(~counted_n, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        logits_nw, log_sum_n, column_n, here_n, counted_n = ctx.saved_tensors
        count = ctx.formula.words.count
        # Select, do not multiply by 0: the mean over no targets has an infinite gradient.
        grad_n = torch.where(counted_n, grad_n, 0.0)
        result_nw = torch.zeros_like(logits_nw, dtype=log_sum_n.dtype)
        if count:
            torch.sub(logits_nw[:, :count], log_sum_n.unsqueeze(-1), out=result_nw[:, :count])
            ctx.formula.into_gradient(result_nw[:, :count], grad_n, log_sum_n, here_n, column_n)
        return result_nw.to(logits_nw.dtype), None, None, None, None


def vocabulary_parallel_logsumexp(
    logits: Tensor, *, vocabulary: VocabularyRange, group: Group
) -> Tensor:
    """Compute ``logsumexp(-1)`` of the full logits, in value and gradient.

    Every rank gets the same result. Makes two all-reduces.

    Args:
        logits: Local logits (..., w), any floating dtype; not modified.
        vocabulary: Range of the local logits; columns beyond it are padding and are ignored.
        group: The tensor group.

    Returns:
        (...) of the logits' dtype; computed in at least float32.
    """
    return _LogSumExp.apply(logits, vocabulary, group)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: VocabularyRange, group: Group) -> Tensor:
        own = logits[..., : words.count]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = _largest(own, dtype, group)
        result = largest + sum_over((own - largest.unsqueeze(-1)).exp_().sum(-1), group).log()
        ctx.save_for_backward(logits, result)
        ctx.words = words
        return result.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, result = ctx.saved_tensors
        count = ctx.words.count
        gradient = torch.zeros_like(logits)
        gradient[..., :count] = (
            (logits[..., :count] - result.unsqueeze(-1)).exp_().mul_(grad.unsqueeze(-1))
        )
        return gradient, None, None


def _largest(own: Tensor, dtype: torch.dtype, group: Group) -> Tensor:
    """Return the largest logit of each token over all ranks; a rank may have no logits."""
    mine = (
        own.amax(-1).to(dtype)
        if own.size(-1)
        else own.new_full(own.shape[:-1], -torch.inf, dtype=dtype)
    )
    return sum_over(mine, group, op="max")


def sum_over(x: Tensor, group: Group, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum ``x`` over the group in place, or take the maximum."""
    return x if group.size == 1 else start_all_reduce(x, group=group, in_place=True, op=op).wait()


def check_targets(target_n: Tensor, counted_n: Tensor, words: VocabularyRange) -> None:
    """Raise an error that names an invalid target, if the check needs no synchronization.

    On an accelerator, or in a compiled graph, the look-up of the target's logit fails instead.
    """
    if target_n.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = target_n[counted_n & ((target_n < 0) | (target_n >= words.size))]
    if bad.numel():
        raise IndexError(
            f"Target {bad[0].item()} is out of bounds: the vocabulary has {words.size} tokens"
        )
