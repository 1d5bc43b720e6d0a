"""Data modules for conversations and instructions, and for pairs of answers, prepared once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.chat_format import ChatFormat, Learn
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.conversations import Columns, Conversation, FaultyRow, Paths, Rows
from lightning_ptdp.data.datamodule import PreparedDataModule
from lightning_ptdp.data.loader import EvaluationLoader
from lightning_ptdp.data.manifest import SPLITS, SplitName
from lightning_ptdp.data.stream import IGNORE_INDEX, PADDING, Batch
from lightning_ptdp.data.token_store import mark_sample

_log = logging.getLogger(__name__)


class ChatDataModule(PreparedDataModule):
    """Chat or instruction data as batches in which the answers are learned.

    A batch is ``{"input_ids", "labels"}``, and with packing ``"position_ids"``: int64 of shape
    (batch, sequence_length). Labels are shifted by one, and -100 outside of answers.

    The conversations are written with the tokenizer's own chat template. The first training process
    (or ``ptdp prepare``) tokenizes them into ``data_dir``; later runs use that folder.

    Args:
        tokenizer_dir: Folder of the tokenizer, usually that of the model. ``ptdp`` uses
            ``model.path`` by default.
        data_dir: Folder of the prepared data. Default: a folder in ``ptdp-data`` named after the
            data, the tokenizer and the settings.
        path: JSON lines, Parquet, a folder of them, a folder of Hugging Face ``datasets``, or a
            list of these. Default: questions about the functions of the standard library, answered
            by their docstrings.
        columns: Mapping from content to column name, with the keys ``messages``; or ``prompt`` and
            ``response``; or ``instruction``, ``input`` and ``output``; each with an optional
            ``system``. Default: columns with these names.
        chat_template: File with a Jinja template that replaces the tokenizer's.
        learn: Learn all answers of a conversation, or only its last one.
        packing: Put several samples into one sequence. Attention does not cross samples. Loss and
            gradients are therefore those of separate samples, with less padding.
        too_long: Treatment of samples that are longer than the sequence: cut, drop, or raise an
            error. Their number is logged.
        faulty: Treatment of rows that the template rejects or that have no answer: raise an error,
            or drop them.
        validation_path: Data for validation. Default: a part of ``path``.
        validation_fraction: Fraction of the samples used for validation.
        split_seed: Seed of the choice of validation samples.
        overwrite: Prepare again if data_dir was made with other settings or is damaged.
        prepare_workers: Number of processes that tokenize during the preparation.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed; and
            ``remote``, as in ``TextDataModule``.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    prepare_config: ChatConfig
    config_class: ClassVar[type[ChatConfig]] = ChatConfig
    stream_class: ClassVar[type[ChatStream]] = ChatStream

    def __init__(  # noqa: PLR0913
        self,
        *,
        tokenizer_dir: str | None = None,
        data_dir: str | None = None,
        path: str | list[str] | None = None,
        columns: dict[str, str] | None = None,
        chat_template: str | None = None,
        learn: Learn = "answers",
        packing: bool = False,
        too_long: TooLong = "error",
        faulty: Literal["error", "drop"] = "error",
        validation_path: str | list[str] | None = None,
        validation_fraction: float = 0.03,
        split_seed: int = 0,
        overwrite: bool = False,
        prepare_workers: int = 1,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(ChatDataModule.__init__, locals())
        config = self._make_config(
            output=data_dir or "",
            tokenizer_dir=tokenizer_dir,
            path=path,
            validation_path=validation_path,
            columns=columns or {},
            chat_template=chat_template,
            learn=learn,
            faulty=faulty,
            validation_fraction=validation_fraction,
            split_seed=split_seed,
            overwrite=overwrite,
            num_workers=prepare_workers,
        )
        if data_dir is None and tokenizer_dir is not None:
            config = replace(config, output=config.folder)
        super().__init__(prepare_config=config, verify_hashes=verify_hashes, **kwargs)
        # Checkpoints name the data folder, which contains the tokenizer.
        self.save_hyperparameters()
        self.packing = packing
        self.too_long = too_long

    @cached_property
    def vocabulary_size(self) -> int:  # type: ignore[override]
        """Number of ids of the tokenizer."""
        return self.prepare_config.given_tokenizer().vocabulary_size

    @property
    def hparams_initial(self) -> AttributeDict:
        """Return the hyperparameters for loggers.

        ``path`` becomes ``data_path``, because the model has a ``path`` too.
        """
        values = super().hparams_initial
        return AttributeDict(
            {"data_path" if name == "path" else name: value for name, value in values.items()}
        )

    def prepare_data(self) -> None:
        """Prepare ``data_dir`` and log how many samples are too long.

        Lightning calls this in one process per node.

        Raises:
            DataError: A row is faulty or too long.
        """
        super().prepare_data()
        for split in SPLITS:
            stream = self._stream(split)
            note = (
                f"; {stream.longer:,} longer than {self.sequence_length} tokens: {self.too_long}"
                if stream.longer
                else ""
            )
            _log.info(
                "%s: %s samples in %s sequences%s",
                split,
                f"{stream.samples:,}",
                f"{len(stream):,}",
                note,
            )

    def _make_config(self, **options: Any) -> ChatConfig:
        return self.config_class(**options)

    def _stream(self, split: SplitName, max_samples: int | None = None) -> ChatStream:
        return self.stream_class(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            packing=self.packing,
            too_long=self.too_long,
            max_samples=max_samples,
        )


# ---- Pairs of a chosen and a rejected answer -----------------------------------------------------
#
# A pair is stored as two conversations that differ in their last message, the chosen one first.
# Only these answers are learned.


_ROUNDED = 64


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

    def content(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
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
        messages = self.messages_in(row, key, "assistant")
        if messages[0]["role"] == "assistant":
            if "prompt" not in self.names:
                raise FaultyRow(
                    f"column {column!r} begins with an answer, and there is no column prompt. Add "
                    "the question, as a column or as the first message"
                )
            messages = [*self.messages_in(row, "prompt", "user"), *messages]
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

    def rows(self, path: Paths, split: str) -> Rows:
        """Yield the rows; without a path, answers, and their words in reverse order."""
        for row in super().rows(path, split):
            if path is not None:
                yield row
                continue
            words = row["response"].split()
            chosen = " ".join(words)
            rejected = " ".join(reversed(words))
            if chosen != rejected:
                yield {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}

    def encode(self, form: ChatFormat, content: Any) -> tuple[Any, np.ndarray, list[Any]]:
        """Return the pair, and the tokens of both conversations with their marks."""
        return content, np.concatenate([mark_sample(*form.encode(part)) for part in content]), []


class PreferenceStream(ChatStream):
    """Random access to the pairs of one split.

    The arguments are those of ``ChatStream`` without packing. A pair counts as too long if either
    conversation is.

    Attributes:
        multiple: Batches are as long as their longest answer, rounded up to a multiple of this.
    """

    form = "preference"
    per_document = 2
    multiple = _ROUNDED

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Return inputs, labels and positions of chosen and rejected, int32 (b, 2, 3, s)."""
        numbers = self.numbers(visits)
        parts = [PADDING if n == PADDING else 2 * n + part for n in numbers for part in (0, 1)]
        rows = self._rows(parts).reshape(len(visits), 2, 3, -1)
        rows[:, 0, 2, 0] = numbers
        return rows

    def as_batch(self, rows: np.ndarray) -> Batch:
        """Return ``chosen_ids``, ``chosen_labels``, ``rejected_ids``, ``rejected_labels``, ``pair``.

        All are int64 of shape (b, s), and ``pair``, the number of the pair, of shape (b). The
        padding that all rows have at their ends is left out.
        """
        tensors = torch.from_numpy(rows).long()
        used = (tensors[:, :, 1] != IGNORE_INDEX).any(0).any(0).nonzero()
        longest = int(used[-1]) + 1 if len(used) else 1
        length = min(-(-longest // self.multiple) * self.multiple, self.sequence_length)
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
    rounded up to 64 (or to a length that the layout can split), and at most ``sequence_length``.
    Labels are shifted by one, and -100 outside of the two answers. The two sequences of a pair are
    always in the same microbatch.

    Args:
        path: Data as for ``ChatDataModule``, with columns ``chosen`` and ``rejected``. Both hold a
            full conversation as a list of messages, or they hold only the answer (a text, or a
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

    def _stream(self, split: SplitName, max_samples: int | None = None) -> ChatStream:
        stream = super()._stream(split, max_samples)
        layout: Any = getattr(getattr(self.trainer, "strategy", None), "layout", None)
        if layout is not None and isinstance(stream, PreferenceStream):
            slices = layout.size("tensor") if layout.sequence_parallel else 1
            # A context rank takes two chunks, and its tensor-parallel ranks split them.
            stream.multiple = math.lcm(_ROUNDED, 2 * layout.size("context") * slices)
        return stream
