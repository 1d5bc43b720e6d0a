"""Progress display of training in optimizer steps."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TextIO, TypeAlias

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.base.output import say

Style = Literal["rich", "tqdm", "lines"]
_Display: TypeAlias = "_Rich | _Tqdm | _StepLines"


class StepProgress(ProgressBar):
    """Progress bar that counts optimizer steps, on rank 0.

    It shows the current and the last step, the metrics that were logged with ``prog_bar=True``
    (loss, tokens/s, MFU), and the expected end. Lightning's own bars count the batches of an epoch.
    A run of ``max_steps`` has no epochs to count, and these bars show "Epoch 0/-2".

    Args:
        style: "rich" or "tqdm", or "lines", which prints a line at intervals, as for a log file;
            None: rich on a terminal, else lines.
        refresh_rate: Steps from one update to the next; lines follow the Trainer's
            ``log_every_n_steps`` too.
    """

    def __init__(self, style: Style | None = None, refresh_rate: Size = 1) -> None:
        super().__init__()
        check_arguments(StepProgress.__init__, locals())
        self._style = style
        self._refresh_rate = refresh_rate
        self._enabled = True
        self._display: _Display | None = None
        self._shown = -1

    def disable(self) -> None:
        """Hide the display."""
        self._enabled = False

    def enable(self) -> None:
        """Show the display again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the display, at the step of the checkpoint if training is resumed."""
        if self._enabled:
            interval = math.lcm(self._refresh_rate, max(1, trainer.log_every_n_steps))
            self._shown = trainer.global_step
            self._display = _open(
                self._style, first=trainer.global_step, last=_last_step(trainer), interval=interval
            )

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Show the step."""
        step = trainer.global_step
        if self._display is not None and step != self._shown and step % self._refresh_rate == 0:
            self._shown = step
            self._display.show(step, describe(trainer.progress_bar_metrics))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the progress of a validation."""
        if self._display is not None and not isinstance(self._display, _StepLines):
            self._display.show(
                trainer.global_step,
                f"validation {batch_idx + 1}/{trainer.num_val_batches[dataloader_idx]}",
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the display; the last step stays visible."""
        if self._display is not None:
            self._display.show(trainer.global_step, describe(trainer.progress_bar_metrics))
        self._close()

    def on_exception(self, trainer: Trainer, *_: object) -> None:
        """Release the terminal."""
        self._close()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the display, which belongs to a terminal."""
        return {**vars(self), "_display": None}

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
        self._display = None


def describe(metrics: Mapping[str, object]) -> str:
    """Return metrics as a line: ``train_loss 3.142, 12.3k tokens/s, MFU 41.2%``."""
    return ", ".join(
        _one(name, float(value))
        for name, value in metrics.items()
        if isinstance(value, (int, float))
    )


def _one(name: str, value: float) -> str:
    if name == "mfu":
        return f"MFU {value:.1%}"
    if name == "tokens_per_s":
        return f"{_short(value)} tokens/s"
    return f"{name} {value:.4g}"


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _last_step(trainer: Trainer) -> int | None:
    """Return the step at which training ends; None if it has no end."""
    steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
    return None if math.isinf(steps) else int(steps)


def _open(style: Style | None, *, first: int, last: int | None, interval: int) -> _Display:
    if style is None:
        style = "rich" if sys.stdout is not None and sys.stdout.isatty() else "lines"
    if style == "lines":
        return _StepLines(first, last, interval)
    return _Rich(first, last) if style == "rich" else _Tqdm(first, last)


class _Rich:
    def __init__(self, first: int, last: int | None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        # Without markup, because a metric's name may contain brackets.
        self._progress = Progress(
            TextColumn("step"), *columns, TextColumn("{task.description}", markup=False)
        )
        streams = (sys.stdout, sys.stderr)
        self._progress.start()
        # Later output is printed above the bar. Log handlers, including Lightning's, still hold the
        # earlier streams.
        self._handlers = [
            (handler, before, now)
            for before, now in zip(streams, (sys.stdout, sys.stderr), strict=True)
            for handler in _stream_handlers()
            if handler.stream is before and now is not before
        ]
        for handler, _, now in self._handlers:
            handler.setStream(now)
        self._task = self._progress.add_task("", total=last, completed=first)

    def show(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        for handler, before, _ in self._handlers:
            handler.setStream(before)
        self._progress.stop()


def _stream_handlers() -> list[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
    }
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]


class _Tqdm:
    def __init__(self, first: int, last: int | None) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=last, initial=first, desc="step", unit="step", dynamic_ncols=True, file=sys.stdout
        )

    def show(self, step: int, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()


@dataclass
class _StepLines:
    first: int
    last: int | None
    interval: int

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._printed = self.first

    def show(self, step: int, text: str) -> None:
        if step == self._printed or (step % self.interval and step != self.last):
            return
        self._printed = step
        say(f"step {step}{'' if self.last is None else f'/{self.last}'}: {text}{self._eta(step)}")

    def _eta(self, step: int) -> str:
        if self.last is None or step >= self.last:
            return ""
        seconds = round((time.monotonic() - self._start) / (step - self.first) * (self.last - step))
        return f", ETA {timedelta(seconds=seconds)}"

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""
