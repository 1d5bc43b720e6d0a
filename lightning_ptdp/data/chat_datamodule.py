"""Conversations and instructions for a Trainer, prepared once."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.chat_build import ChatConfig, prepare_chat
from lightning_ptdp.data.chat_format import Learn
from lightning_ptdp.data.chat_store import verify_chat
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.manifest import SPLITS, Manifest, SplitName
from lightning_ptdp.data.stream_datamodule import StreamDataModule

__all__ = ["ChatDataModule"]

_log = logging.getLogger(__name__)


class ChatDataModule(StreamDataModule):
    """Chat or instruction data as batches in which the answers are learned: ``{"input_ids",
    "labels"}`` and, of packed samples, ``"position_ids"``, int64 of shape (batch, sequence_length),
    labels shifted by one and -100 outside of answers.

    The conversations are written with the tokenizer's own chat template and tokenized into
    ``data_dir`` by the first process that trains (or by ``ptdp prepare``), and found there
    afterwards.

    Args:
        tokenizer_dir: Folder of the tokenizer, mostly the model's. ``ptdp`` takes ``model.path``
            where there is none.
        data_dir: Folder of the prepared data. Default: one in ``ptdp-data`` that is named after the
            data, the tokenizer and the settings.
        path: JSON lines, Parquet, a folder of them, a folder of Hugging Face ``datasets``, or a
            list; none is questions about the standard library's functions, answered by their
            docstrings.
        columns: Names of the columns, by what they hold: ``messages``; or ``prompt`` and
            ``response``; or ``instruction``, ``input`` and ``output``; with ``system``. Default:
            columns of these names.
        chat_template: A file with a Jinja template, in the place of the tokenizer's.
        learn: All answers of a conversation, or its last one only.
        packing: Put several samples into one sequence. Attention does not cross them, so that loss
            and gradients are those of the samples apart, and less is filled up.
        too_long: What becomes of a sample that is longer than the sequence: cut off, dropped, or an
            error. How many there are is said.
        faulty: Whether a row that the template does not take, or without an answer, is an error or
            left out.
        validation_path: Data for validation. Default: a part of ``path``.
        validation_fraction: Part of the samples that is kept for validation.
        split_seed: Of the choice of samples.
        overwrite: Prepare again where data_dir was made with other settings or is damaged.
        prepare_workers: Processes that tokenize, once.
        verify_hashes: Compare every file's hash before training, not only its size.
        kwargs: Those of ``StreamDataModule``: sequence_length, batch sizes, seed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
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
        super().__init__(**kwargs)
        config = ChatConfig(
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
            data_dir = config.folder
        # Checkpoints name the data folder, in which the tokenizer is.
        self.save_hyperparameters()
        self.prepare_config = replace(config, output=data_dir or "")
        self.data_dir = Path(self.prepare_config.output)
        self.packing, self.too_long = packing, too_long
        self.verify_hashes = verify_hashes

    @cached_property
    def vocabulary_size(self) -> int:  # type: ignore[override]
        """Number of ids of the tokenizer."""
        return self.prepare_config.tokenizer().vocabulary_size

    @property
    def hparams_initial(self) -> AttributeDict:
        """Return the hyperparameters for loggers, with the data's path under another name than the
        model's."""
        values = super().hparams_initial
        return AttributeDict(
            {"data_path" if name == "path" else name: value for name, value in values.items()}
        )

    def check(self, *, num_replicas: int = 1) -> None:
        """Find what is wrong before a process is started: the data, their columns, the tokenizer
        and its template; and where they are prepared already, whether they fit. Writes nothing.

        Raises:
            DataError: Says what is wrong, and the mend.
            ValueError: The batch sizes do not divide for so many replicas.
        """
        self.batch_plans(num_replicas=num_replicas)
        if self.prepare_config.check(hashes=self.verify_hashes) is not None:
            super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Make ``data_dir``, and say how many samples are too long; Lightning calls this in one
        process of a node.

        Raises:
            DataError: A row is faulty, or too long.
        """
        prepare_chat(self.prepare_config, hashes=self.verify_hashes)
        for split in SPLITS:
            stream = self._stream(split)
            longer = (
                f"; {stream.longer:,} longer than {self.sequence_length} tokens: {self.too_long}"
                if stream.longer
                else ""
            )
            _log.info(
                "%s: %s samples in %s sequences%s",
                split,
                f"{stream.samples:,}",
                f"{len(stream):,}",
                longer,
            )

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` is what the manifest says.

        Raises:
            DataError: It is not.
        """
        verify_chat(self.data_dir, hashes=False)

    def _places(self) -> list[str]:
        return [str(self.data_dir)]

    def _text(self) -> list[str]:
        return Manifest.read(self.data_dir).corpus.source

    def _stream(self, split: SplitName, max_samples: int | None = None) -> ChatStream:
        return ChatStream(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            packing=self.packing,
            too_long=self.too_long,
            max_samples=max_samples,
        )
