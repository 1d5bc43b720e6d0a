"""Data module for conversations and instructions, prepared once."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities.parsing import AttributeDict

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.chat_build import ChatConfig
from lightning_ptdp.data.chat_format import Learn
from lightning_ptdp.data.chat_stream import ChatStream, TooLong
from lightning_ptdp.data.manifest import SPLITS, SplitName
from lightning_ptdp.data.prepared_datamodule import PreparedDataModule

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
        self.packing, self.too_long = packing, too_long

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
