"""Data module for several prepared folders, in the ratio of their weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypedDict

from lightning_ptdp.base.option_types import Size, check_arguments
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import SplitName, verify_store
from lightning_ptdp.data.mixture_stream import MixtureStream, Turns
from lightning_ptdp.data.stream import SampleStream, TokenStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule


class CorpusOptions(TypedDict):
    """One corpus of a mixture.

    A plain mapping, because checkpoints and YAML files contain it.
    """

    data_dir: str
    """Folder that ``prepare`` made."""
    weight: float
    """Share of the samples, in any unit."""


class MixtureDataModule(StreamDataModule):
    """Batches of several corpora, mixed in the ratio of their weights.

    Each corpus has its own order and its own epochs. In the first n samples, each corpus has its
    share of n to within one sample, for every n and in any layout. An epoch has as many samples as
    all corpora hold together. Validation takes the validation samples of each corpus once, in the
    same ratio, until one corpus has no more; the loss is that of the mixture.

    All folders need the same tokenizer: prepare the first, then the rest with ``tokenizer_dir`` set
    to the first.

    Args:
        corpora: List of folders and their weights, such as ``[{"data_dir": "web", "weight": 0.7},
            {"data_dir": "code", "weight": 0.3}]``.
        vocabulary_size: Number of ids of their tokenizer.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``: sequence_length, batch sizes, seed.

    Raises:
        ValueError: A value is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        corpora: list[CorpusOptions],
        vocabulary_size: Size = 8192,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(MixtureDataModule.__init__, locals())
        super().__init__(**kwargs)
        self.save_hyperparameters()
        if not corpora:
            raise ValueError(
                f"corpora={corpora!r} is empty. Give a list of "
                f"{{{', '.join(CorpusOptions.__annotations__)}}}"
            )
        Turns.of([corpus["weight"] for corpus in corpora])
        self.corpora = corpora
        self.vocabulary_size = vocabulary_size
        self.verify_hashes = verify_hashes

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """Tokenizer of all folders."""
        return load_tokenizer(self.corpora[0]["data_dir"])

    def check(self, *, num_replicas: int = 1) -> None:
        """Check as ``StreamDataModule.check``, and check files and tokenizers of the folders."""
        self._verify(hashes=self.verify_hashes)
        super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Check the files; Lightning calls this in one process per node.

        Raises:
            StoreError: A folder is not prepared, is damaged, or has another tokenizer.
        """
        self._verify(hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check sizes and tokenizers in every process.

        Raises:
            StoreError: As for ``prepare_data``.
        """
        self._verify(hashes=False)

    def _verify(self, *, hashes: bool) -> None:
        first, *folders = self._places()
        expected = verify_store(
            first, hashes=hashes, vocabulary_size=self.vocabulary_size
        ).tokenizer_fingerprint
        for folder in folders:
            actual = verify_store(folder, hashes=hashes).tokenizer_fingerprint
            if actual != expected:
                raise StoreError(
                    f"{folder} has tokenizer {actual[:12]}, but {first} has {expected[:12]}, and a "
                    f"mixture needs the same one. Prepare {folder} again with tokenizer_dir={first}"
                )

    def _places(self) -> list[str]:
        return [corpus["data_dir"] for corpus in self.corpora]

    def _stream(self, split: SplitName, max_samples: int | None = None) -> SampleStream:
        streams = [
            TokenStream(corpus["data_dir"], split=split, sequence_length=self.sequence_length)
            for corpus in self.corpora
        ]
        weights = [corpus["weight"] for corpus in self.corpora]
        return MixtureStream(streams, weights, repeat=split == "train", max_samples=max_samples)
