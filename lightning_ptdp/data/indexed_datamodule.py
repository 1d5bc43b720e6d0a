"""Data module for Megatron's indexed files."""

from __future__ import annotations

from typing import Any

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.data.indexed import IndexedFile, indexed_stream
from lightning_ptdp.data.manifest import SplitName
from lightning_ptdp.data.number_checks import check_fraction
from lightning_ptdp.data.stream import SampleStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule
from lightning_ptdp.data.token_store import ChunkMap

__all__ = ["IndexedDataModule"]


class IndexedDataModule(StreamDataModule):
    """Tokens prepared by Megatron-LM's (or NeMo's) ``preprocess_data.py``.

    The files ``PREFIX.bin`` and ``PREFIX.idx`` are read in place.

    Batches, order and resuming are those of ``TextDataModule``. Documents are joined as they are
    stored: ``--append-eod`` decided whether a token ends each of them.

    Args:
        data_prefix: Path of the files without ``.bin`` and ``.idx``.
        vocabulary_size: Number of ids of the tokenizer that made the files.
        validation_prefix: Files for validation. Default: the last documents of ``data_prefix``,
            which are then excluded from training.
        validation_fraction: Approximate fraction of the tokens in these documents.
        verify_tokens: Read all tokens once before training and compare them with
            ``vocabulary_size``. The tokens of a batch are always compared.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        data_prefix: str,
        vocabulary_size: Size,
        validation_prefix: str | None = None,
        validation_fraction: float = 0.03,
        verify_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(IndexedDataModule.__init__, locals())
        super().__init__(**kwargs)
        self.save_hyperparameters()
        check_fraction("validation_fraction", validation_fraction)
        self.data_prefix, self.validation_prefix = data_prefix, validation_prefix
        self.vocabulary_size = vocabulary_size
        self.validation_fraction = validation_fraction
        self.verify_tokens = verify_tokens

    def prepare_data(self) -> None:
        """Check the tokens; Lightning calls this in one process per node.

        Raises:
            StoreError: The files are damaged, or a token is outside the vocabulary.
        """
        for prefix in self._places() if self.verify_tokens else ():
            chunks = IndexedFile(prefix).chunks("all", self.validation_fraction)
            ChunkMap(chunks, vocabulary_size=self.vocabulary_size).check()

    def _places(self) -> list[str]:
        return [
            prefix for prefix in (self.data_prefix, self.validation_prefix) if prefix is not None
        ]

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        apart = self.validation_prefix is not None
        return indexed_stream(
            self._places()[-1] if split == "validation" else self.data_prefix,
            split="all" if apart else split,
            sequence_length=self.sequence_length,
            vocabulary_size=self.vocabulary_size,
            validation_fraction=self.validation_fraction,
            max_samples=max_samples,
        )
