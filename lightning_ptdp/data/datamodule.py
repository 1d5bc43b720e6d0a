"""Data module for text, and the base of those that prepare a folder, or copy one from a store."""

from __future__ import annotations

import contextlib
import shutil
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.base.untrusted import MOST_BYTES, inside, reason, regular_size
from lightning_ptdp.checkpoint.remote_path import RemotePath, check_address, is_url
from lightning_ptdp.data.corpus import DEFAULT_SUFFIXES
from lightning_ptdp.data.corpus_build import PrepareConfig
from lightning_ptdp.data.data_error import StoreError
from lightning_ptdp.data.huggingface_tokenizer import AnyTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    SplitName,
    check_file,
    verify_store,
)
from lightning_ptdp.data.preparation_work import work_folder
from lightning_ptdp.data.prepare import Preparation, check_prepare, prepare
from lightning_ptdp.data.stream import SampleStream, TokenStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule


class PreparedDataModule(StreamDataModule):
    """Batches of a folder that the first training process prepares or copies.

    Args:
        prepare_config: Configuration of the preparation.
        remote: Address of a prepared folder to copy instead.
        verify_hashes: Compare the hash of every file before training, not only its size.
        kwargs: Arguments of ``StreamDataModule``.
    """

    def __init__(
        self,
        *,
        prepare_config: Preparation,
        remote: str | None = None,
        verify_hashes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.prepare_config = prepare_config
        self.data_dir = Path(prepare_config.output)
        self.remote = remote
        self.verify_hashes = verify_hashes

    def check(self, *, num_replicas: int = 1) -> None:
        """Check source and folder before a process is started; write nothing.

        If the data are already prepared, check also that they hold the samples of a step of
        ``num_replicas`` replicas.

        Raises:
            DataError: See ``check_prepare`` and ``TokenLoader``.
            ValueError: The batch sizes do not divide for this number of replicas.
        """
        self.batch_plans(num_replicas=num_replicas)
        if self.remote is not None:
            available = self.data_dir.exists()
            if not available:
                check_address(f"{self.remote.rstrip('/')}/{MANIFEST_FILE}")
        else:
            available = check_prepare(self.prepare_config, hashes=self.verify_hashes) is not None
        if available:
            super().check(num_replicas=num_replicas)

    def prepare_data(self) -> None:
        """Prepare or copy ``data_dir``; Lightning calls this in one process per node.

        Raises:
            DataError: See ``prepare`` and ``fetch``.
        """
        if self.remote is not None:
            fetch(self.remote, self.data_dir, hashes=self.verify_hashes)
        else:
            prepare(self.prepare_config, hashes=self.verify_hashes)

    def setup(self, stage: str | None = None) -> None:
        """Check in every process that ``data_dir`` matches its manifest.

        Raises:
            DataError: It does not match.
        """
        verify_store(self.data_dir, hashes=False)

    def _places(self) -> list[str]:
        return [str(self.data_dir)]

    def _text(self) -> list[str]:
        return Manifest.read(self.data_dir).corpus.source


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
        remote: Address of a prepared folder in a store (any address of fsspec: s3://, gs://, …).
            The folder is copied to ``data_dir`` and nothing is prepared. Use
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


# ---- Copies of prepared folders in remote stores -------------------------------------------------
#
# The full folder is copied before training, file by file, and checked against its manifest.
# Training therefore reads only checked data, and a rank never waits for a network.

_LOCAL = "local:"


def fetch(remote: str, folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Copy a prepared folder, or verify an existing copy.

    After an interrupted call, only the missing files are copied.

    Args:
        remote: Address of the folder; a path, or ``local:/path``, for a mounted store.
        folder: Folder of the copy. It appears complete or not at all.
        hashes: Compare the hashes of an existing copy, not only the sizes. The hashes of copied
            files are always compared.

    Raises:
        StoreError: A file cannot be fetched or does not match the manifest; the message names it.
    """
    output = Path(folder)
    if output.exists():
        return verify_store(output, hashes=hashes)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(output, {"remote": remote}) as work:
            copy = work / "store"
            incoming = work / "incoming"
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir()
            transfer = partial(_transfer, remote.rstrip("/"), incoming)
            # Fetch the manifest in every call: the store may have been repaired since.
            manifest_file = transfer(MANIFEST_FILE)
            for name, path, record in Manifest.read(incoming).paths(copy):
                with contextlib.suppress(StoreError):
                    check_file(path, record)
                    continue  # an earlier call has copied it
                fetched = transfer(name, record.size)
                check_file(fetched, record, name=f"{remote}/{name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                fetched.replace(path)
            manifest_file.replace(copy / MANIFEST_FILE)
            manifest = verify_store(copy, hashes=False)  # the hashes were compared one by one
            copy.rename(output)
    except OSError as error:
        if output.exists():  # another process was faster
            return verify_store(output)
        raise StoreError(
            f"{output} cannot be written: {error}. Copied files are kept for the next call"
        ) from error
    return manifest


def _transfer(remote: str, incoming: Path, name: str, size: int | None = None) -> Path:
    """Fetch a file into a folder of its own, and return its path there.

    Its name there does not depend on the store. The size is checked before the transfer: it must
    be ``size``, or small if ``size`` is None.
    """
    target = incoming / (MANIFEST_FILE if name == MANIFEST_FILE else "file")
    try:
        if is_url(remote):
            source = RemotePath(f"{remote}/{name}")
            _check_size(source.size(), size)
            target.write_bytes(source.read_bytes())
        else:
            file = inside(remote.removeprefix(_LOCAL), name)
            _check_size(regular_size(file), size)
            shutil.copyfile(file, target)
    except (OSError, ValueError) as error:
        raise StoreError(f"{remote}/{name} cannot be fetched: {reason(error)}") from error
    return target


def _check_size(actual: int, size: int | None) -> None:
    if actual != size and (size is not None or actual > MOST_BYTES):
        raise ValueError(
            f"it has {actual} bytes, but must have "
            f"{f'at most {MOST_BYTES}' if size is None else size}"
        )
