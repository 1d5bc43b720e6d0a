"""Word boundaries of tokens, looked up by id without reading the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_ptdp.data.tokenizer import Tokenizer

CLS, SEP, MASK = "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PIECES = (CLS, SEP, MASK)
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, kw_only=True)
class WordVocabulary:
    """Properties of a tokenizer that masking needs.

    A word is a run of letters, digits and underscores with the space before it. Every other
    character is a word of its own, as is every newline and every run of spaces. A piece belongs to
    the word of its first character.

    Attributes:
        pad, cls, sep, mask: Special ids.
        end: Id that ends a document.
        newline: Id of the newline.
        ordinary: Ids that occur in text, int32.
        begins: By id, whether a word begins with this piece.
        closes: By id, whether a word begins after this piece.
    """

    pad: int
    cls: int
    sep: int
    mask: int
    end: int
    newline: int
    ordinary: np.ndarray
    begins: np.ndarray
    closes: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordVocabulary:
        """Read the properties of a tokenizer.

        Raises:
            TokenizerError: It has no [CLS], [SEP] or [MASK].
        """
        pieces = tokenizer.pieces
        ends = [_ends_of(piece) for piece in pieces]
        return cls(
            pad=tokenizer.pad_id,
            cls=tokenizer.control_id(CLS),
            sep=tokenizer.control_id(SEP),
            mask=tokenizer.control_id(MASK),
            end=tokenizer.eos_id,
            newline=pieces.index("\n"),
            ordinary=np.array(
                [index for index in range(len(pieces)) if tokenizer.is_text(index)], np.int32
            ),
            begins=np.array([not _continues(first) for first, _ in ends]),
            closes=np.array([not _continues(last) for _, last in ends]),
        )

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return positions at which words start, the first token included; int64, ascending."""
        starts = self.begins[tokens]
        starts[1:] |= self.closes[tokens[:-1]]
        starts[:1] = True
        return np.flatnonzero(starts)


def _ends_of(piece: str) -> tuple[str, str]:
    """Return the first and last character; a byte above 127 counts as a letter."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        value = int(piece[3:5], 16)
        piece = chr(value) if value < 128 else "x"
    return piece[0], piece[-1]


def _continues(character: str) -> bool:
    return character.isalnum() or character == "_"
