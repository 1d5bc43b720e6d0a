"""Tables that programs write into documentation pages, between two marks."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_between_marks"]


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Replace the text between ``<!-- name: begin -->`` and ``<!-- name: end -->`` in a page.

    Raises:
        ValueError: The page lacks one of the marks.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, opened, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(
            f"{page} has no lines {begin} and {end}, between which the table is written"
        )
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
