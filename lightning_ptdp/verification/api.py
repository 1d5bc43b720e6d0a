"""``verify``: train a module in a layout and in one process, compare, and find out why they differ."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.nested import batch_size
from lightning_ptdp.verification.batches import Captured
from lightning_ptdp.verification.case import Case, smaller_layouts
from lightning_ptdp.verification.causes import Evidence, find_causes
from lightning_ptdp.verification.compare import Difference, compare
from lightning_ptdp.verification.memory import blocks_that_fit
from lightning_ptdp.verification.record import Record
from lightning_ptdp.verification.report import Cause, Report
from lightning_ptdp.verification.training import Subject

__all__ = ["verify"]

_DOUBLE_EPS, _HALF_EPS = 1e-10, 1e-4
"""Machine epsilons between those of the dtypes."""
_FAR = 1e3
"""A difference of so many tolerances is no rounding."""


def verify(
    module: Any,
    datamodule: Any = None,
    *,
    strategy: Any,
    steps: int = 3,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    blocks: int | None = None,
    limit_s: float = 600.0,
    **trainer: Any,
) -> Report:
    """Train a module for some steps in a layout and in one process, and compare everything.

    Both begin with the same values and read the same samples: one process reads the batches of all replicas at once. The trainings run in
    forked processes; the module, the strategy and the data here stay as they are, and nothing is written to the Trainer's folders.

    Args:
        module: A LightningModule.
        datamodule: Its data.
        strategy: A ``PTDPStrategy`` with the layout.
        steps: Optimizer steps.
        train_dataloaders: Training data, without a data module.
        val_dataloaders: Validation data, without a data module.
        blocks: Verify with so many blocks of each repeated container; default: all, or as many as one process can hold.
        limit_s: Limit of each training in seconds.
        trainer: Arguments of Lightning's Trainer, such as devices, precision, callbacks and gradient_clip_val. devices defaults to the
            fewest that the layout needs.

    Raises:
        ValueError: The layout is refused, or cannot be verified here.
        VerificationError: A training failed or was late.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    most = trainer.get("max_steps") or -1
    steps = min(steps, most) if most > 0 else steps
    with tempfile.TemporaryDirectory(prefix="ptdp-verify-") as folder:
        subject = Subject(
            module=module,
            strategy=strategy,
            datamodule=datamodule,
            train_dataloaders=train_dataloaders,
            val_dataloaders=val_dataloaders,
            steps=steps,
            trainer=trainer,
            folder=Path(folder),
            limit_s=limit_s,
        )
        return _Verification(subject, _whole_case(subject, blocks)).report()


def _whole_case(subject: Subject, blocks: int | None) -> Case:
    config, devices = subject.strategy.config, subject.trainer.get("devices")
    if subject.trainer.get("num_nodes", 1) != 1:
        raise ValueError(
            f"num_nodes={subject.trainer['num_nodes']}: verify starts processes on this machine only; use num_nodes=1"
        )
    if torch.cuda.is_initialized():
        raise ValueError("verify forks processes, which cannot use CUDA once this one has: call it before anything uses the GPU")
    if devices is None:
        devices = config.smallest_world_size
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r} must be a number of processes")
    dropped = {"compile": "none", "compile_options": None, "async_save": False, "verify": None}
    case = Case(name="the layout", config=replace(config, keyed_dropout=True, **dropped), devices=devices, blocks=blocks)
    _ = case.layout  # raises if the degrees do not fit
    return case


@dataclass
class _Trained:
    """A layout, and one process that read the same."""

    case: Case
    ranks: list[Record]
    alone: Record
    compared: list[Difference]

    @property
    def differences(self) -> list[Difference]:
        return [one for one in self.compared if one.differs]


@dataclass
class _Verification:
    subject: Subject
    case: Case
    notes: list[str] = field(default_factory=list)
    replicas: list[Captured] = field(default_factory=list)
    batches: list[Captured] = field(default_factory=list)
    accumulates: int = 1

    def report(self) -> Report:
        if self.subject.strategy.config.compile != "none":
            self.notes.append("blocks are not compiled here")
        self._fit_into_memory()
        ranks = self._train_from_loader()
        places = sorted({place for rank in ranks for place in rank.seen.random})
        self.case = replace(self.case, reads="replicas", frozen=bool(places) or self.case.frozen)
        if places:
            self.notes.append(f"random numbers are replaced by constants, equal for all samples ({', '.join(places[:3])})")
            drawn = [rank.seen.draws for rank in ranks]
            ranks = self._train(self.case)
            for rank, draws in zip(ranks, drawn, strict=True):
                rank.seen.draws = draws
        trained = self._in_double(self._against_one_process(self.case, ranks))
        axes, causes = self._explain(trained) if trained.differences else ([], [])
        layout, steps = self.case.layout.describe(), len(trained.alone.steps)
        return Report(layout=layout, steps=steps, compared=trained.compared, axes=axes, causes=causes, notes=self.notes)

    # ---- trainings ----------------------------------------------------------------------------------------------------

    def _fit_into_memory(self) -> None:
        blocks = self.case.blocks or blocks_that_fit(self.subject, self.case)
        if blocks is not None:
            self.notes.append(f"the model has {blocks} blocks of each repeated container here")
            self.case = replace(self.case, blocks=blocks, config=replace(self.case.config, partition=None))

    def _train_from_loader(self) -> list[Record]:
        try:
            ranks = self._train(self.case)
        except ValueError as error:
            if type(error).__name__ != "KeyedDropoutError":
                raise
            self.notes.append(
                "dropout is switched off, because keyed_dropout, which drops the same in every layout, cannot be used"
            )
            self.case = replace(self.case, config=replace(self.case.config, keyed_dropout=False), frozen=True)
            ranks = self._train(self.case)
        found = {rank.replica: rank.batches for rank in reversed(ranks)}
        self.replicas = [batches for _, batches in sorted(found.items()) if batches is not None]
        try:
            self.batches = [Captured.of_one_process(self.replicas, joined=True)]
        except ValueError as error:
            self.accumulates, self.batches = len(self.replicas), [Captured.of_one_process(self.replicas, joined=False)]
            self.notes.append(f"one process accumulates over the replicas' batches: {error}")
        return ranks

    def _train(self, case: Case) -> list[Record]:
        return self.subject.train(case, self.replicas if case.reads == "replicas" else self.batches)

    def _one_process(self, case: Case) -> Record:
        return self._train(case.one_process(accumulates=self.accumulates))[0]

    def _against_one_process(self, case: Case, ranks: list[Record]) -> _Trained:
        alone = self._one_process(case)
        return _Trained(case, ranks, alone, compare(ranks, alone, alone.eps))

    def _in_double(self, trained: _Trained) -> _Trained:
        """Repeat in float64 what could be rounding, or could hide behind it."""
        eps, differences = trained.alone.eps, trained.differences
        near = bool(differences) and all(one.error <= _FAR * one.tolerance for one in differences)
        if eps < _DOUBLE_EPS or not (near or eps > _HALF_EPS):
            return trained
        case = replace(trained.case, precision="64-true")
        try:
            double = self._against_one_process(case, self._train(case))
        except Exception as error:
            self.notes.append(
                f"float64 was not possible ({str(error).partition(chr(10))[0]}): errors up to the tolerances may be hidden"
            )
            return trained
        if double.differences:
            self.notes.append("compared in float64")
            return double
        self.notes.append("equal in float64; in the precision that was asked for, the rounding of one process is allowed")
        noise = compare([double.alone], trained.alone, eps)
        return replace(trained, compared=compare(trained.ranks, trained.alone, eps, noise))

    # ---- reasons ------------------------------------------------------------------------------------------------------

    def _explain(self, trained: _Trained) -> tuple[list[tuple[str, str]], list[Cause]]:
        alone, eps = trained.alone, trained.alone.eps
        unsteady = [one for one in compare([self._one_process(trained.case)], alone, eps) if one.differs]
        repeats = {one.kind for one in unsteady} <= {"logged value", "metric"}
        if unsteady and repeats:
            names = {one.name for one in unsteady}
            trained.compared = [one for one in trained.compared if one.name not in names]
            self.notes.append(f"not the same twice in one process, and left out: {', '.join(sorted(names))}")
            if not trained.differences:
                return [], []
        first = trained.differences[0]
        axes: list[tuple[str, str]] = []
        differing: dict[str, Difference] = {}
        losses: list[float] = []
        count = self._microbatches()
        smaller = smaller_layouts(trained.case, microbatches=count, accumulates=self.accumulates) if repeats else ()
        for letters, case in smaller:
            try:
                ranks = self._train(case)
            except Exception as error:
                axes.append((letters, f"cannot be tried: {str(error).partition(chr(10))[0]}"))
                continue
            if letters == "m":
                losses = ranks[0].steps[0].microbatches
            found = next((one for one in compare(ranks, alone, eps) if one.differs), None)
            axes.append((letters, f"DIFFERENT, {found}" if found else "equal"))
            if found is not None:
                differing[letters] = found
        if first.kind == "loss" and first.step == 0 and "m" not in differing:
            self._name_microbatch(trained.ranks, losses, count)

        evidence = Evidence(
            first=first,
            alone=alone,
            first_of=differing,
            losses=losses,
            batches=self.batches[0],
            repeats=repeats,
        )
        return axes, find_causes(evidence)

    def _name_microbatch(self, ranks: Sequence[Record], losses: Sequence[float], count: int) -> None:
        for rank in ranks:
            expected = losses[rank.replica * count :]
            for index, (loss, other) in enumerate(zip(rank.steps[0].microbatches, expected, strict=False)):
                if not math.isclose(loss, other, rel_tol=1e-4):
                    self.notes.append(
                        f"microbatch {index} on {rank.place} is the first that differs: {loss:.6g} instead of {other:.6g}"
                    )
                    return

    def _microbatches(self) -> int:
        config = self.case.config
        try:
            return config.microbatches(batch_size(self.replicas[0].train[0][0]))
        except (ValueError, IndexError):
            return config.usual_microbatches or 1
