"""Pairs of a chosen and a rejected answer: preparation, random access, and the data module.

A pair is stored as two conversations that differ in their last message, the chosen one first. Only
these answers are learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_format import ChatFormat
from lightning_ptdp.data.chat_stream import ChatStream
from lightning_ptdp.data.conversations import Columns, Conversation, FaultyRow
from lightning_ptdp.data.loader import EvaluationLoader
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING
from lightning_ptdp.data.token_store import mark_sample

_ROUNDED = 64
"""Batches are as long as their longest answer, rounded up to a multiple of this."""


@dataclass(frozen=True)
class PreferenceColumns(Columns):
    """Names of the columns that hold a pair.

    Attributes:
        names: Mapping from content to column: ``chosen`` and ``rejected``, optionally ``prompt``
            and ``system``.
    """

    forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
    needed = "chosen and rejected"
    example = "{prompt: question, chosen: better, rejected: worse}"

    def pair(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        """Return the two conversations of a row.

        Raises:
            FaultyRow: An answer is missing or empty, or the conversations do not differ in exactly
                their last answer.
        """
        chosen, rejected = (self._conversation(row, key) for key in ("chosen", "rejected"))
        if chosen == rejected:
            raise FaultyRow("the chosen and the rejected answer are equal. Remove the row")
        if chosen[:-1] != rejected[:-1]:
            raise FaultyRow(
                "the chosen and the rejected conversation differ before their last answer. End "
                "both at the first answer that differs"
            )
        return chosen, rejected

    def _conversation(self, row: Mapping[str, Any], key: str) -> Conversation:
        column = self.names[key]
        if not row.get(column):
            raise FaultyRow(
                f"column {column!r} has no answer, but a pair needs a chosen and a rejected one. "
                "Add it, or remove the row"
            )
        messages = self.said(row, key, "assistant")
        if messages[0]["role"] == "assistant":
            if "prompt" not in self.names:
                raise FaultyRow(
                    f"column {column!r} begins with an answer, and there is no column prompt. Add "
                    "the question, as a column or as the first message"
                )
            messages = [*self.said(row, "prompt", "user"), *messages]
        if messages[-1]["role"] != "assistant":
            raise FaultyRow(
                f"column {column!r} ends with a message of the role {messages[-1]['role']!r}, but "
                "must end with the answer (assistant)"
            )
        return self._checked(row, messages)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(ChatConfig):
    """Source, destination and options of a preparation of pairs.

    ``PreferenceDataModule`` documents the fields.
    """

    form = "preference"
    columns_class = PreferenceColumns
    checks_every_row = True

    def rows(self, path: str | Sequence[str] | None, split: str) -> Iterator[dict[str, Any]]:
        """Yield the rows; without a path, answers beside their words in reverse order."""
        for row in super().rows(path, split):
            if path is not None:
                yield row
                continue
            words = row["response"].split()
            chosen, rejected = " ".join(words), " ".join(reversed(words))
            if chosen != rejected:
                yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}

    def content(self, columns: Any, row: Mapping[str, Any]) -> Any:
        """Return the pair of a row."""
        return columns.pair(row)

    def encode(self, form: ChatFormat, content: Any) -> tuple[Any, np.ndarray, list[Any]]:
        """Return the pair, and the tokens of both conversations with their marks."""
        return content, np.concatenate([mark_sample(*form.encode(part)) for part in content]), []


class PreferenceStream(ChatStream):
    """Random access to the pairs of one split.

    The arguments are those of ``ChatStream`` without packing. A pair counts as too long if either
    conversation is.
    """

    form = "preference"
    per_document = 2

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Return inputs, labels and positions of chosen and rejected, int32 (b, 2, 3, s)."""
        numbers = self.numbers(visits)
        parts = [PADDING if n == PADDING else 2 * n + part for n in numbers for part in (0, 1)]
        rows = self._rows(parts).reshape(len(visits), 2, 3, -1)
        rows[:, 0, 2, 0] = numbers
        return rows

    def as_batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return ``chosen_ids``, ``chosen_labels``, ``rejected_ids``, ``rejected_labels``, ``pair``.

        All are int64 of shape (b, s), and ``pair``, the number of the pair, of shape (b). The
        padding that all rows have at their ends is left out.
        """
        tensors = torch.from_numpy(rows).long()
        used = (tensors[:, :, 1] != IGNORE_INDEX).any(0).any(0).nonzero()
        longest = int(used[-1]) + 1 if len(used) else 1
        length = min(-(-longest // _ROUNDED) * _ROUNDED, self.sequence_length)
        batch = {
            f"{answer}_{name}": tensors[:, part, index, :length].contiguous()
            for part, answer in enumerate(("chosen", "rejected"))
            for index, name in enumerate(("ids", "labels"))
        }
        return {**batch, "pair": tensors[:, 0, 2, 0].contiguous()}


class PreferenceDataModule(ChatDataModule):
    """Pairs of answers as batches for ``LitDPO``.

    A batch is ``{"chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels", "pair"}``, int64
    of shape (batch, s), and ``pair`` of shape (batch). s is the longest sequence of the batch,
    rounded up to 64, and at most ``sequence_length``. Labels are shifted by one, and -100 outside
    of the two answers. The two sequences of a pair are always in the same microbatch.

    Args:
        path: Data as for ``ChatDataModule``, with columns ``chosen`` and ``rejected``. Both hold a
            whole conversation as a list of messages, or they hold only the answer (a text, or a
            list of messages) and a column ``prompt`` holds the question. The conversations differ
            in their last answer. Default: questions about the functions of the standard library.
            The docstring is chosen, and its words in reverse order are rejected.
        columns: Mapping from content to column name, with the keys ``prompt``, ``chosen``,
            ``rejected`` and ``system``. Default: columns with these names.
        kwargs: Further arguments of ``ChatDataModule``.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    config_class = PreferenceConfig
    stream_class = PreferenceStream

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        columns: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path=path, columns=columns, learn="last_answer", packing=False, **kwargs)

    def numbered_pairs(self) -> dict[str, EvaluationLoader]:
        """Return loaders of both splits that read every pair once, over all replicas.

        ``pair`` of a batch is a number in the split, and -1 for a row that fills up the batch.
        """
        train = self._evaluation_loader(self._stream("train"))
        return {"train": train, "validation": self.val_dataloader()}
