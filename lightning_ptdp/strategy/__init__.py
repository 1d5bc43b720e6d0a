"""The strategy that Lightning's Trainer calls.

``ptdp.py`` is the strategy, in the order of a run. ``steps.py``, ``running_strategy.py`` and
``saving.py`` are the parts that run batches, reduce values and write checkpoints. ``checks``
refuses before launch, ``launch.py`` starts processes."""

from lightning_ptdp.strategy.planning import plan
from lightning_ptdp.strategy.ptdp import PTDPStrategy, strategy_class

__all__ = ["PTDPStrategy", "plan", "strategy_class"]
