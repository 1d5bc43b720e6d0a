"""Registration of the strategy and its checkpoints in Lightning, without a user's import.

``Trainer(strategy="ptdp")`` and ``load_from_checkpoint`` of its checkpoints then work in any
script. torch calls ``install`` at ``import torch`` (the entry point group ``torch.backends``;
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off). ``install`` imports nothing heavy. It only adds a
finder. Once Lightning is imported, the finder registers the strategy's name, lets Lightning accept
this package's folders as checkpoint files, and leaves compiled modules to the strategy."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from lightning_ptdp.base.requirements import check_core
from lightning_ptdp.checkpoint_folders import (
    find_last,
    load_file_or_folder,
    parse_file_or_folder,
    scan_files_and_folders,
    upload_files_and_folders,
)
from lightning_ptdp.shims.lightning import (
    CLIS,
    LOADERS,
    SAVERS,
    SCANNERS,
    TRAINERS,
    UPLOADERS,
    StrategyBase,
    replace_once,
)

_REGISTRIES = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}
_FABRICS = ("lightning.fabric.strategies", "lightning_fabric.strategies")
_START_METHODS = {"ptdp": "popen", "ptdp_spawn": "spawn", "ptdp_fork": "fork"}


def install() -> None:
    """Change Lightning's modules, now or when they are imported.

    Never raises, because torch's import must not fail."""
    try:
        for name in _CHANGED & sys.modules.keys():
            _change(sys.modules[name])
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        print(f"lightning-ptdp could not register its strategy: {error!r}", file=sys.stderr)


def register(strategies: ModuleType) -> None:
    """Add "ptdp", "ptdp_spawn" and "ptdp_fork" to the registry of a Lightning namespace.

    The entries are factories that import nothing yet. Fabric's registry gets a factory whose error
    says what to use."""
    fabric = strategies.__name__ in _FABRICS
    registry = getattr(strategies, "STRATEGY_REGISTRY" if fabric else "StrategyRegistry", None)
    if registry is None:
        return  # still being imported; the finder calls again
    factory = _refuse_fabric if fabric else _factory(_REGISTRIES[strategies.__name__])
    for name, start_method in _START_METHODS.items():
        if name not in registry:
            description = "Pipeline, tensor, sequence and data parallelism (PTD-P)"
            registry.register(name, factory, description=description, start_method=start_method)


def _refuse_fabric(**_: object) -> StrategyBase:
    raise ValueError(
        "strategy='ptdp' does not work with Fabric. The schedule calls training_step of a "
        "LightningModule once per microbatch on every stage, but with Fabric the training "
        "loop is user code. Use lightning.pytorch.Trainer(strategy='ptdp')"
    )


def _factory(namespace: str) -> Callable[..., StrategyBase]:
    def make_strategy(**kwargs: object) -> StrategyBase:
        check_core()
        from lightning_ptdp.strategy import strategy_class

        return strategy_class(namespace)(**kwargs)

    return make_strategy


def _verify_others(
    verify: Callable[[object, object], None], model: object, strategy: object
) -> None:
    """Let this package's strategy decide about compiled modules, which it checks before launch."""
    if getattr(strategy, "strategy_name", None) != "ptdp":
        verify(model, strategy)


_REPLACEMENTS: tuple[tuple[Mapping[str, str], Callable[..., object]], ...] = (
    (LOADERS, load_file_or_folder),
    (SCANNERS, scan_files_and_folders),
    (UPLOADERS, upload_files_and_folders),
    (CLIS, parse_file_or_folder),
    (SAVERS, find_last),
    (TRAINERS, _verify_others),
)
"""Functions of Lightning, by module, and what is called in their place."""
_CHANGED = {*_REGISTRIES, *_FABRICS}.union(*(places for places, _ in _REPLACEMENTS))


def _change(module: ModuleType) -> None:
    """Register the strategy in a module of Lightning, or replace functions of it."""
    name = module.__name__
    if name in _REGISTRIES or name in _FABRICS:
        register(module)
    for places, instead in _REPLACEMENTS:
        if name in places:
            owner, _, function = places[name].rpartition(".")
            replace_once(getattr(module, owner, None) if owner else module, function, instead)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that changes Lightning's modules after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            replace_once(spec.loader, "exec_module", _run_and_change)
        return spec


def _run_and_change(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    run(module)
    _change(module)  # nothing for the other modules that the same loader runs
