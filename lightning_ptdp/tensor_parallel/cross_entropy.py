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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ptdp.forward.fused import fused
from lightning_ptdp.tensor_parallel.collectives import start_all_reduce
from lightning_ptdp.tensor_parallel.tensor_shards import VocabularyRange
from lightning_ptdp.world.mesh import Group

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
    logits_nw = logits.reshape(-1, vocabulary.rows)
    target_n = target.reshape(-1)
    counted_n, target_n = checked_targets(target_n, ignore_index, vocabulary)
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

    def summary(
        self,
        logits_nk: Tensor,
        column_n: Tensor,
        log_sum_n: Tensor,
        picked_n: Tensor,
        total_n: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine some logits with the results of other words.

        Args:
            logits_nk: Logits of k words.
            column_n: Each token's target among them; outside of [0, k) if it is not there.
            log_sum_n, picked_n, total_n: The result for other words.

        Returns:
            The log-sum-exp, the targets' logits, and (with smoothing) the sum.
        """
        logits_nk = logits_nk.to(log_sum_n.dtype)
        return (
            log_sum_n.logaddexp(logits_nk.logsumexp(-1)),
            picked_n + _picked(logits_nk, column_n),
            total_n + logits_nk.sum(-1) if self.smoothing else total_n,
        )

    def sums(self, logits_nk: Tensor, column_n: Tensor, largest_n: Tensor) -> Tensor:
        """Sum the logits minus ``largest_n``; ``column_n`` as in ``summary``.

        Returns:
            Stacked (2 or 3, n): the targets' logits, the sum of the logits (only with smoothing),
            and the sum of the exponentials.
        """
        shifted_nk = logits_nk - largest_n.unsqueeze(-1)
        sums = [_picked(shifted_nk, column_n)]
        if self.smoothing:
            sums.append(shifted_nk.sum(-1))
        sums.append(shifted_nk.exp_().sum(-1))  # last, because it overwrites the shifted logits
        return torch.stack(sums)

    def gradient(
        self,
        logits_nk: Tensor,
        column_n: Tensor,
        log_sum_n: Tensor,
        grad_n: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the loss's gradient by some logits, in their dtype; ``column_n`` as above.

        It is computed in the dtype of ``log_sum_n``, in ``out`` if that is given: a tensor of that
        dtype, which may be the logits (at least one column).
        """
        gradient_nk = torch.sub(logits_nk, log_sum_n.unsqueeze(-1), out=out).exp_()
        if self.z_loss:
            gradient_nk.mul_((1 + 2 * self.z_loss * log_sum_n).unsqueeze(-1))
        if self.smoothing:
            gradient_nk.sub_(self.smoothing / self.words.size)
        gradient_nk.mul_(grad_n.unsqueeze(-1))
        share_n = grad_n * (self.smoothing - 1)
        if torch.compiler.is_compiling():  # a scatter would be a kernel of its own
            targets_nk = _one_hot(logits_nk, column_n)
            gradient_nk += torch.where(targets_nk, share_n.unsqueeze(-1), 0.0)
        else:
            inside_n, column_n = _inside(column_n, logits_nk.size(-1))
            share_n = share_n.masked_fill(~inside_n, 0.0)
            gradient_nk.scatter_add_(-1, column_n.unsqueeze(-1), share_n.unsqueeze(-1))
        return gradient_nk.to(logits_nk.dtype)


def _picked(logits_nk: Tensor, column_n: Tensor) -> Tensor:
    """Return each token's logit in its column, 0 if that is not there."""
    if torch.compiler.is_compiling():  # a sum joins the other sums over the logits
        return torch.where(_one_hot(logits_nk, column_n), logits_nk, 0.0).sum(-1)
    inside_n, column_n = _inside(column_n, logits_nk.size(-1))
    return logits_nk.gather(-1, column_n.unsqueeze(-1)).squeeze(-1).masked_fill(~inside_n, 0.0)


def _one_hot(logits_nk: Tensor, column_n: Tensor) -> Tensor:
    """Return a mask of each token's column."""
    return torch.arange(logits_nk.size(-1), device=logits_nk.device) == column_n.unsqueeze(-1)


def _inside(column_n: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the columns in [0, count), and the columns, with 0 for others."""
    inside_n = (column_n >= 0) & (column_n < count)
    return inside_n, torch.where(inside_n, column_n, 0)


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
        local = logits_nw[:, : words.count]
        dtype = torch.promote_types(logits_nw.dtype, torch.float32)
        largest_n = _largest(local, dtype, group)
        if words.count:
            add = fused(TokenLoss.sums, logits_nw.device)
            sums_n = add(formula, local, target_n - words.start, largest_n)
        else:
            sums_n = largest_n.new_zeros(3 if formula.smoothing else 2, len(largest_n))
        picked_n, *sums, z_n = sum_over(sums_n, group)
        log_sum_n = largest_n + z_n.log()
        ctx.save_for_backward(logits_nw, target_n, counted_n, log_sum_n)
        ctx.formula = formula
        return formula.value(z_n.log(), picked_n, sums, log_sum_n).masked_fill(~counted_n, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        logits_nw, target_n, counted_n, log_sum_n = ctx.saved_tensors
        words = ctx.formula.words
        # Select, do not multiply by 0: the mean over no targets has an infinite gradient.
        grad_n = torch.where(counted_n, grad_n, 0.0)
        if not words.count:
            return torch.zeros_like(logits_nw), None, None, None, None
        gradient_nw = fused(TokenLoss.gradient, logits_nw.device)(
            ctx.formula, logits_nw[:, : words.count], target_n - words.start, log_sum_n, grad_n
        )
        if padding := words.rows - words.count:
            gradient_nw = F.pad(gradient_nw, (0, padding))
        return gradient_nw, None, None, None, None


class LogSumExp(torch.autograd.Function):
    """``logsumexp(-1)`` of the full logits, in value and gradient.

    Every rank gets the same result. Makes two all-reduces. The input is the local logits (..., w),
    their range, beyond which columns are padding and ignored, and the tensor group. The result
    (...) has the logits' dtype. It is computed in at least float32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: VocabularyRange, group: Group) -> Tensor:
        local = logits[..., : words.count]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        largest = _largest(local, dtype, group)
        result = largest + sum_over((local - largest.unsqueeze(-1)).exp_().sum(-1), group).log()
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


def _largest(logits: Tensor, dtype: torch.dtype, group: Group) -> Tensor:
    """Return the largest logit of each token over all ranks; a rank may have no logits."""
    largest = (
        logits.amax(-1).to(dtype)
        if logits.size(-1)
        else logits.new_full(logits.shape[:-1], -torch.inf, dtype=dtype)
    )
    return sum_over(largest, group, op="max")


def sum_over(x: Tensor, group: Group, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum ``x`` over the group in place, or take the maximum."""
    return x if group.size == 1 else start_all_reduce(x, group=group, in_place=True, op=op).wait()


def checked_targets(
    target_n: Tensor, ignore_index: int, words: VocabularyRange
) -> tuple[Tensor, Tensor]:
    """Refuse an invalid target; on an accelerator, without a synchronization.

    Returns:
        A mask of the targets that are counted, and the targets, -1 where they are not.

    Raises:
        IndexError: On a CPU. An accelerator reports it later, as a failed assertion of ``gather``.
            A compiled graph does not notice.
    """
    counted_n = target_n != ignore_index
    if torch.compiler.is_compiling():
        pass
    elif target_n.device.type != "cpu":
        target_n.new_zeros(()).expand(words.size).gather(0, target_n.masked_fill(~counted_n, 0))
    elif (invalid := target_n[counted_n & ((target_n < 0) | (target_n >= words.size))]).numel():
        raise IndexError(
            f"Target {invalid[0].item()} is out of bounds: the vocabulary has {words.size} tokens"
        )
    return counted_n, target_n.masked_fill(~counted_n, -1)
