"""Text tables with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["columns"]


def columns(rows: Sequence[Sequence[str]], *, words: Collection[int] = ()) -> str:
    """Return rows with aligned columns.

    The columns with a number in ``words`` are aligned left. All other columns, which hold numbers,
    are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
