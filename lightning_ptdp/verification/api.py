"""``verify``: comparison of training in a layout with training in one process.

If they differ, smaller layouts are trained to find the axis that causes the difference.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.base.option_types import check_integer
from lightning_ptdp.verification.compare import Comparison, Difference
from lightning_ptdp.verification.record import Captured, Record, combine
from lightning_ptdp.verification.report import Evidence, Report, find_causes
from lightning_ptdp.verification.training import (
    Case,
    Subject,
    VerificationError,
    smaller_layouts,
)

_DOUBLE_EPS = 1e-10
_HALF_EPS = 1e-4
"""Machine epsilons between those of float64, float32 and the half-precision dtypes."""
_FAR = 1e3
"""A difference of more than this number of tolerances is not rounding."""


def verify(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    strategy: Any,
    steps: int = 3,
    blocks: int | None = None,
    limit_s: float = 600.0,
    **trainer: Any,
) -> Report:
    """Train a module for some steps in a layout and in one process, and compare everything.

    Both runs begin with the same values and read the same samples: one process reads the batches of
    all replicas at once. The runs are forked processes. The caller's module,
    strategy and data do not change, and nothing is written to the Trainer's folders.

    Args:
        module: A LightningModule.
        train_dataloaders: Training data, or a data module, as for ``Trainer.fit``.
        val_dataloaders: Validation data, if there is no data module.
        datamodule: A data module with all data.
        strategy: A ``PTDPStrategy`` with the layout.
        steps: Number of optimizer steps.
        blocks: Number of blocks to keep of each repeated container; default: all, or as many as one
            process can hold.
        limit_s: Time limit of each training, in seconds.
        trainer: Arguments of Lightning's Trainer, such as devices, precision, callbacks and
            gradient_clip_val. devices defaults to the smallest number that the layout needs.

    Raises:
        ValueError: The degrees do not fit, or cannot be verified on this machine.
        VerificationError: A training failed, was refused, or exceeded its time limit.
    """
    if unknown := trainer.keys() - signature(strategy._names.Trainer).parameters.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: not an option of verify or of the Trainer")
    config = strategy.config
    devices = trainer.get("devices") or config.smallest_world_size
    check_integer("steps", steps)
    if blocks is not None:
        check_integer("blocks", blocks)
    if not limit_s > 0:
        raise ValueError(f"limit_s={limit_s} must be greater than 0")
    if trainer.get("num_nodes", 1) != 1:
        raise ValueError(
            f"num_nodes={trainer['num_nodes']} is not supported, because verify starts "
            "processes on this machine only. Use num_nodes=1"
        )
    if torch.cuda.is_initialized():
        raise ValueError(
            "verify forks processes, but CUDA is already in use, and forked processes cannot "
            "use it. Call verify before anything uses the GPU"
        )
    if not isinstance(devices, int):
        raise ValueError(f"devices={devices!r} must be a number of processes")
    if trainer.get("max_steps", -1) > 0:
        steps = min(steps, trainer["max_steps"])
    case_config = replace(
        config, keyed_dropout=True, compile="none", compile_options=None, verify=None
    )
    case = Case(name="the layout", config=case_config, devices=devices, blocks=blocks)
    _ = case.layout  # Raises if the degrees do not fit.
    data = (train_dataloaders, val_dataloaders, datamodule)
    if hasattr(train_dataloaders, "train_dataloader"):
        data = (None, None, train_dataloaders)
    with tempfile.TemporaryDirectory(prefix="ptdp-verify-") as folder:
        subject = Subject(
            module=module,
            strategy=strategy,
            data=data,
            steps=steps,
            trainer=trainer,
            folder=Path(folder),
            limit_s=limit_s,
        )
        return _Verification(subject, case).report()


@dataclass
class _Verification:
    """The training runs of one verification.

    Attributes:
        subject: Module, data and Trainer options to verify.
        case: The layout. After its first training it replays the captured batches.
        combined: Batches of one process.
        notes: Notes of the report.
    """

    subject: Subject
    case: Case
    combined: Captured = field(default_factory=Captured)
    notes: list[str] = field(default_factory=list)

    def report(self) -> Report:
        """Train, compare and explain."""
        if self.subject.strategy.config.compile != "none":
            self.notes.append("blocks are not compiled in the comparison")
        self._fit_into_memory()
        ranks = self._train_from_loaders()
        if places := sorted({place for rank in ranks for place in rank.random}):
            self.notes.append(
                "dropout is disabled, and random numbers are constants that are equal for all "
                f"samples ({', '.join(places[:3])})"
            )
            self.case = replace(self.case, frozen=True)
            ranks = self.subject.train(self.case)
        trained = self._in_double(Comparison(ranks, self._one_process(self.case)))
        compared = trained.compared
        # The logged values of a step are those of its last batch only.
        if self.combined.parts > 1:
            logged = {diff.name for diff in compared if diff.kind == "logged value"}
            compared = [diff for diff in compared if diff.name not in logged]
        report = Report(
            layout=self.case.layout.describe(),
            steps=trained.expected.steps,
            compared=compared,
            notes=self.notes,
        )
        return report if report.equal else self._explained(report, trained)

    # ---- trainings -------------------------------------------------------------------------------

    def _fit_into_memory(self) -> None:
        blocks = self.case.blocks
        config = self.case.config
        if blocks is None and not self.subject.fits_one_process():
            blocks = max(config.num_stages, 2)
        if blocks is not None:
            self.notes.append(f"the compared model has {blocks} blocks in each repeated container")
            self.case = replace(self.case, blocks=blocks, config=replace(config, partition=None))

    def _train_from_loaders(self) -> list[Record]:
        try:
            ranks = self.subject.train(self.case)
        except VerificationError as error:
            if "KeyedDropoutError" not in str(error):
                raise
            self.notes.append(
                "dropout is disabled, because keyed_dropout, which is equal in every layout, "
                "cannot be used"
            )
            self.case = replace(
                self.case, config=replace(self.case.config, keyed_dropout=False), frozen=True
            )
            ranks = self.subject.train(self.case)
        if not ranks[0].steps:
            raise VerificationError("the layout ran no step. Check that there are training batches")
        replicas = {rank.replica: rank.batches for rank in ranks}
        batches = [replicas[number] for number in sorted(replicas)]
        try:
            self.combined = combine(batches, joined=True)
        except (ValueError, RuntimeError) as error:
            self.combined = combine(batches, joined=False)
            self.notes.append(
                "one process accumulates gradients over the replicas' batches, and logged "
                f"values are not compared: {error}"
            )
        self.case = replace(self.case, batches=batches)
        return ranks

    def _one_process(self, case: Case) -> Record:
        return self.subject.train(case.only("", 1, [self.combined]))[0]

    def _in_double(self, trained: Comparison) -> Comparison:
        """Repeat the training in float64 if rounding may cause or hide differences."""
        eps = trained.expected.eps
        differences = trained.differences
        near = bool(differences) and all(diff.excess <= _FAR for diff in differences)
        if not near and eps < _HALF_EPS:
            return trained
        if eps < _DOUBLE_EPS:
            return self._beyond_noise(trained)
        case = replace(self.case, precision="64-true")
        try:
            double = Comparison(self.subject.train(case), self._one_process(case))
        except VerificationError as error:
            self.notes.append(
                f"float64 was not possible ({error}), so errors below the tolerances may be missed"
            )
            return trained
        if double.differences:
            self.case = case
            double = self._beyond_noise(double)
        if double.differences:
            self.notes.append("compared in float64")
            return double
        self.notes.append(
            "equal in float64; in the requested precision, the rounding errors of one process "
            "are allowed"
        )
        return trained.allowing(double.expected)

    def _beyond_noise(self, double: Comparison) -> Comparison:
        """Allow differences that float32 rounding causes in one process.

        Modules in float64 often compute parts in float32.
        """
        return double.allowing(self._one_process(replace(self.case, disturbed=True)))

    # ---- reasons ---------------------------------------------------------------------------------

    def _explained(self, report: Report, trained: Comparison) -> Report:
        """Return the report with causes.

        Values that differ between two runs of one process are removed from it.
        """
        alone = trained.expected
        unsteady = Comparison([self._one_process(self.case)], alone).differences
        repeats = {diff.kind for diff in unsteady} <= {"logged value", "metric"}
        if unsteady and repeats:
            names = {diff.name for diff in unsteady}
            self.notes.append(
                "not compared, because they are not reproducible in one process: "
                f"{', '.join(sorted(names))}"
            )
            report = replace(
                report, compared=[diff for diff in report.compared if diff.name not in names]
            )
            if report.equal:
                return report
        count = max(len(rank.losses) for rank in trained.found)
        axes: list[tuple[str, str]] = []
        first_of: dict[str, Difference] = {}
        losses: list[float] = []
        for letters, case in (
            smaller_layouts(self.case, self.combined, microbatches=count) if repeats else ()
        ):
            try:
                ranks = self.subject.train(case)
            except VerificationError as error:
                axes.append((letters, f"failed: {error}"))
                continue
            if letters == "m":
                losses = ranks[0].losses
            if differences := Comparison(ranks, alone).differences:
                first_of[letters] = differences[0]
            axes.append((letters, f"DIFFERENT, {differences[0]}" if differences else "equal"))
        first = report.differences[0]
        if first.kind == "loss" and first.step == 0 and "m" not in first_of:
            self._name_microbatch(trained.found, losses, count)
        per_step = len(alone.numbers["loss", 0, ""][""])
        # A step of -1 is before the first step.
        batch = self.combined.lists["train", 0][: per_step * first.step + per_step or 1][-1]
        evidence = Evidence(
            first=first, first_of=first_of, alone=alone, losses=losses, batch=batch, repeats=repeats
        )
        return replace(report, axes=axes, causes=list(find_causes(evidence)))

    def _name_microbatch(self, ranks: Sequence[Record], losses: list[float], count: int) -> None:
        for rank in ranks:
            pairs = zip(rank.losses, losses[rank.replica * count :], strict=False)
            for index, (loss, expected) in enumerate(pairs):
                if not math.isclose(loss, expected, rel_tol=1e-4):
                    self.notes.append(
                        f"microbatch {index} on {rank.place} is the first that differs: "
                        f"{loss:.6g} instead of {expected:.6g}"
                    )
                    return
