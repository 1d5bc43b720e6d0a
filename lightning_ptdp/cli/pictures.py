"""Checks of picture files before the command line draws them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from lightning_ptdp.cli.error_messages import UserError

__all__ = ["check_picture"]

_PICTURES = (".png", ".pdf", ".svg")


def check_picture(option: str, path: str | Path | None) -> None:
    """Check that a picture can be written.

    Raises:
        UserError: Its suffix is unknown, matplotlib is not installed, or its folder does not exist.
        ValueError: The folder is not writable.
    """
    if path is None:
        return
    if Path(path).suffix not in _PICTURES:
        raise UserError(f"{option} {path} must end in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"{option} {path} needs matplotlib. Run: pip install matplotlib, or leave it out"
        )
    folder = Path(path).absolute().parent
    if not folder.exists():
        raise UserError(
            f"{option} {path}: {folder} does not exist. Create it, or use another folder"
        )
    from lightning_ptdp.loggers.tracking_store import check_writable_folder

    check_writable_folder(folder, f"{option} {path}")
