"""Tables for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["columns"]


def columns(rows: Sequence[Sequence[str]], *, words: Collection[int] = ()) -> str:
    """Rows with even columns: those numbered in ``words`` to the left, all others, numbers, to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
