"""Lightning reads and uploads checkpoint files: these changes have it do the same with the folders of this package.

Imports nothing heavy: see autoload.py, which applies them when a module of Lightning is imported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from lightning_ptdp._lightning import CLIS, LOADERS, UPLOADERS

__all__ = ["parse_folders", "read_folders", "upload_folders"]

_DONE = "_takes_folders"


def read_folders(reader: ModuleType) -> None:
    """Have a module that reads checkpoints read folders too."""
    load = getattr(reader, LOADERS[reader.__name__], None)
    if load is None or hasattr(load, _DONE):
        return

    @wraps(load)
    def load_file_or_folder(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        path = os.fspath(path_or_url).removeprefix("file://") if isinstance(path_or_url, str | os.PathLike) else ""
        if _is_checkpoint(path):
            from lightning_ptdp.checkpoint import read_whole

            return read_whole(path, map_location)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    setattr(load_file_or_folder, _DONE, True)
    setattr(reader, LOADERS[reader.__name__], load_file_or_folder)


def upload_folders(logger: ModuleType) -> None:
    """Have a module with a logger that copies checkpoints (``log_model``) copy folders too."""
    class_name, method = UPLOADERS[logger.__name__]
    scan, upload = getattr(logger, "_scan_checkpoints", None), getattr(getattr(logger, class_name, None), method, None)
    if scan is None or upload is None or hasattr(scan, _DONE):
        return

    @wraps(scan)
    def scan_files_and_folders(
        checkpoint_callback: Any, logged_model_time: dict[str, float]
    ) -> list[tuple[float, str, Any, str]]:
        found = scan(checkpoint_callback, logged_model_time) + list(_new_folders(checkpoint_callback, logged_model_time))
        return sorted(found, key=lambda entry: entry[0])

    @wraps(upload)
    def upload_files_and_folders(self: Any, checkpoint_callback: Any) -> None:
        with _artifacts_of_folders() if class_name == "WandbLogger" else contextlib.nullcontext():
            upload(self, checkpoint_callback)

    setattr(scan_files_and_folders, _DONE, True)
    logger.__dict__["_scan_checkpoints"] = scan_files_and_folders
    setattr(getattr(logger, class_name), method, upload_files_and_folders)


def parse_folders(cli: ModuleType) -> None:
    """Have a module with a command line take hyperparameters from a folder, which is given to it as a file for that time."""
    class_name, method = CLIS[cli.__name__]
    kind = getattr(cli, class_name, None)
    parse = getattr(kind, method, None)
    if kind is None or parse is None or hasattr(parse, _DONE):
        return

    @wraps(parse)
    def parse_file_or_folder(self: Any) -> None:
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not isinstance(path, str | os.PathLike) or not _is_checkpoint(os.fspath(path)):
            parse(self)
            return
        import torch

        from lightning_ptdp.checkpoint import read_state

        with tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
            torch.save({"hyper_parameters": read_state(path).get("hyper_parameters", {})}, file)
            file.flush()
            self.config[subcommand]["ckpt_path"] = file.name
            parse(self)
        self.config[subcommand]["ckpt_path"] = path

    setattr(parse_file_or_folder, _DONE, True)
    setattr(kind, method, parse_file_or_folder)


def _new_folders(callback: Any, uploaded: Mapping[str, float]) -> Iterator[tuple[float, str, Any, str]]:
    """(when it was written, path, score, what it is) of every folder that a checkpoint callback keeps and that has not been uploaded."""
    kept: dict[str, tuple[Any, str]] = {
        getattr(callback, "last_model_path", ""): (getattr(callback, "current_score", None), "latest"),
        getattr(callback, "best_model_path", ""): (getattr(callback, "best_model_score", None), "best"),
        **{path: (score, "best_k") for path, score in getattr(callback, "best_k_models", {}).items()},
    }
    for path, (score, what) in kept.items():
        if _is_checkpoint(path) and (written := os.stat(path).st_mtime) > uploaded.get(path, 0.0):
            yield written, path, score, what


@contextlib.contextmanager
def _artifacts_of_folders() -> Iterator[None]:
    """While in the context, a file that is added to a new W&B artifact may be a folder."""
    import wandb  # type: ignore[import-not-found]

    plain = wandb.Artifact

    class Artifact(plain):  # type: ignore[misc, valid-type]
        def add_file(self, local_path: str, name: str | None = None, **options: Any) -> Any:
            if not os.path.isdir(local_path):
                return super().add_file(local_path, name=name, **options)
            options.pop("is_tmp", None)
            return self.add_dir(local_path, name=name, **options)

    wandb.Artifact = Artifact
    try:
        yield
    finally:
        wandb.Artifact = plain


def _is_checkpoint(path: str) -> bool:
    if not os.path.isdir(path):
        return False
    from lightning_ptdp.checkpoint import is_checkpoint

    return is_checkpoint(path)
