"""Lightning lets its own strategies alone train what ``torch.compile`` returns for a module: this change has it ask ours.

Imports nothing heavy: see autoload.py, which applies it when Lightning's Trainer is imported.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from lightning_ptdp._lightning import TRAINERS

__all__ = ["take_compiled"]

_DONE = "_takes_compiled"


def take_compiled(trainer: ModuleType) -> None:
    """Have a module with a Trainer leave it to this package's strategy, which checks before launch, what it does with compiled modules."""
    name = TRAINERS[trainer.__name__]
    verify = getattr(trainer, name, None)
    if verify is None or hasattr(verify, _DONE):
        return

    @wraps(verify)
    def verify_others(model: Any, strategy: Any) -> None:
        if getattr(strategy, "strategy_name", None) != "ptdp":
            verify(model, strategy)

    setattr(verify_others, _DONE, True)
    setattr(trainer, name, verify_others)
