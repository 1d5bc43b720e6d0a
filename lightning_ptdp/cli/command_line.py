"""The options of a command line, split before the parser runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CONFIG", "Option", "listed", "options_on"]

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
    found: list[Option] = []
    for word in line:
        name, given, value = word.partition("=")
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            found.append(Option((word,), name, value if given else None))
        elif found and found[-1].name and found[-1].value is None:
            found[-1] = Option((*found[-1].words, word), found[-1].name, word)
        else:
            found.append(Option((word,), ""))
    return found


def listed(text: str) -> list[str]:
    """Return the comma-separated values of ``text``."""
    return [part.strip() for part in text.split(",")]
