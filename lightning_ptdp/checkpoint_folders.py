"""Functions that make Lightning read and upload checkpoint folders of this package.

By default Lightning accepts only checkpoint files. Each function gets the function of Lightning
that it replaces as first argument. This file imports nothing heavy: see autoload.py, which replaces
the functions when a module of Lightning is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_ptdp.shims.lightning import LightningCLI, Trainer, place_of_saves

# key checkpoint.single_file.TYPES, repeated here because that module imports torch
_TYPES = "lightning_ptdp_types"

Found = tuple[float, str, object, str]
"""Time at which a checkpoint was written, its path, its score, and its kind."""


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

    A folder is named by its ``metadata.json``, because folders in object storage have no time."""
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
    with _artifacts_of_folders():
        upload(*args)


def parse_file_or_folder(parse: Callable[[LightningCLI], None], cli: LightningCLI) -> None:
    """Let a command line take hyperparameters from a folder.

    They are passed to it as a temporary file."""
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


@contextlib.contextmanager
def _artifacts_of_folders() -> Iterator[None]:
    """Let new W&B artifacts accept a folder as a file, inside the context."""
    import wandb

    plain = wandb.Artifact

    class Artifact(plain):  # type: ignore[misc, valid-type]
        def add_file(self, local_path: str, name: str | None = None, **options: object) -> object:
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
    is_remote = "://" in path and not path.startswith("http")
    if not is_remote and not os.path.isdir(path):
        return False
    from lightning_ptdp.checkpoint import is_checkpoint

    return is_checkpoint(path)
