"""Callback that logs the learning rate."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

__all__ = ["LearningRate"]


class LearningRate(Callback):
    """Callback that logs ``learning_rate`` with the other metrics of a step.

    One number is logged if all parameter groups have the same rate, otherwise one per group
    (``learning_rate/1`` …). With several optimizers the first one is used. Lightning's
    ``LearningRateMonitor`` draws the same curve for every group."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Log the rate of the step that begins."""
        if not trainer.optimizers:
            return
        rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        same = len(set(rates)) == 1
        for number, rate in enumerate(rates[:1] if same else rates, start=1):
            self.log("learning_rate" if same else f"learning_rate/{number}", rate, batch_size=1)
