"""Callback that measures the timeline of a training step on every pipeline rank."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ptdp.base.option_types import Count, Size, check_arguments
from lightning_ptdp.callbacks.artifacts import keep_files
from lightning_ptdp.pipeline.action_recorder import ActionRecorder, ideal_timeline
from lightning_ptdp.schedule.schedule_timeline import chrome_trace, draw_timelines
from lightning_ptdp.schedule.simulate import Timeline


class PipelineTimeline(Callback):
    """Callback that records training steps and draws them with their ideal timeline.

    The ideal timeline is the same schedule with the mean measured costs and free messages. Every
    pipeline rank of the first replica records. The files ``step-000100.png`` and
    ``step-000100.json`` (for https://ui.perfetto.dev) are written, and an MLflow logger keeps them
    as artifacts. The loggers get ``timeline/step_seconds``, ``timeline/bubble_measured``,
    ``timeline/bubble_ideal`` (idle over computing time) and ``timeline/overhead`` (measured over
    ideal step time, less 1). A recorded step contains the forwards, backwards and reductions of a
    batch, without the optimizer. If gradients are accumulated, it is the last batch. Steps that are
    not recorded cost nothing.

    Args:
        every_n_steps: Record the steps n, 2n, … as ``trainer.global_step`` counts them, from 0. The
            first step is never recorded, because it includes work that is done once.
        steps: Record these steps.
        dirpath: Folder of the files; default: the folder "timeline" in the logger's folder, or in
            ``default_root_dir``.

    Raises:
        ValueError: Not exactly one of ``every_n_steps`` and ``steps`` is given, or one is out of
            range.
    """

    def __init__(
        self,
        every_n_steps: Size | None = None,
        steps: Sequence[Count] | None = None,
        dirpath: str | None = None,
    ) -> None:
        check_arguments(PipelineTimeline.__init__, locals())
        if (every_n_steps is None) == (steps is None):
            raise ValueError(
                f"every_n_steps={every_n_steps!r} and steps={steps!r} must not both be set or "
                "both be left out. Use one of them, such as every_n_steps=1000"
            )
        if steps is not None and not steps:
            raise ValueError(
                f"steps={steps!r} must be one or more step numbers from 0, such as [10, 100]"
            )
        self.every_n_steps = every_n_steps
        self.steps = steps
        self.dirpath = dirpath
        self._recorder: ActionRecorder | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a message if there is nothing to record."""
        if not has_pipeline(trainer):
            rank_zero_info("PipelineTimeline records nothing, because there is no pipeline")

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Start to record."""
        if (
            self._recorder is None
            and self._wants(trainer.global_step)
            and has_pipeline(trainer)
            # One pipeline is enough, and that of global rank 0 can log.
            and trainer.strategy.mesh.group("pipeline").ranks[0] == 0
        ):
            self._recorder = ActionRecorder(trainer.strategy.root_device)
            self._step = trainer.global_step
            trainer.strategy.observers.add(self._recorder)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Gather, write and log the recorded step if it is complete."""
        if self._recorder is None or trainer.global_step == self._step:
            return
        recorder = self._recorder
        self._stop(trainer)
        measured = recorder.gather(trainer.strategy.mesh.group("pipeline"))
        if measured is not None:
            self._log(trainer, measured, ideal_timeline(measured))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard a step that was not completed."""
        self._stop(trainer)

    def on_exception(self, trainer: Trainer, *_: object) -> None:
        """Discard the step that failed."""
        self._stop(trainer)

    def _wants(self, step: int) -> bool:
        if self.steps is not None:
            return step in self.steps
        assert self.every_n_steps is not None
        return step > 0 and step % self.every_n_steps == 0

    def _stop(self, trainer: Trainer) -> None:
        observers = getattr(trainer.strategy, "observers", None)
        if self._recorder is not None and observers is not None:
            observers.remove(self._recorder)
        self._recorder = None

    def _log(self, trainer: Trainer, measured: Timeline, ideal: Timeline) -> None:
        """Write and log a step, on the first rank of the pipeline, which is global rank 0."""
        titles = [
            f"{measured.schedule.name}, step {self._step}, measured",
            "ideal: mean costs, free messages",
        ]
        timelines = [measured, ideal]
        trace = json.dumps(chrome_trace(*timelines, titles=titles))
        is_written = keep_files(
            trainer,
            {
                ".png": lambda file: draw_timelines(timelines, file, titles=titles, measured=True),
                ".json": lambda file: file.write_text(trace, encoding="utf-8"),
            },
            kind="timeline",
            step=self._step,
            dirpath=self.dirpath,
        )
        if not is_written:
            return
        metrics = {
            "timeline/step_seconds": float(measured.step_time),
            "timeline/bubble_measured": float(measured.bubble_fraction),
            "timeline/bubble_ideal": float(ideal.bubble_fraction),
            "timeline/overhead": float(measured.step_time / ideal.step_time) - 1,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)


def has_pipeline(trainer: Trainer) -> bool:
    """Return True if the strategy has pipeline stages."""
    layout = getattr(trainer.strategy, "layout", None)
    return getattr(layout, "pipeline_parallel_size", 1) > 1
