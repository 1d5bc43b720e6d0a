"""Result of a verification: a table, a plot, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.base.columns import columns
from lightning_ptdp.verification.compare import KINDS, Difference

__all__ = ["Cause", "Report"]

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
        return [one for one in self.compared if one.differs]

    def __str__(self) -> str:
        found = self.differences
        sections = [
            [
                f"{self.layout} is {'DIFFERENT from' if found else 'equal to'} one process in "
                f"{self.steps} steps"
            ],
            [self._table()],
            [f"difference {number}: {one}" for number, one in enumerate(found[:_SHOWN], 1)],
            [f"only {axes}: {result}" for axes, result in self.axes],
            [f"cause: {cause.name}: {cause.text}" for cause in self.causes],
            [f"note: {note}" for note in self.notes],
        ]
        if len(found) > _SHOWN:
            sections[2].append(f"and {len(found) - _SHOWN} more")
        if found and not self.causes:
            sections[4].append("cause: unknown")
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _table(self) -> str:
        rows = [("", "compared", "largest error", "tolerance", "where")]
        for kind in KINDS:
            values = [one for one in self.compared if one.kind == kind]
            if values:
                worst = max(values, key=lambda one: one.excess)
                where = f"step {worst.step} {worst.name}" if worst.error else ""
                tolerance = f"{worst.tolerance:.0e}" if worst.tolerance else "exact"
                rows.append((kind, str(len(values)), f"{worst.error:.1e}", tolerance, where))
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
            shown = [one for one in self.compared if one.kind == kind and 0 < one.error < math.inf]
            axes.plot(
                [one.step for one in shown],
                [one.excess for one in shown],
                "o",
                markersize=3,
                label=kind,
            )
        axes.axhline(1.0, color="0.4", linestyle="--")
        figure.legend(loc="outside right upper")
        figure.savefig(path)
