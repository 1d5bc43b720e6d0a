"""Strategy that Lightning's Trainer calls.

``ptdp.py`` contains the strategy, in the order of a run. ``steps.py`` runs batches,
``running_strategy.py`` reduces values, and ``saving.py`` writes checkpoints. ``checks`` refuses
impossible runs before launch. ``launch.py`` starts the processes."""

from lightning_ptdp.strategy.planning import plan
from lightning_ptdp.strategy.ptdp import PTDPStrategy, strategy_class

__all__ = ["PTDPStrategy", "plan", "strategy_class"]
