"""Text for a Trainer, prepared once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.data.corpus import DEFAULT_SUFFIXES
from lightning_ptdp.data.data_config import PrepareConfig
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import Manifest, SplitName, verify_store
from lightning_ptdp.data.prepare import check_prepare, prepare
from lightning_ptdp.data.remote import fetch
from lightning_ptdp.data.stream import SampleStream, TokenStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule

__all__ = ["TextDataModule"]


class TextDataModule(StreamDataModule):
    """Any text as batches of tokens.

    The text is tokenized into ``data_dir`` by the first process that trains (or by ``ptdp
    prepare``) and found there afterwards.

    Args:
        data_dir: Folder of the prepared data.
        source: A text file, a JSON-lines file, a folder, or a list of them; none is the standard
            library's sources.
        suffixes: Which files of a folder are read.
        text_field: The key that holds the text in JSON-lines.
        undecodable: What to do with text that is not UTF-8.
        vocabulary_size: Number of ids of the tokenizer; None: as many as that of ``tokenizer_dir``
            has.
        validation_fraction: Part of the text that is kept for validation.
        split_seed: Of the division into training and validation.
        tokenizer_dir: Another prepared folder, whose tokenizer is taken, or a folder of Hugging
            Face's with one. Default: learn one from the text; ``ptdp`` takes ``model.path`` where
            the model has one.
        overwrite: Prepare again where data_dir was made with other settings or is damaged.
        remote: Address of a prepared folder in a store (s3://, gs://, …: what litdata has a
            downloader for), which is copied to ``data_dir`` instead of preparing one;
            ``local:/path`` for a mounted one.
        prepare_workers: Processes that tokenize the text, once.
        verify_hashes: Compare every file's hash before training, not only its size.
        kwargs: Those of ``StreamDataModule``: sequence_length, batch sizes, seed.
    """

    control_symbols: tuple[str, ...] = ()
    """Pieces of the tokenizer beside those of the text."""

    def __init__(
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
        super().__init__(**kwargs)
        # Checkpoints name the data folder, in which the tokenizer is.
        self.save_hyperparameters()
        self.prepare_config = PrepareConfig(
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
        if self.sequence_length >= self.prepare_config.chunk_tokens:
            raise ValueError(
                f"sequence_length={self.sequence_length} must be less than "
                f"{self.prepare_config.chunk_tokens} tokens, a chunk"
            )
        self.data_dir = Path(data_dir)
        if vocabulary_size is None:
            assert tokenizer_dir is not None, "PrepareConfig has refused that"
            vocabulary_size = load_tokenizer(tokenizer_dir).vocabulary_size
        self.vocabulary_size = vocabulary_size
        self.remote = remote
        self.verify_hashes = verify_hashes

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """The prepared data's tokenizer."""
        return load_tokenizer(self.data_dir)

    def check(self, *, num_replicas: int = 1) -> None:
        """Find what is wrong before a process is started: the source, the folder, and where the
        data are prepared already whether they hold a step's samples for ``num_replicas`` replicas.
        Writes nothing.

        Raises:
            DataError: See ``check_prepare`` and ``TokenLoader``.
            ValueError: The batch sizes do not divide for so many replicas.
        """
        self.batch_plans(num_replicas=num_replicas)
        if self.remote is not None:
            there = self.data_dir.exists()
        else:
            there = check_prepare(self.prepare_config, hashes=self.verify_hashes) is not None
        if there:
            super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Make ``data_dir``, or copy it; Lightning calls this in one process of a node.

        Raises:
            DataError: See ``prepare`` and ``fetch``.
        """
        if self.remote is not None:
            fetch(self.remote, self.data_dir, hashes=self.verify_hashes)
        else:
            prepare(self.prepare_config, hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` is what the manifest says.

        Raises:
            DataError: It is not, or the samples do not fit.
        """
        manifest = verify_store(self.data_dir, hashes=False)
        wanted = self.vocabulary_size
        if manifest.vocabulary_size != wanted:
            raise StoreError(
                f"data_dir={self.data_dir} has a vocabulary of {manifest.vocabulary_size}, not "
                f"vocabulary_size={wanted}: use "
                "that number, another folder, or overwrite (--overwrite)"
            )

    def _places(self) -> list[str]:
        return [str(self.data_dir)]

    def _text(self) -> list[str]:
        return Manifest.read(self.data_dir).corpus.source

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        return TokenStream(
            self.data_dir,
            split=split,
            sequence_length=self.sequence_length,
            max_samples=max_samples,
        )
