"""Reasons for a difference, from where it is, which axes alone have it, and what the step was seen to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_ptdp.nested import named_tensors
from lightning_ptdp.verification.batches import Captured
from lightning_ptdp.verification.compare import Difference
from lightning_ptdp.verification.record import Record
from lightning_ptdp.verification.report import Cause

__all__ = ["Evidence", "find_causes"]

_IGNORED = -100
_BATCH_AXES = ("m", "d", "de")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a difference.

    Attributes:
        first: The first difference.
        layout: Records of the layout's ranks.
        alone: Record of one process.
        differing: Axes that differ alone.
        first_of: Axes that differ alone -> their first difference, and the records.
        parts: Batches into which the layout splits that of one process.
        batches: Of one process.
        repeats: Whether one process gives the same twice.
        equal_without: Whether the first axis that differs is equal after a change: "statistics".
    """

    first: Difference
    layout: Sequence[Record]
    alone: Record
    differing: Sequence[str]
    first_of: Mapping[str, Difference]
    parts: int
    batches: Captured
    repeats: bool
    equal_without: Callable[[str], bool]


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the known causes that explain the difference, the likeliest first."""
    return list(_causes(evidence))


def _causes(evidence: Evidence) -> Iterator[Cause]:
    first, seen = evidence.first, evidence.alone.seen
    if first.kind == "random numbers":
        yield Cause(
            name="random numbers",
            text=f"{first}. Draw them from the batch or from a generator that is seeded by it, or in a hook before the step",
        )
    elif not evidence.repeats:
        yield Cause(
            name="random numbers",
            text="one process does not give the same result twice, so something draws numbers that no seed decides (os.urandom, an "
            f"unseeded generator, the time){_places(seen.random)}",
        )
    elif first.kind == "optimizer option":
        yield Cause(
            name="optimizer groups",
            text=f"{first}. configure_optimizers sees a part of the model on each rank; choose groups by the parameters' full names",
        )
    elif first.kind == "gradient" and first.point != "the backward":
        yield Cause(
            name="gradients changed by hand",
            text=f"{first.point} makes of equal gradients different ones: it sees a part of the whole gradient on each rank. Use the "
            "Trainer's gradient_clip_val, or the norm of trainer.strategy.compute_gradient_norm()",
        )
    elif first.kind == "weight":
        yield Cause(
            name="optimizer",
            text="equal gradients and options give different weights: the optimizer mixes the elements of a parameter, of which a rank "
            "holds a part. Use one that works element by element, or shard_optimizer=False and no tensor parallelism",
        )
    else:
        yield from _of_axes(evidence)


def _of_axes(evidence: Evidence) -> Iterator[Cause]:
    seen, differing = evidence.alone.seen, evidence.differing
    batch_axes = [axes for axes in differing if axes in _BATCH_AXES]
    if batch_axes:
        yield _of_batches(evidence, batch_axes[0])
    cut = [axes for axes in differing if axes in "tp"]
    if (cut or not differing) and seen.parameters:
        yield Cause(
            name="parameters in the step",
            text=f"training_step reads parameters{_places(seen.parameters)}, of which a rank holds a part. Leave weight decay to the "
            "optimizer, or compute a penalty inside of the module that owns the parameter",
        )
    if "c" in differing and seen.shifts:
        yield Cause(
            name="label shift",
            text=f"a sequence is shifted{_places(seen.shifts)}, which loses pairs at the borders of the context ranks' slices. Shift the "
            "labels in the dataset",
        )
    if not batch_axes and seen.random:
        yield Cause(name="random numbers", text=f"random numbers are drawn{_places(seen.random)}, and do not belong to a sample")
    if not batch_axes and seen.written and evidence.first.step > 0:
        yield _hidden_state(seen.written)


def _of_batches(evidence: Evidence, axes: str) -> Cause:
    first, seen = evidence.first_of[axes], evidence.alone.seen
    split = "microbatches" if axes == "m" else "replicas"
    if first.kind in ("logged value", "metric"):
        return Cause(
            name="logged values",
            text=f"'{first.name}' of a batch is not the mean over its {split}. Log a torchmetrics.Metric, or a mean over samples with "
            "batch_size and sync_dist=True",
        )
    label = _uneven_labels(evidence)
    if label and not evidence.alone.counted:
        return Cause(
            name="uneven labels",
            text=f"'{label}' has unequally many labels of {_IGNORED} in the {split}, whose losses count the same. Return "
            '{"loss": loss, "num_tokens": the number of labels} from training_step',
        )
    if first.kind == "loss" and first.step == 0 and math.isclose(_ratio(first), evidence.parts, rel_tol=1e-3):
        return Cause(
            name="sum over samples",
            text=f"the loss of one process is {evidence.parts} times that of the {split}: it grows with the batch. Use "
            'reduction="mean"',
        )
    if evidence.equal_without("statistics"):
        return Cause(
            name="buffers",
            text=f"BatchNorm takes its statistics over {split[:-1]}: with its running statistics both are equal. Use a normalization "
            "of each sample, such as GroupNorm, or accept it as under DDP",
        )
    if seen.written and (first.step > 0 or first.kind == "buffer"):
        return _hidden_state(seen.written)
    if seen.random:
        return Cause(name="random numbers", text=f"random numbers are drawn{_places(seen.random)}, and do not belong to a sample")
    return Cause(
        name="coupled samples",
        text=f"the loss of a batch is not the mean over its {split}: its samples see each other, as in-batch negatives and contrastive "
        f"losses do{_written(seen.written)}. Use num_microbatches=1, and gather what is compared over the replicas",
    )


def _hidden_state(written: set[str]) -> Cause:
    return Cause(
        name="hidden state",
        text=f"training_step writes {_some(written)}, once a microbatch and on each rank. Write it in on_train_batch_end",
    )


def _written(written: set[str]) -> str:
    return f", or share {_some(written)}, which the step writes" if written else ""


def _uneven_labels(evidence: Evidence) -> str:
    """Return the key of labels that are ignored unequally often in the parts of a batch; "" if there is none."""
    for batch in evidence.batches.train[0] if evidence.batches.train else ():
        for name, tensor in named_tensors(batch):
            if tensor.is_floating_point() or tensor.dim() < 1 or len(tensor) < evidence.parts:
                continue
            counts = {int((part == _IGNORED).sum()) for part in _parts(tensor, evidence.parts)}
            if len(counts) > 1:
                return name or "the batch"
    return ""


def _parts(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.tensor_split(count)


def _ratio(difference: Difference) -> float:
    """Return what one process has, divided by what the layout has."""
    found, _, expected = difference.text.removeprefix("is ").partition(" instead of ")
    return float(expected) / (float(found) or math.nan)


def _places(places: set[str]) -> str:
    return f" ({_some(places)})" if places else ""


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
