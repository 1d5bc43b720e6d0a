"""``verify``: train a module in a layout and in one process, compare, and find out why they differ."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.nested import batch_size
from lightning_ptdp.verification.batches import Captured
from lightning_ptdp.verification.case import Case, smaller_layouts
from lightning_ptdp.verification.causes import Evidence, find_causes
from lightning_ptdp.verification.compare import Difference, compare
from lightning_ptdp.verification.errors import VerificationError
from lightning_ptdp.verification.memory import blocks_that_fit
from lightning_ptdp.verification.record import Record
from lightning_ptdp.verification.report import Report
from lightning_ptdp.verification.training import Subject

__all__ = ["verify"]

_DOUBLE = "64-true"
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
        read = math.lcm(config.context_parallel_size, config.expert_parallel_size)
        devices = config.tensor_parallel_size * config.pipeline_parallel_size * read
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r} must be a number of processes")
    dropped = {"compile": "none", "compile_options": None, "async_save": False, "verify": None}
    case = Case(name="the layout", config=replace(config, keyed_dropout=True, **dropped), devices=devices, blocks=blocks)
    _ = case.layout  # raises if the degrees do not fit
    return case


@dataclass
class _Trained:
    """A layout and one process that read the same."""

    case: Case
    ranks: list[Record]
    alone: Record
    compared: list[Difference]

    @property
    def first(self) -> Difference | None:
        return next((one for one in self.compared if one.differs), None)


@dataclass
class _Verification:
    subject: Subject
    case: Case
    notes: list[str] = field(default_factory=list)
    replicas: list[Captured] = field(default_factory=list)
    batches: list[Captured] = field(default_factory=list)
    accumulates: int = 1

    def report(self) -> Report:
        self._fit_into_memory()
        first = self._train_from_loader()
        draws = any(rank.seen.random for rank in first)
        case = replace(self.case, reads="replicas", frozen=draws or not self.case.config.keyed_dropout)
        disagreeing = [rank.seen.draws for rank in first]
        if case.frozen and not self.case.frozen:
            places = sorted({place for rank in first for place in rank.seen.random})
            self.notes.append(f"random numbers are replaced by constants, equal for all samples ({', '.join(places[:3])})")
            first = self._train(case)
            for rank, draws_of_rank in zip(first, disagreeing, strict=True):
                rank.seen.draws = draws_of_rank  # those of the training with random numbers
        self.case = case
        trained = self._against_one_process(case, first)
        trained = self._in_double(trained)
        axes, causes = (), ()
        if trained.first is not None:
            axes, causes = self._explain(trained)
        return Report(
            layout=case.layout.describe(),
            steps=len(trained.alone.steps),
            compared=trained.compared,
            axes=axes,
            causes=causes,
            notes=self.notes,
        )

    # ---- trainings ----------------------------------------------------------------------------------------------------

    def _fit_into_memory(self) -> None:
        if self.case.blocks is None:
            blocks = blocks_that_fit(self.subject, self.case)
            self.case = replace(self.case, blocks=blocks)
        if self.case.blocks is not None:
            self.notes.append(f"the model has {self.case.blocks} blocks of each repeated container here")
            self.case = replace(self.case, config=replace(self.case.config, partition=None))

    def _train_from_loader(self) -> list[Record]:
        try:
            ranks = self._train(self.case)
        except Exception as error:
            if "KeyedDropoutError" not in f"{type(error).__name__} {error}":
                raise
            self.notes.append(
                "dropout is switched off: keyed_dropout, which drops the same elements in every layout, cannot be used"
            )
            self.case = replace(self.case, config=replace(self.case.config, keyed_dropout=False), frozen=True)
            ranks = self._train(self.case)
        found = {rank.replica: rank.batches for rank in reversed(ranks)}
        self.replicas = [found[replica] for replica in sorted(found) if found[replica] is not None]  # type: ignore[misc]
        try:
            self.batches = [Captured.joined(self.replicas)]
        except ValueError as error:
            self.accumulates = len(self.replicas)
            self.batches = [Captured.in_turn(self.replicas)]
            self.notes.append(f"one process accumulates over the replicas' batches: {error}")
        return ranks

    def _train(self, case: Case) -> list[Record]:
        return self.subject.train(case, self.replicas if case.reads == "replicas" else self.batches)

    def _against_one_process(self, case: Case, ranks: list[Record]) -> _Trained:
        (alone,) = self._train(case.one_process(accumulates=self.accumulates))
        return _Trained(case, ranks, alone, compare(ranks, alone, _eps(alone)))

    def _in_double(self, trained: _Trained) -> _Trained:
        """Repeat in float64 what could be rounding, or could hide behind it."""
        eps = _eps(trained.alone)
        half = eps > 1e-4
        differing = [one for one in trained.compared if one.differs]
        near = all(one.error <= _FAR * one.tolerance for one in differing)
        if eps < 1e-10 or not (half or (differing and near)):
            return trained
        case = replace(trained.case, precision=_DOUBLE)
        try:
            double = self._against_one_process(case, self._train(case))
        except (VerificationError, ValueError) as error:
            self.notes.append(f"float64 was not possible ({str(error).splitlines()[0]}); tolerances are those of {eps:.0e}")
            return trained
        if double.first is not None:
            self.notes.append("compared in float64")
            return double
        noise = compare([double.alone], trained.alone, eps)
        compared = compare(trained.ranks, trained.alone, eps, noise)
        self.notes.append("equal in float64; in the asked precision the rounding of one process is allowed for")
        return replace(trained, compared=compared)

    # ---- reasons ------------------------------------------------------------------------------------------------------

    def _explain(self, trained: _Trained) -> tuple[Sequence[tuple[str, str]], Sequence[Any]]:
        assert trained.first is not None
        (again,) = self._train(trained.case.one_process(accumulates=self.accumulates))
        repeats = not any(one.differs for one in compare([again], trained.alone, _eps(again)))
        axes: list[tuple[str, str]] = []
        smaller: dict[str, Case] = {}
        first_of: dict[str, Difference] = {}
        for letters, case in self._smaller(trained.case) if repeats else ():
            smaller[letters] = case
            try:
                ranks = self._train(case)
            except (VerificationError, ValueError) as error:
                axes.append((letters, f"cannot be tried: {str(error).splitlines()[0]}"))
                continue
            compared = compare(ranks, trained.alone, _eps(trained.alone))
            found = next((one for one in compared if one.differs), None)
            axes.append((letters, "equal" if found is None else f"DIFFERENT, {found}"))
            if found is not None:
                first_of[letters] = found

        def equal_without(what: str) -> bool:
            case = replace(smaller[next(iter(first_of))], **{what: True})
            alone = replace(trained.case, **{what: True}).one_process(accumulates=self.accumulates)
            found = compare(self._train(case), self._train(alone)[0], _eps(trained.alone))
            return not any(one.differs for one in found)

        evidence = Evidence(
            first=trained.first,
            layout=trained.ranks,
            alone=trained.alone,
            differing=list(first_of),
            first_of=first_of,
            parts=self._microbatches() * len(self.replicas),
            batches=self.batches[0],
            repeats=repeats,
            equal_without=equal_without,
        )
        return axes, find_causes(evidence)

    def _smaller(self, case: Case) -> Iterator[tuple[str, Case]]:
        return smaller_layouts(case, microbatches=self._microbatches(), accumulates=self.accumulates)

    def _microbatches(self) -> int:
        config = self.case.config
        try:
            return config.microbatches(batch_size(self.replicas[0].train[0][0]))
        except (ValueError, IndexError):
            return config.usual_microbatches or 1


def _eps(record: Record) -> float:
    """Return the machine epsilon of the widest rounding among the weights and the arithmetic."""
    dtypes = {part.dtype for held in record.start.weights.values() for _, part in held if part.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
