"""Reasons for a difference, from where it is, which axes alone have it, and what the step was seen to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_ptdp.nested import named_tensors
from lightning_ptdp.verification.batches import Captured
from lightning_ptdp.verification.compare import Difference
from lightning_ptdp.verification.record import Record
from lightning_ptdp.verification.report import Cause

__all__ = ["Evidence", "find_causes"]

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Facts about a difference from which causes are derived.

    Attributes:
        first: The first difference.
        alone: Record of one process.
        first_of: Axes that differ alone -> their first difference.
        losses: Of the microbatches of the first step, in one process with as many as the layout has in all.
        batches: Of one process.
        repeats: Whether one process gives the same twice.
    """

    first: Difference
    alone: Record
    first_of: Mapping[str, Difference]
    losses: Sequence[float]
    batches: Captured
    repeats: bool


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the known causes that explain the difference, the likeliest first."""
    return list(_causes(evidence))


def _causes(evidence: Evidence) -> Iterator[Cause]:
    first, seen = evidence.first, evidence.alone.seen
    if first.kind == "random numbers":
        yield Cause(
            name="random numbers",
            text=f"{first}. Draw them in on_after_batch_transfer, or in the dataset, and put them into the batch",
        )
    elif not evidence.repeats:
        yield Cause(
            name="random numbers",
            text="one process does not give the same twice, so something draws numbers that no seed decides (os.urandom, a generator "
            f"without a seed, the time){_some(seen.random)}",
        )
    elif first.kind == "optimizer option":
        yield Cause(
            name="optimizer groups",
            text=f"{first}. configure_optimizers depends on the ranks, or on a part of the model; choose groups by full names",
        )
    elif first.kind == "gradient" and first.point != "the backward":
        yield Cause(
            name="gradients changed by hand",
            text=f"{first.point} makes different gradients of equal ones: on each rank it sees a part of them. Use the Trainer's "
            "gradient_clip_val, or trainer.strategy.compute_gradient_norm()",
        )
    elif first.kind == "weight":
        yield Cause(
            name="optimizer",
            text="equal gradients and options give different weights: the optimizer mixes the elements of a parameter, of which a rank "
            "holds a part. Use one that works element by element, or do not split parameters",
        )
    else:
        yield from _of_axes(evidence)


def _of_axes(evidence: Evidence) -> Iterator[Cause]:
    seen, differing = evidence.alone.seen, evidence.first_of
    batch = next((axes for axes in differing if axes[0] in "md"), None)
    if batch is not None:
        yield _of_batches(evidence, batch)
    if seen.parameters and (not differing or {"t", "p"} & differing.keys()):
        yield Cause(
            name="parameters in the step",
            text=f"training_step reads parameters, of which a rank holds a part{_some(seen.parameters)}. Leave weight decay to the "
            "optimizer, or compute a penalty in the module that owns the parameter",
        )
    if seen.shifts and "c" in differing:
        yield Cause(
            name="label shift",
            text=f"a sequence is shifted{_some(seen.shifts)}, which loses pairs at the borders of the ranks' slices. Shift the labels in "
            "the dataset",
        )
    if batch is None and seen.random:
        yield Cause(name="random numbers", text=f"they are drawn in the step{_some(seen.random)}, and do not belong to a sample")
    if batch is None and seen.written and evidence.first.step > 0:
        yield _hidden_state(seen.written)


def _of_batches(evidence: Evidence, axes: str) -> Cause:
    first, seen = evidence.first_of[axes], evidence.alone.seen
    part = "microbatch" if axes == "m" else "replica"
    if first.kind in ("logged value", "metric"):
        return Cause(
            name="logged values",
            text=f"'{first.name}' of a batch is not the mean over each {part}. Log a torchmetrics.Metric, or a mean over samples with "
            "batch_size and sync_dist=True",
        )
    losses, expected = evidence.losses, evidence.alone.steps[0].losses[-1][0]
    if len(losses) > 1 and math.isclose(sum(losses), expected, rel_tol=1e-3):
        return Cause(
            name="sum over samples", text=f"the loss is the sum of those of each {part}. Use a mean, such as reduction='mean'"
        )
    if key := _uneven_labels(evidence, expected):
        return Cause(
            name="uneven labels",
            text=f"'{key}' has unequally many labels of {_IGNORED} in each {part}, whose losses count the same. Return "
            '{"loss": loss, "num_tokens": number of labels} from training_step',
        )
    if seen.written and first.step > 0:
        return _hidden_state(seen.written)
    statistics = {name for name in seen.written if "num_batches_tracked" in name or "running_" in name}
    if statistics:
        return Cause(
            name="buffers",
            text=f"BatchNorm has statistics of each {part}{_some(statistics)}. Use a normalization of each sample, such as GroupNorm",
        )
    if seen.random:
        return Cause(name="random numbers", text=f"they are drawn in the step{_some(seen.random)}, and do not belong to a sample")
    return Cause(
        name="coupled samples",
        text=f"the loss of a batch is not the mean over each {part}: samples see each other, as in contrastive losses"
        f"{_some(seen.written)}. Use num_microbatches=1, and gather what is compared over the replicas",
    )


def _hidden_state(written: set[str]) -> Cause:
    return Cause(
        name="hidden state",
        text=f"training_step writes state once a microbatch and on each rank{_some(written)}. Write it in on_train_batch_end",
    )


def _uneven_labels(evidence: Evidence, expected: float) -> str:
    """Return the key of the labels by whose number the microbatches' losses give the loss of one process; "" if there is none."""
    losses, named = evidence.losses, named_tensors(evidence.batches.train[0][len(evidence.alone.steps[0].losses) - 1])
    for name, tensor in named:
        if tensor.is_floating_point() or tensor.dim() < 1 or not (tensor == _IGNORED).any():
            continue
        for labels in (tensor, tensor[..., 1:]):
            counts = [int((part != _IGNORED).sum()) for part in labels.tensor_split(len(losses) or 1)]
            mean = sum(loss * count for loss, count in zip(losses, counts, strict=False)) / max(sum(counts), 1)
            if len(set(counts)) > 1 and math.isclose(mean, expected, rel_tol=1e-3):
                return name or "the batch"
    return ""


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f" ({shown}{', ...' if len(names) > 3 else ''})" if names else ""
