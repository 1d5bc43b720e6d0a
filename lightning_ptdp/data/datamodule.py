"""Data module for text, prepared once."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.corpus import DEFAULT_SUFFIXES
from lightning_ptdp.data.data_config import PrepareConfig
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import SplitName, verify_store
from lightning_ptdp.data.prepared_datamodule import PreparedDataModule
from lightning_ptdp.data.stream import SampleStream, TokenStream

__all__ = ["TextDataModule"]


class TextDataModule(PreparedDataModule):
    """Text as batches of tokens.

    The first training process (or ``ptdp prepare``) tokenizes the text into ``data_dir``; later
    runs use that folder.

    Args:
        data_dir: Folder of the prepared data.
        source: A text file, a JSON-lines file, a folder, or a list of them. Default: the sources of
            the standard library.
        suffixes: File name endings to read from a folder.
        text_field: Key of the text in JSON lines.
        undecodable: Treatment of text that is not UTF-8.
        vocabulary_size: Number of ids of the tokenizer. None: that of ``tokenizer_dir``.
        validation_fraction: Fraction of the text used for validation.
        split_seed: Seed of the division into training and validation.
        tokenizer_dir: Folder whose tokenizer is used: another prepared folder, or a Hugging Face
            folder with a tokenizer. Default: learn one from the text. ``ptdp`` uses ``model.path``
            if the model has one.
        overwrite: Prepare again if data_dir was made with other settings or is damaged.
        remote: Address of a prepared folder in a store (s3://, gs://, … as supported by litdata's
            downloaders). The folder is copied to ``data_dir`` and nothing is prepared. Use
            ``local:/path`` for a mounted store.
        prepare_workers: Number of processes that tokenize the text during the preparation.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.
    """

    control_symbols: tuple[str, ...] = ()
    """Additional pieces of the tokenizer, which do not occur in text."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        data_dir: str,
        source: str | list[str] | None = None,
        suffixes: list[str] | None = None,
        text_field: str = "text",
        undecodable: Literal["replace", "skip", "error"] = "replace",
        vocabulary_size: int | None = 8192,
        validation_fraction: float = 0.03,
        split_seed: int = 0,
        tokenizer_dir: str | None = None,
        overwrite: bool = False,
        remote: str | None = None,
        prepare_workers: int = 1,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(TextDataModule.__init__, locals())
        prepare_config = PrepareConfig(
            output=data_dir,
            source=source,
            suffixes=DEFAULT_SUFFIXES if suffixes is None else tuple(suffixes),
            text_field=text_field,
            undecodable=undecodable,
            vocabulary_size=vocabulary_size,
            validation_fraction=validation_fraction,
            seed=split_seed,
            tokenizer_dir=tokenizer_dir,
            overwrite=overwrite,
            num_workers=prepare_workers,
            control_symbols=self.control_symbols,
        )
        super().__init__(
            prepare_config=prepare_config, remote=remote, verify_hashes=verify_hashes, **kwargs
        )
        # Checkpoints name the data folder, which contains the tokenizer.
        self.save_hyperparameters()
        if self.sequence_length >= prepare_config.chunk_tokens:
            raise ValueError(
                f"sequence_length={self.sequence_length} must be less than "
                f"{prepare_config.chunk_tokens}, the number of tokens in a chunk"
            )
        if vocabulary_size is None:
            assert tokenizer_dir is not None, "PrepareConfig has refused that"
            vocabulary_size = load_tokenizer(tokenizer_dir).vocabulary_size
        self.vocabulary_size = vocabulary_size

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """Tokenizer of the prepared data."""
        return load_tokenizer(self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` matches its manifest.

        Raises:
            DataError: It does not match, or it has another vocabulary size.
        """
        verify_store(self.data_dir, hashes=False, vocabulary_size=self.vocabulary_size)

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        return TokenStream(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            max_samples=max_samples,
        )
