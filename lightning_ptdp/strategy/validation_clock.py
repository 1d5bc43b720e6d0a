"""Validation by the clock (``val_check_interval="00:01:00:00"``), at the same batch on all ranks.

Lightning lets every rank look at its own clock at the end of a batch: some would begin to validate
while the others train on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lightning_ptdp.shims.lightning import Trainer, set_last_validation, validation_times

__all__ = ["ValidationClock"]


class ValidationClock:
    """Decides before a batch whether there is a validation behind it, and shows Lightning a time
    that leaves it no choice."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._since = trainer, -math.inf

    def agree(self, all_say: Callable[[bool], bool]) -> None:
        """Before a batch, on all ranks.

        Args:
            all_say: Collective; whether it is true on all of them.
        """
        seconds, last = validation_times(self._trainer)
        if seconds is None:
            return
        if math.isfinite(last):
            self._since = last  # Lightning's: the fit has begun, or a validation has ended
        due = all_say(time.monotonic() - self._since >= seconds)
        set_last_validation(self._trainer, -math.inf if due else math.inf)
