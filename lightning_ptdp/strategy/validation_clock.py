"""Validation by the clock (``val_check_interval="00:01:00:00"``), in step on all ranks.

Lightning lets every rank check its own clock at the end of a batch. Some ranks would then begin to
validate while other ranks continue to train."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lightning_ptdp.shims.lightning import Trainer, set_last_validation, validation_times

__all__ = ["ValidationClock"]


class ValidationClock:
    """Decision before each batch whether a validation follows it.

    Lightning is shown a time that enforces the decision."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._since = trainer, -math.inf

    def agree(self, all_say: Callable[[bool], bool]) -> None:
        """Agree before a batch, on all ranks, whether a validation follows.

        Args:
            all_say: Collective; returns True if its argument is true on all ranks.
        """
        seconds, last = validation_times(self._trainer)
        if seconds is None:
            return
        if math.isfinite(last):
            self._since = last  # set by Lightning: the fit has begun, or a validation has ended
        due = all_say(time.monotonic() - self._since >= seconds)
        set_last_validation(self._trainer, -math.inf if due else math.inf)
