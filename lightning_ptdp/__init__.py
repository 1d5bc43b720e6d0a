"""PyTorch Lightning strategy for pipeline, tensor, sequence and data parallelism (PTD-P).

Importing this package registers ``Trainer(strategy="ptdp")``. An installed package is registered
without the import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_ptdp.autoload import install as _install
from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.requirements import check_at_import as _check_at_import
from lightning_ptdp.base.requirements import check_core as _check_core
from lightning_ptdp.version import __version__
from lightning_ptdp.world.layout import ParallelLayout

if TYPE_CHECKING:
    from lightning_ptdp.forward import frozen_forward
    from lightning_ptdp.generation import Sampling, generate
    from lightning_ptdp.models import LitCausalLM, LitMaskedLM
    from lightning_ptdp.strategy import PTDPStrategy, plan
    from lightning_ptdp.tensor_parallel import ParallelPlan
    from lightning_ptdp.verification import verify

__all__ = [
    "LitCausalLM",
    "LitMaskedLM",
    "PTDPError",
    "PTDPStrategy",
    "ParallelLayout",
    "ParallelPlan",
    "Sampling",
    "__version__",
    "frozen_forward",
    "generate",
    "plan",
    "verify",
]

_check_at_import()
_install()


def __getattr__(name: str) -> object:
    """Import torch and Lightning only when a name that needs them is used."""
    packages = {
        "LitCausalLM": "models",
        "LitMaskedLM": "models",
        "PTDPStrategy": "strategy",
        "ParallelPlan": "tensor_parallel",
        "Sampling": "generation",
        "frozen_forward": "forward",
        "generate": "generation",
        "plan": "strategy",
        "verify": "verification",
    }
    if name not in packages:
        raise AttributeError(f"module 'lightning_ptdp' has no attribute '{name}'")
    _check_core()
    value = getattr(import_module(f"lightning_ptdp.{packages[name]}"), name)
    globals()[name] = value  # the next use does not call this function
    return value
