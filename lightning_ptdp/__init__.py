"""Pipeline, tensor, sequence and data parallel training (PTD-P) as a PyTorch Lightning strategy.

Importing this package registers ``Trainer(strategy="ptdp")``; an installed package is registered without the import.
"""

from typing import TYPE_CHECKING, Any

from lightning_ptdp.autoload import install as _install
from lightning_ptdp.version import __version__
from lightning_ptdp.world.layout import ParallelLayout

if TYPE_CHECKING:
    from lightning_ptdp.strategy import PTDPStrategy
    from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["PTDPStrategy", "ParallelLayout", "ParallelPlan", "__version__"]

_install()


def __getattr__(name: str) -> Any:
    """Import Lightning only for those who ask for a name that needs it."""
    if name == "PTDPStrategy":
        from lightning_ptdp.strategy import PTDPStrategy

        return PTDPStrategy
    if name == "ParallelPlan":
        from lightning_ptdp.tensor_parallel import ParallelPlan

        return ParallelPlan
    raise AttributeError(f"module 'lightning_ptdp' has no attribute '{name}'")
