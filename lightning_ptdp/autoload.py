"""Makes ``Trainer(strategy="ptdp")`` work without an import in the user's script.

torch calls ``install`` at ``import torch`` (the entry point group ``torch.backends``; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off).
It imports nothing heavy: it only leaves a finder that registers the strategy's name once Lightning's registry is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["install", "register"]

_REGISTRIES = {"lightning.pytorch.strategies": "lightning.pytorch", "pytorch_lightning.strategies": "pytorch_lightning"}
_START_METHODS = {"ptdp": "popen", "ptdp_spawn": "spawn", "ptdp_fork": "fork"}


def install() -> None:
    """Register the strategy's names with Lightning, now or when it is imported. Never raises: torch's import must not fail."""
    try:
        for name in _REGISTRIES:
            if name in sys.modules:
                register(sys.modules[name])
        if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception as error:
        print(f"lightning-ptdp could not register its strategy: {error!r}", file=sys.stderr)


def register(strategies: ModuleType) -> None:
    """Add "ptdp", "ptdp_spawn" and "ptdp_fork" to the registry of a Lightning namespace, as factories that import nothing yet."""
    registry = getattr(strategies, "StrategyRegistry", None)
    if registry is None:
        return  # still being imported; the finder calls again
    for name, start_method in _START_METHODS.items():
        if name not in registry:
            description = "Pipeline, tensor, sequence and data parallelism (PTD-P)"
            registry.register(
                name, _factory(_REGISTRIES[strategies.__name__]), description=description, start_method=start_method
            )


def _factory(namespace: str) -> Any:
    def make_strategy(**kwargs: Any) -> Any:
        from lightning_ptdp.strategy import strategy_class

        return strategy_class(namespace)(**kwargs)

    return make_strategy


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Finds a registry's module as usual and has ``register`` called when it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    """Runs another loader, then registers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
