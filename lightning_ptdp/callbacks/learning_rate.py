"""The learning rate as a metric."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

__all__ = ["LearningRate"]


class LearningRate(Callback):
    """Log ``learning_rate`` with the other metrics of a step: one number where all parameter groups
    have the same one, else one a group (``learning_rate/1`` …); of several optimizers the first.
    Lightning's ``LearningRateMonitor`` draws the same curve for every group."""

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        """Log that of the step that begins."""
        if not trainer.optimizers:
            return
        rates = [float(group["lr"]) for group in trainer.optimizers[0].param_groups]
        same = len(set(rates)) == 1
        for number, rate in enumerate(rates[:1] if same else rates, start=1):
            self.log("learning_rate" if same else f"learning_rate/{number}", rate, batch_size=1)
