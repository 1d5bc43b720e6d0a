"""Result of a verification: a table, a plot, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.base.output import columns
from lightning_ptdp.engine.rank_agreement import describe_uneven, is_uneven, label_spread
from lightning_ptdp.verification.compare import KINDS, Difference
from lightning_ptdp.verification.record import Record

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of a difference.

    Attributes:
        name: "random numbers", "parameters in the step", "gradients changed by hand", "optimizer
            groups", "optimizer", "buffers", "label shift", "uneven labels", "sum over samples",
            "coupled samples", "logged values" or "hidden state".
        text: Observation and remedy.
    """

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Comparison of a layout with one process.

    Attributes:
        layout: The layout in short form.
        steps: Number of optimizer steps.
        compared: All compared values, in the order of the training.
        axes: (axes, result) of smaller layouts, which are trained only after a difference.
        causes: Causes of a difference, the most likely first.
        notes: Deviations of the comparison from the request.
    """

    layout: str
    steps: int
    compared: Sequence[Difference]
    axes: Sequence[tuple[str, str]] = ()
    causes: Sequence[Cause] = ()
    notes: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        """Return True if no value differs by more than rounding."""
        return not self.differences

    @property
    def differences(self) -> list[Difference]:
        """Return the values that differ, in the order of the training."""
        return [diff for diff in self.compared if diff.differs]

    def __str__(self) -> str:
        differences = self.differences
        sections = [
            [
                f"{self.layout} is {'DIFFERENT from' if differences else 'equal to'} one process "
                f"in {self.steps} steps"
            ],
            [self._table()],
            [f"difference {number}: {diff}" for number, diff in enumerate(differences[:_SHOWN], 1)],
            [f"only {axes}: {result}" for axes, result in self.axes],
            [f"cause: {cause.name}: {cause.text}" for cause in self.causes],
            [f"note: {note}" for note in self.notes],
        ]
        if len(differences) > _SHOWN:
            sections[2].append(f"and {len(differences) - _SHOWN} more")
        if differences and not self.causes:
            sections[4].append("cause: unknown")
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _table(self) -> str:
        rows = [("", "compared", "largest error", "tolerance", "where")]
        for kind in KINDS:
            values = [diff for diff in self.compared if diff.kind == kind]
            if values:
                worst = max(values, key=lambda diff: diff.excess)
                location = f"step {worst.step} {worst.name}" if worst.error else ""
                tolerance = f"{worst.tolerance:.0e}" if worst.tolerance else "exact"
                rows.append((kind, str(len(values)), f"{worst.error:.1e}", tolerance, location))
        return columns(rows, words=(0, 4))

    def draw(self, path: str | Path) -> None:
        """Write a plot (PNG) of the largest error of each kind in each step.

        Errors are shown as multiples of their tolerances.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.add_subplot(
            ylabel="error / tolerance", yscale="log", title=f"{self}".partition("\n")[0]
        )
        for kind in KINDS:
            points = [
                diff for diff in self.compared if diff.kind == kind and 0 < diff.error < math.inf
            ]
            axes.plot(
                [diff.step for diff in points],
                [diff.excess for diff in points],
                "o",
                markersize=3,
                label=kind,
            )
        axes.axhline(1.0, color="0.4", linestyle="--")
        figure.legend(loc="outside right upper")
        figure.savefig(path)


# ---- Causes of a difference between a layout and one process -------------------------------------
#
# A cause follows from the place of the difference, from the axes that show it alone, and from the
# observed actions of the training step.


_TEXTS = {
    "random numbers": "the step draws numbers that do not depend on a seed (os.urandom, a "
    "generator without a seed, the time), or not on the sample{seen}. Draw "
    "them in the dataset, and put them into the batch",
    "optimizer groups": "configure_optimizers depends on the rank, or on a part of the model. "
    "Choose groups by full names",
    "gradients changed by hand": "a hook changes equal gradients differently, because each "
    "rank has only a part of them{seen}. Use the Trainer's "
    "gradient_clip_val, or trainer.strategy.compute_gradient_norm()",
    "optimizer": "equal gradients and options lead to different weights, because the "
    "optimizer combines elements of a parameter and a rank has only a part of "
    "it. Use an elementwise optimizer, or do not split parameters",
    "parameters in the step": "training_step reads parameters, but a rank has only a part of "
    "them{seen}. Use the weight decay of the optimizer, or compute "
    "a penalty in the module that owns the parameter",
    "label shift": "the step combines neighbours in a sequence, as in a shift of labels, and "
    "loses pairs at the borders of the ranks' slices. Shift the labels in the dataset",
    "logged values": "the values of a batch are not the means over its parts{seen}. Log a "
    "torchmetrics.Metric, or a mean over samples with batch_size and sync_dist=True",
    "sum over samples": "the loss is the sum over its microbatches or replicas. Use a mean, "
    "such as reduction='mean'",
    "hidden state": "training_step writes state once per microbatch and on each rank{seen}. "
    "Write it in on_train_batch_end",
    "buffers": "BatchNorm computes statistics of each microbatch or replica{seen}. Use a "
    "normalization of each sample, such as GroupNorm",
    "coupled samples": "the loss of a batch is not the mean over its microbatches or "
    "replicas, because it compares samples, as contrastive losses "
    "do{seen}. Use num_microbatches=1, and gather the compared values over "
    "the replicas",
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Facts about a difference from which causes are derived.

    Attributes:
        first: The first difference.
        first_of: Axes that differ alone -> their first difference.
        alone: Record of one process.
        losses: Losses of the first step's microbatches, in one process with as many microbatches as
            the full layout has.
        batch: The last batch of the first differing step in one process.
        repeats: True if two runs of one process give the same values.
    """

    first: Difference
    first_of: Mapping[str, Difference]
    alone: Record
    losses: Sequence[float]
    batch: Nested
    repeats: bool


def find_causes(evidence: Evidence) -> Iterator[Cause]:
    """Yield the known causes that explain the difference, the most likely first."""
    first = evidence.first
    seen = evidence.alone
    differing = evidence.first_of
    if first.kind == "random numbers" or not evidence.repeats:
        yield _cause("random numbers", seen.random)
    elif first.kind == "optimizer option":
        yield _cause("optimizer groups")
    elif first.kind == "gradient" and first.point != "the backward":
        yield _cause("gradients changed by hand", [first.point])
    elif first.kind == "weight":
        yield _cause("optimizer")
    else:
        axes = next((axes for axes in differing if axes[0] in "md"), None)
        if axes is not None:
            yield _of_batches(evidence, differing[axes])
        if seen.parameters and (not differing or {"t", "p"} & differing.keys()):
            yield _cause("parameters in the step", seen.parameters)
        if "c" in differing:
            yield _cause("label shift")
        if axes is None:
            if seen.random:
                yield _cause("random numbers", seen.random)
            if seen.written and first.step > 0:
                yield _cause("hidden state", seen.written)


def _cause(name: str, names: Collection[str] = ()) -> Cause:
    shown = [*sorted(names)[:3], "..."][: len(names)]
    return Cause(
        name=name, text=_TEXTS[name].format(seen=f" ({', '.join(shown)})" if shown else "")
    )


def _of_batches(evidence: Evidence, first: Difference) -> Cause:
    seen = evidence.alone
    losses = evidence.losses
    if first.kind in ("logged value", "metric"):
        return _cause("logged values", [first.name])
    expected = seen.numbers["loss", 0, ""][""][-1][0]
    if len(losses) > 1 and math.isclose(sum(losses), expected, rel_tol=1e-3):
        return _cause("sum over samples")
    if seen.written and first.step > 0:
        return _cause("hidden state", seen.written)
    parts = len(losses) or 1
    size = batch_size(evidence.batch)
    spread = label_spread(evidence.batch, [size // parts] * parts, device=torch.device("cpu"))
    if not seen.counted and is_uneven(*spread.tolist()):
        return Cause(name="uneven labels", text=describe_uneven(evidence.batch, size))
    if statistics := {name for name in seen.written if "num_batches_tracked" in name}:
        return _cause("buffers", statistics)
    if seen.random:
        return _cause("random numbers", seen.random)
    return _cause("coupled samples", seen.written)
