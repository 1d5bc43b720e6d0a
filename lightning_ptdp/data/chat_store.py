"""Tokenized conversations on disk, at their full length.

They are cut or packed into sequences only when they are read.

::

    <data_dir>/
      manifest.json          as of every prepared folder
      tokenizer/             the tokenizer's own files
      train/                 tokens.bin     all samples' ids, joined
                             learned.bin    a byte a token: whether it is of an answer
                             boundaries.bin int64; sample i is tokens[boundaries[i] : boundaries[i + 1]]
      validation/            the same
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.manifest import SPLITS, Manifest, SplitName, check_files
from lightning_ptdp.data.token_store import check_ids

__all__ = ["FORM", "ChatStore", "Sample", "verify_chat"]

FORM = "chat"
"""Name of this format in a manifest."""
_TOKENS = "tokens.bin"

Sample = tuple[np.ndarray, np.ndarray]


class ChatStore:
    """Samples of one split, mapped into memory.

    Attributes:
        lengths: Number of tokens of every sample, int64.

    Raises:
        StoreError: The folder is not prepared chat data, or is damaged.
    """

    def __init__(self, folder: str | Path, split: SplitName) -> None:
        self._folder, self._split = Path(folder), split
        manifest = Manifest.read(folder)
        if manifest.settings.get("form") != FORM:
            raise StoreError(
                f"{folder} holds text and no conversations: use TextDataModule, or another data_dir"
            )
        held = manifest.splits[split]
        self.fingerprint = manifest.fingerprint(split)
        self._boundaries = self._map("boundaries.bin", "int64", held.documents + 1)
        self._tokens = self._map(_TOKENS, held.dtype, held.tokens)
        self._learned = self._map("learned.bin", "bool", held.tokens)
        self.lengths = np.diff(self._boundaries)
        if (
            self._boundaries[0] != 0
            or (self.lengths < 2).any()
            or self._boundaries[-1] != held.tokens
        ):
            raise StoreError(
                f"{self._folder / split / 'boundaries.bin'} is damaged: prepare the data again "
                "with overwrite"
            )
        self.vocabulary_size = manifest.vocabulary_size

    def __reduce__(self) -> tuple[type[ChatStore], tuple[Path, SplitName]]:
        """Pickle only the path; the copy maps the files again."""
        return ChatStore, (self._folder, self._split)

    def read(self, index: int) -> Sample:
        """Return the ids of one sample, and a mask of the learned ones.

        Raises:
            StoreError: An id is outside the vocabulary.
        """
        here = slice(int(self._boundaries[index]), int(self._boundaries[index + 1]))
        tokens = self._tokens[here]
        check_ids(tokens, self.vocabulary_size, self._folder / self._split / _TOKENS)
        return tokens, self._learned[here]

    def check(self) -> None:
        """Read all tokens once and compare them with the vocabulary.

        Raises:
            StoreError: A token is outside the vocabulary.
        """
        check_ids(self._tokens, self.vocabulary_size, self._folder / self._split / _TOKENS)

    def learned_within(self, most: int) -> np.ndarray:
        """Return whether each sample has something to learn in its first ``most`` tokens, bool.

        The first token of a sample is never predicted and does not count.
        """
        ends = zip(self._boundaries[:-1], self._boundaries[1:], strict=True)
        return np.array([self._learned[start:stop][1:most].any() for start, stop in ends], bool)

    def _map(self, name: str, dtype: str, length: int) -> np.ndarray:
        path = self._folder / self._split / name
        try:
            return np.memmap(path, dtype, "r", shape=(length,))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path} cannot be read: {error}; prepare the data again with overwrite"
            ) from error


def verify_chat(folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Check a prepared folder against its manifest.

    With ``hashes``, also compare all tokens with the vocabulary.

    Raises:
        StoreError: The message names the first wrong file.
    """
    manifest = Manifest.read(folder)
    check_files(folder, manifest, hashes=hashes)
    for split in SPLITS:
        store = ChatStore(folder, split)
        if hashes:
            store.check()
    return manifest
