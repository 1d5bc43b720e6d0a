"""Names of dtypes on the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "add_dtype_argument", "dtype_of"]

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
