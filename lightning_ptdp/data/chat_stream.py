"""Random access to packed sequences of conversations: inputs, labels and positions.

A sequence holds one conversation, or several with packing.

::

    packed       a0 a1 a2 a3 | b0 b1 b2 | . .        sequence_length = 9
    positions     0  1  2  3    0  1  2   0 1
    labels       a1 a2 a3 a4   b1 b2 b3   - -        -100 where the label is of no answer

The last token of a sample is a label only. Positions restart at every sample; transformers' models
derive from them that attention does not cross samples. Padding is a document of its own without
labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.manifest import Form, Manifest, SplitName
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING, Batch, SampleStream
from lightning_ptdp.data.token_store import LearnedTokens, sample_starts, unmark

TooLong: TypeAlias = Literal["cut", "drop", "error"]


class ChatStream(SampleStream):
    """Random access to the sequences of one split of prepared conversations.

    Args:
        folder: Folder that ``prepare`` made of conversations.
        split: ``"train"`` or ``"validation"``.
        sequence_length: s, tokens of a sequence.
        packing: Put several samples into one sequence.
        too_long: Treatment of samples of more than s + 1 tokens.
        max_samples: Use only this many sequences, from the first on.

    Attributes:
        lengths: Number of tokens of every sample, int64.
        longer: Number of samples (or pairs) of more than s + 1 tokens.
        samples: Number of samples.

    Raises:
        StoreError: The folder is not prepared data, no sample fits, a sample is too long, or a
            sample has nothing to learn after it is cut.
    """

    form: ClassVar[Form] = "chat"
    per_document: ClassVar[int] = 1
    """Samples that belong together."""
    remedies: ClassVar[str] = "cut or drop"

    def __init__(
        self,
        folder: str | Path,
        *,
        split: SplitName = "train",
        sequence_length: Size,
        packing: bool = False,
        too_long: TooLong = "error",
        max_samples: Size | None = None,
    ) -> None:
        check_arguments(ChatStream.__init__, locals())
        manifest = Manifest.read(folder)
        self._tokens = manifest.tokens(folder, split, form=self.form)
        starts = []
        offset = 0
        for tokens in self._tokens:
            starts.append(sample_starts(tokens) + offset)
            offset += len(tokens)
        self._starts = np.concatenate([*starts, [offset]])
        self.lengths = lengths = np.diff(self._starts)
        expected = manifest.splits[split].documents * self.per_document
        if not expected or len(lengths) != expected or self._starts[0] != 0 or lengths.min() < 2:
            raise StoreError(
                f"{Path(folder, split)} is damaged: it does not have {expected} conversations. "
                "Prepare the data again with overwrite"
            )
        longer = lengths > sequence_length + 1
        longer = longer.reshape(-1, self.per_document).any(1).repeat(self.per_document)
        self.longer = int(longer.sum()) // self.per_document
        self.samples = len(lengths) // self.per_document
        self.packing = packing
        self._check(
            longer,
            too_long,
            sequence_length,
            f"{folder}: {self.longer} of {self.samples} {split} samples",
        )
        selected = np.flatnonzero(~longer) if too_long == "drop" else np.arange(len(lengths))
        if not len(selected):
            raise StoreError(
                f"{folder}: no {split} sample has at most sequence_length={sequence_length} (+ "
                f"1) tokens; the shortest has {lengths.min()}"
            )
        sizes = np.minimum(lengths[selected] - 1, sequence_length)
        unpacked = (np.arange(len(selected)), np.arange(len(selected) + 1))
        order, begins = pack(sizes, sequence_length) if packing else unpacked
        self._begins: np.ndarray = begins
        self._order = selected[order]
        super().__init__(
            samples=(len(self._begins) - 1) // self.per_document,
            sequence_length=sequence_length,
            max_samples=max_samples,
            fingerprint=sha256(f"{manifest.fingerprint(split)} {packing} {too_long}".encode()),
        )

    def __getitems__(self, visits: Sequence[int]) -> Any:
        """Return inputs, labels and positions, int32 of shape (b, 3, s)."""
        return self._rows(self.numbers(visits))

    def _rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the rows of sequences by number, or of ``PADDING``."""
        length = self.sequence_length
        rows = np.zeros((len(numbers), 3, length), np.int32)
        rows[:, 1] = IGNORE_INDEX
        for row, number in zip(rows, numbers, strict=True):
            offset = 0
            for sample in (
                self._order[self._begins[number] : self._begins[number + 1]]
                if number != PADDING
                else ()
            ):
                ids, learned = self.read(int(sample), most=length + 1)
                size = len(ids) - 1
                span = slice(offset, offset + size)
                row[0, span] = ids[:-1]
                row[1, span] = np.where(learned[1:], ids[1:], IGNORE_INDEX)
                row[2, span] = np.arange(size)
                offset += size
            row[2, offset:] = np.arange(length - offset)
        return rows

    def as_batch(self, rows: Any) -> Batch:
        """Return ``input_ids``, ``labels`` and, with packing, ``position_ids``.

        All are int64 of shape (b, s).
        """
        tensors = torch.from_numpy(rows).long()
        batch = {"input_ids": tensors[:, 0].contiguous(), "labels": tensors[:, 1].contiguous()}
        return {**batch, "position_ids": tensors[:, 2].contiguous()} if self.packing else batch

    def read(self, sample: int, *, most: int | None = None) -> LearnedTokens:
        """Return the first ``most`` ids of a sample (int32), and a mask of the learned ones.

        Raises:
            StoreError: An id is outside the vocabulary.
        """
        length = int(self.lengths[sample])
        count = length if most is None else min(length, most)
        return unmark(self._tokens.read(int(self._starts[sample]), count))

    def _check(self, longer: np.ndarray, too_long: TooLong, length: int, subject: str) -> None:
        if too_long == "error" and longer.any():
            raise StoreError(
                f"{subject} are longer than sequence_length={length} (+ 1); the longest has "
                f"{self.lengths.max()} tokens. Use a greater sequence_length, or too_long: "
                f"{self.remedies}"
            )
        if too_long == "cut":
            # The first token of a sample is never predicted.
            masks = (
                self.read(sample, most=length + 1)[1] for sample in np.flatnonzero(longer).tolist()
            )
            num_empty = sum(not learned[1:].any() for learned in masks)
            if num_empty:
                raise StoreError(
                    f"{subject} are truncated to sequence_length={length} (+ 1) tokens, and "
                    f"{num_empty} of them have no answer left to learn. Use a greater "
                    "sequence_length, or too_long: drop"
                )


# ---- Packing of samples into sequences: best fit, longest first ----------------------------------
#
# The result is the same for every layout and every epoch.


def pack(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Group samples into few groups of at most ``capacity`` tokens.

    Each sample, the longest first, joins the group with the least room that is sufficient. Samples
    keep their order within a group, and groups are ordered by their first samples. The search takes
    microseconds per sample, because the bits of one integer show which amounts of room exist.

    Args:
        sizes: Tokens of every sample, 1 to ``capacity``.
        capacity: Tokens of a group.

    Returns:
        The samples, group after group, and the beginnings of the groups with the end of the last
        one; both int64.
    """
    groups: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: a group has room for r tokens
    for sample in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[sample])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            group = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            group = len(groups)
            groups.append([])
        groups[group].append(sample)
        left = room - size
        if left:
            by_room.setdefault(left, []).append(group)
            rooms |= 1 << left
    groups = sorted(map(sorted, groups))
    ends = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return np.fromiter(chain.from_iterable(groups), np.int64, len(sizes)), ends
