"""Registration of the strategy and its checkpoints in Lightning, without a user's import.

``Trainer(strategy="ptdp")`` and ``load_from_checkpoint`` of its checkpoints then work in any
script. torch calls ``install`` at ``import torch`` (the entry point group ``torch.backends``;
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off). ``install`` imports nothing heavy. It only adds a
finder. Once Lightning is imported, the finder registers the strategy's name, lets Lightning accept
this package's folders as checkpoint files, and leaves compiled modules to the strategy.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from lightning_ptdp.base.requirements import check_core
from lightning_ptdp.shims.lightning import (
    CLIS,
    LOADERS,
    SAVERS,
    SCANNERS,
    TRAINERS,
    UPLOADERS,
    LightningCLI,
    StrategyBase,
    Trainer,
    place_of_saves,
    replace_once,
)

_REGISTRIES = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}
_FABRICS = ("lightning.fabric.strategies", "lightning_fabric.strategies")
_START_METHODS = {"ptdp": "popen", "ptdp_spawn": "spawn", "ptdp_fork": "fork"}
# key checkpoint.single_file.TYPES, repeated here because that module imports torch
_TYPES = "lightning_ptdp_types"

Found = tuple[float, str, object, str]
"""Time at which a checkpoint was written, its path, its score, and its kind."""


def install() -> None:
    """Change Lightning's modules, now or when they are imported.

    Never raises, because torch's import must not fail.
    """
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
    says what to use.
    """
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


# ---- Checkpoint folders --------------------------------------------------------------------------
#
# By default Lightning accepts only checkpoint files. Each of these functions gets the function of
# Lightning that it replaces as first argument.


def load_file_or_folder(
    load: Callable[..., object],
    path_or_url: object,
    map_location: Any = None,
    weights_only: bool | None = None,
) -> object:
    """Return the content of a checkpoint that is a file or a folder."""
    path = (
        os.fspath(path_or_url).removeprefix("file://")
        if isinstance(path_or_url, str | os.PathLike)
        else ""
    )
    if not _is_checkpoint(path):
        checkpoint = load(path_or_url, map_location=map_location, weights_only=weights_only)
        if not isinstance(checkpoint, dict) or _TYPES not in checkpoint:
            return checkpoint
        from lightning_ptdp.checkpoint import with_types

        return with_types(checkpoint, path)
    from lightning_ptdp.checkpoint import read_whole

    return read_whole(path, map_location, trusted=weights_only is False)


def find_last(find: Callable[..., set[str]], saver: Any, trainer: Trainer) -> set[str]:
    """Return the addresses of the last checkpoints of a saver.

    A folder is named by its ``metadata.json``, because folders in object storage have no time.
    """
    from lightning_ptdp.checkpoint.remote_path import RemotePath, located

    folder = located(place_of_saves(saver, trainer))
    if not isinstance(folder, RemotePath):
        return find(saver, trainer)
    last = re.compile(rf"{saver.CHECKPOINT_NAME_LAST}(-\d+)?{re.escape(saver.FILE_EXTENSION)}")
    return {
        entry.url if entry.is_file() else f"{entry.url}/metadata.json"
        for entry in folder.iterdir()
        if last.fullmatch(entry.name)
    }


def scan_files_and_folders(
    scan: Callable[..., list[Found]],
    checkpoint_callback: object,
    logged_model_time: dict[str, float],
) -> list[Found]:
    """Return the checkpoints that a logger is to copy, folders among them."""
    folders = _new_folders(checkpoint_callback, logged_model_time)
    return sorted(
        [*scan(checkpoint_callback, logged_model_time), *folders], key=lambda entry: entry[0]
    )


def upload_files_and_folders(upload: Callable[..., None], *args: object) -> None:
    """Let a logger that copies checkpoints (``log_model``) copy folders too."""
    from unittest import mock  # slow to import

    import wandb

    class Artifact(wandb.Artifact):
        def add_file(self, local_path: str, name: str | None = None, **options: object) -> object:
            if not os.path.isdir(local_path):
                return super().add_file(local_path, name=name, **options)
            options.pop("is_tmp", None)
            return self.add_dir(local_path, name=name, **options)

    with mock.patch.object(wandb, "Artifact", Artifact):
        upload(*args)


def parse_file_or_folder(parse: Callable[[LightningCLI], None], cli: LightningCLI) -> None:
    """Let a command line take hyperparameters from a folder.

    They are passed to it as a temporary file.
    """
    subcommand = cli.config.get("subcommand")
    path = cli.config[subcommand].get("ckpt_path") if subcommand else None
    if not isinstance(path, str | os.PathLike) or not _is_checkpoint(os.fspath(path)):
        parse(cli)
        return
    import torch

    from lightning_ptdp.checkpoint import portable, read_state

    with tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
        torch.save(
            {"hyper_parameters": portable(read_state(path).get("hyper_parameters", {}))}, file
        )
        file.flush()
        cli.config[subcommand]["ckpt_path"] = file.name
        parse(cli)
    cli.config[subcommand]["ckpt_path"] = path


def _new_folders(callback: object, uploaded: Mapping[str, float]) -> Iterator[Found]:
    """Yield every folder that a checkpoint callback keeps and that has not been uploaded."""
    checkpoints: dict[str, tuple[object, str]] = {
        getattr(callback, "last_model_path", ""): (
            getattr(callback, "current_score", None),
            "latest",
        ),
        getattr(callback, "best_model_path", ""): (
            getattr(callback, "best_model_score", None),
            "best",
        ),
        **{
            path: (score, "best_k")
            for path, score in getattr(callback, "best_k_models", {}).items()
        },
    }
    for path, (score, tag) in checkpoints.items():
        if (
            os.path.isdir(path)
            and _is_checkpoint(path)
            and (written := os.stat(path).st_mtime) > uploaded.get(path, 0.0)
        ):
            yield written, path, score, tag


def _is_checkpoint(path: str) -> bool:
    is_remote = "://" in path and not path.startswith("http")
    if not is_remote and not os.path.isdir(path):
        return False
    from lightning_ptdp.checkpoint import is_checkpoint

    return is_checkpoint(path)


# ---- Changes of Lightning's modules --------------------------------------------------------------


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
