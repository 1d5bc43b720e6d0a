"""The options of a command line, and checks of their values."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ptdp.cli.error_messages import UserError, explain

if TYPE_CHECKING:
    import torch


CONFIG = ("--config", "-c")
_NUMBER = re.compile(r"-[\d.].*")


@dataclass(frozen=True)
class Option:
    """An option with its value, or a positional word.

    Attributes:
        words: The words of the command line, unchanged.
        name: Name of the option with its dashes; "" for a positional word.
        value: Text after "=", or the next word; None if the option has no value.
    """

    words: tuple[str, ...]
    name: str
    value: str | None = None


def options_on(line: Iterable[str]) -> list[Option]:
    """Return the options of a command line, in order."""
    options: list[Option] = []
    for word in line:
        name, equals, value = word.partition("=")
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            options.append(Option((word,), name, value if equals else None))
        elif options and options[-1].name and options[-1].value is None:
            options[-1] = Option((*options[-1].words, word), options[-1].name, word)
        else:
            options.append(Option((word,), ""))
    return options


def listed(text: str) -> list[str]:
    """Return the comma-separated values of ``text``."""
    return [part.strip() for part in text.split(",")]


# ---- Names of dtypes on the command line ---------------------------------------------------------


DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--dtype`` to a parser."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="convert the model's floating-point tensors (default: unchanged)",
    )


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the torch dtype called ``name``, or None for None."""
    import torch

    return None if name is None else getattr(torch, name)


# ---- Checks of files before the command line writes them -----------------------------------------


_PICTURES = (".png", ".pdf", ".svg")


def check_output(path: str | None) -> None:
    """Check that the file of ``--output`` can be written.

    Raises:
        UserError: It is a folder.
        ValueError: Its folder cannot be made or is not writable.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise UserError(f"--output {path} is a folder. Give a file in it")
    from lightning_ptdp.loggers.tracking_store import check_writable_folder

    check_writable_folder(Path(path).absolute().parent, f"--output {path}")


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


# ---- Messages held back until the command line has been checked ----------------------------------


_LOGGERS = (None, "lightning", "lightning.fabric", "lightning.pytorch")

_Held = list[tuple[logging.Handler, logging.LogRecord]]


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back Lightning's messages while a run is built and checked.

    The messages are printed afterwards. They are dropped if the run is refused, because they would
    hide the error message.
    """
    held: _Held = []
    handlers = {
        handler: functools.partial(_keep, held, handler)
        for name in _LOGGERS
        for handler in logging.getLogger(name).handlers
    }
    for handler, keep in handlers.items():
        handler.addFilter(keep)
    try:
        yield
    except Exception as error:
        if explain(error) is not None:
            held.clear()
        raise
    finally:
        for handler, keep in handlers.items():
            handler.removeFilter(keep)
        for handler, record in held:
            handler.handle(record)


def _keep(held: _Held, handler: logging.Handler, record: logging.LogRecord) -> bool:
    if record.levelno > logging.INFO:
        return True
    held.append((handler, record))
    return False
