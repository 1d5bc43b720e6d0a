"""Detection of losses whose value depends on microbatches, replicas, or slices of the sequence.

Each function reads the last operations of the loss from its graph, and warns once of a finding. It
computes nothing; some read numbers from the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lightning_ptdp.base.nested import Nested, iterate_tensors
from lightning_ptdp.engine.loss_graph import (
    BETWEEN_NUMBERS,
    EXTREMES,
    SCALED,
    THROUGH,
    compares_samples,
    ends,
    function_of,
    is_curved,
    is_extreme,
    is_sum,
    numbers,
    summed_shape,
)

PAGE = 'docs/microbatches.md, "What a microbatch changes"'
_MEAN = 1  # by which torch's losses store their reduction
_DIVISORS = MappingProxyType(
    {
        "DivBackward0": "_saved_other",
        "NllLossBackward0": "_saved_total_weight",
        "NllLoss2DBackward0": "_saved_total_weight",
    }
)
_ROUNDING = 1e-5
IGNORED = -100
"""Label that the losses of torch and transformers ignore."""


def warn_of_loss(loss: Tensor, *, samples: int, replicas: bool, compares: bool = True) -> None:
    """Warn of a loss that is a sum or an extreme, or that compares samples with each other.

    Args:
        loss: Loss of one microbatch, or of one replica's batch.
        samples: Number of its samples; 0: unknown.
        replicas: Whether only replicas divide the batch.
        compares: Whether to look for a comparison of samples.
    """
    part, parts = ("replica", "replicas") if replicas else ("microbatch", "microbatches")
    if any(is_sum(node, samples) for node in ends(loss.grad_fn, THROUGH)):
        _warn_of_sum(part, parts)
    for node in ends(loss.grad_fn, BETWEEN_NUMBERS):
        if is_extreme(node, samples):
            warnings.warn(
                f"the loss is the {EXTREMES[function_of(node)]} over one {part}, but {parts} are "
                "averaged, and one process computes it over the whole batch. Use "
                f"{'one replica' if replicas else 'num_microbatches=1'} ({PAGE})",
                stacklevel=2,
            )
            break
    curve = next((node for node in numbers(loss) if is_curved(node, samples)), None)
    if curve is not None:
        warnings.warn(
            f"the loss contains '{function_of(curve).lower()}' of a number that depends on all samples "
            f"of one {part}, as Dice, RMSE and correlations do, but {parts} are averaged, and one "
            "process computes it over the whole batch. Compute it for each sample and return the "
            f"mean, or use {'one replica' if replicas else 'num_microbatches=1'} ({PAGE})",
            stacklevel=2,
        )
    if compares and any(compares_samples(node) for node in ends(loss.grad_fn, SCALED)):
        remedy = "Use num_microbatches=1 or a larger micro_batch_size"
        if replicas:
            remedy = "Compare with samples gathered from all replicas"
        warnings.warn(
            f"the loss compares samples within their {part} (contrastive, in-batch negatives), "
            f"which has fewer samples than the batch. {remedy} ({PAGE})",
            stacklevel=2,
        )


def _warn_of_sum(part: str, parts: str) -> None:
    warnings.warn(
        f"the loss is a sum (such as reduction='sum') over one {part}, but {parts} are "
        "averaged. If the sum grows with the batch, the loss and its gradient are smaller "
        f"than in one process by the number of {parts}. Return a mean, or a dictionary "
        f"with the mean as 'loss' and its 'num_tokens' ({PAGE})",
        stacklevel=3,
    )


Sums = list[tuple[int, tuple[float, ...]]]
"""Number of elements of each sum in a loss, and the numbers that divide it."""


def divided_sums(loss: Tensor, samples: int) -> Sums:
    """Return the sums in a loss that are divided by numbers."""
    return [
        (summed_shape(node).numel(), tuple(1 / abs(factor) for factor in factors))
        for node, factors in _scaled_sums(loss.grad_fn, (), samples)
        if factors and all(factors)
    ]


def warn_of_constants(sums: Sequence[Sums], *, samples: int, total: int) -> None:
    """Warn of sums that are divided by a number of samples or values of the whole batch.

    Args:
        sums: ``divided_sums`` of the microbatches.
        samples: Number of samples of each microbatch.
        total: Number of samples of the batch.
    """
    if any(one != sums[0] for one in sums):
        return  # a number that the step counts
    for size, divisors in sums[0]:
        product = math.prod(divisors)
        of_batch = (total, size * len(sums))
        of_part = (samples, size)
        if _is_near(product, of_batch) and not any(
            _is_near(divisor, of_part) for divisor in (product, *divisors)
        ):
            _warn_of_sum("microbatch", "microbatches")
            return


def _is_near(number: float, candidates: Iterable[int]) -> bool:
    return any(math.isclose(number, one, rel_tol=_ROUNDING) for one in candidates)


def warn_of_slices(loss: Tensor, *, samples: int, tokens: int, alone: bool) -> None:
    """Warn of a sum over the tokens of a slice that is not divided by a number of tokens.

    Args:
        loss: Mean loss of a slice of the sequence.
        samples: Number of samples of the microbatch.
        tokens: Number of tokens of the slice.
        alone: Whether only context ranks divide the batch; otherwise ``warn_of_loss`` names sums
            without factors.
    """
    for node, factors in _scaled_sums(loss.grad_fn, (), samples):
        shape = summed_shape(node)
        is_slice = shape[:2] == (samples, tokens) or shape[:1] == (samples * tokens,)
        if not factors:
            is_slice = alone and (is_slice or shape[:1] != (samples,))
        most = shape[0] if "NllLoss" in node.name() else math.prod(shape)
        is_mean = any(factor and samples < 1 / abs(factor) <= most for factor in factors)
        if is_slice and not is_mean:
            warnings.warn(
                "the loss contains a sum over the tokens of a slice of the sequence, but slices "
                "are averaged, so the sum is smaller than in one process by the number of slices. "
                "Use the mean over the tokens, or context_parallel_size=1",
                stacklevel=2,
            )
            return


def _scaled_sums(
    node: Any, factors: tuple[float, ...], samples: int
) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """Yield the sums in a loss, each with the numbers by which it is multiplied."""
    if node is None:
        return
    if is_sum(node, samples):
        yield node, factors
    name = node.name()
    before = [one for one, _ in node.next_functions]
    if name in ("DivBackward0", "MulBackward0"):
        other = node._saved_other
        if other is None or other.numel() != 1:
            return
        factor = float(other.detach())
        if name == "DivBackward0":
            factor = 1 / factor if factor else 0.0
        factors += (factor,)
        before = before[:1]
    elif name not in THROUGH | {"NegBackward0", "SubBackward0"}:
        return
    for one in before:
        yield from _scaled_sums(one, factors, samples)


def divisor_of(loss: Tensor, batch: Nested) -> Tensor | None:
    """Return the number by which the loss was divided last, such as the sum of a mask.

    A cross-entropy is divided by the weight of its labels. It is left out if it has class weights,
    or if ``batch`` has labels -100, whose numbers are compared elsewhere. The result is None if
    there is no such division.
    """
    nodes = [
        node for node in ends(loss.grad_fn, THROUGH | {"MeanBackward0"}) if node.name() in _DIVISORS
    ]
    if len(nodes) != 1:
        return None
    (node,) = nodes
    divisor: Tensor = getattr(node, _DIVISORS[node.name()])
    if getattr(node, "_saved_weight", None) is not None:
        return None
    ignores = (
        hasattr(node, "_saved_ignore_index")
        and _ignored_label(node) == IGNORED
        and any(
            bool((tensor.long() == IGNORED).any())
            for tensor in iterate_tensors(batch)
            if not tensor.is_floating_point()
        )
    )
    return None if divisor.dim() or ignores else divisor.detach()


def _ignored_label(node: Any) -> int:
    """Return the label that a cross-entropy ignores; torch stores it without its sign."""
    index: int = node._saved_ignore_index
    return index - 2**64 if index >= 2**63 else index


def warn_of_counted(
    loss: Tensor,
    labels: Tensor | int | None = None,
    *,
    samples: int | None = None,
    slice_samples: int = 0,
    divides_samples: bool = True,
) -> None:
    """Warn of a cross-entropy whose mean has another weight than the number of its labels.

    Args:
        loss: Loss of a microbatch, of one replica's batch, or of a slice of its sequences.
        samples: Number of samples of a replica's batch; None: do not compare their labels.
        labels: Number of labels by which the loss is weighted; None: those that are not ignored.
            It is read from the device.
        slice_samples: Number of samples of which the batch has slices. All slices have the same
            labels of whole samples.
        divides_samples: False if the losses of all slices are those of the whole batch.
    """
    nodes = [node for node in ends(loss.grad_fn, THROUGH) if "NllLoss" in node.name()]
    if len(nodes) != 1 or nodes[0]._saved_reduction != _MEAN:
        return
    (node,) = nodes
    counted = float(node._saved_total_weight)
    weight = node._saved_weight
    target = node._saved_target
    if target.numel() == slice_samples:
        labels = None
        if not divides_samples:
            return
    ignored = _ignored_label(node)
    learned = target[target != ignored]
    labels = learned.numel() if labels is None else int(labels)
    if ignored != IGNORED and samples and target.numel() % samples == 0:
        counts = (target != ignored).reshape(samples, -1).sum(1)
        if len(counts.unique()) > 1:
            warnings.warn(
                f"samples have different numbers of labels other than {ignored}, so the means of "
                "the replicas have the same weight for different numbers of labels. Return "
                f"{{'loss': loss, 'num_tokens': (labels != {ignored}).sum()}} from training_step "
                f"({PAGE})",
                stacklevel=2,
            )
    if (
        abs(counted - labels) > _ROUNDING * counted
        if weight is None
        else len(weight[learned].unique()) > 1
    ):
        warnings.warn(
            f"the loss is a mean over labels with a total weight of {counted:g} (class weights, "
            "labels that the step ignores), but the parts of the batch are averaged as if it were "
            f"{labels}. Return a dictionary with the mean as 'loss' and the total weight as "
            f"'num_tokens' ({PAGE})",
            stacklevel=2,
        )


def warn_of_divisors(divisors: Sequence[Tensor | None]) -> None:
    """Warn if equally large microbatches take means over different numbers of values.

    The divisors are read from the device.
    """
    values = [float(divisor) for divisor in divisors if divisor is not None]
    if len(values) < len(divisors):
        return
    if max(values) - min(values) > _ROUNDING * max(map(abs, values)):
        warnings.warn(
            "the loss is divided by a number that differs between microbatches, such as the sum of "
            "a mask, of class weights, or of labels that are not ignored "
            f"({min(values):g} to {max(values):g}), but all microbatches have the same weight. "
            "Return a dictionary with the mean as 'loss' and this number as 'num_tokens' "
            f"({PAGE})",
            stacklevel=2,
        )
