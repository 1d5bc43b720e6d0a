"""Agreement of ranks after an exception.

Callbacks save checkpoints then, which needs all ranks."""

from __future__ import annotations

from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.shims.lightning import Trainer

__all__ = ["Interruption"]

_PATIENCE_S = 5.0
_LEAVING_S = 40.0


class Interruption:
    """State of an exception in one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        trainer: Trainer whose state shows whether there was an exception.
        watchdog: Connection to the other ranks.
        run: Name of this call, the same on all ranks and used once.
        on_device: Whether unfinished messages may keep a device busy forever.
    """

    def __init__(self, trainer: Trainer, watchdog: Watchdog, *, run: str, on_device: bool) -> None:
        self._trainer, self._watchdog, self._run, self._on_device = (
            trainer,
            watchdog,
            run,
            on_device,
        )
        self._alone: bool | None = None

    def is_of_this_rank_alone(self) -> bool:
        """Return True if an exception did not end all ranks at the same step.

        Waits some seconds for the other ranks."""
        if self._trainer.state.status != "interrupted" or self._watchdog.closed:
            return False
        if self._alone is None:
            torn = self._on_device and self._watchdog.failed
            topic = f"{self._run}/{self._trainer.global_step}"
            self._alone = torn or not self._watchdog.all_come(topic, limit_s=_PATIENCE_S)
        return self._alone

    def leave(self) -> None:
        """Wait some seconds for the other ranks after an exception of all ranks.

        The launcher ends all ranks when one has ended, and rank 0 may still be writing its log."""
        if self._alone is False:
            self._watchdog.all_come(f"{self._run}/end", limit_s=_LEAVING_S)
