"""Callback that validates at the end of training."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

__all__ = ["ValidateAtEnd"]


class ValidateAtEnd(Callback):
    """Callback that validates after the last step of training.

    Without it there is no validation if ``max_steps`` or ``max_epochs`` ends training between two
    validations. It asks the Trainer to stop one step before the Trainer would stop by itself,
    because Lightning validates when asked to stop."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Ask the Trainer to stop on the last step."""
        last_step = 0 < trainer.max_steps <= trainer.global_step
        last_epoch = (
            trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
        )
        if last_step or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True
