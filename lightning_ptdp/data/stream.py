"""The token blocks of a prepared split, by number, as batches of inputs and labels.

A block is ``sequence_length + 1`` consecutive tokens, and blocks do not overlap: inputs are all but the last token, labels all
but the first, so that every input has its label and one token in ``sequence_length + 1`` is a label only. Documents are joined, each
followed by its end token; a block may hold parts of several. The last tokens of a chunk that fill no block are left out.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_ptdp.data.checks import check_integer
from lightning_ptdp.data.errors import StoreError
from lightning_ptdp.data.manifest import Manifest, SplitName
from lightning_ptdp.data.order import sample_visits
from lightning_ptdp.data.store import ChunkMap

__all__ = ["IGNORE_INDEX", "PADDING", "BlockStream", "SampleStream", "TokenStream"]

IGNORE_INDEX = -100
"""Label that no loss counts (the default of ``torch.nn.functional.cross_entropy``)."""

PADDING = -1
"""Sample number of a row that only fills up a batch: input ids 0, labels ``IGNORE_INDEX``."""


class SampleStream(Protocol):
    """What the loaders read: samples by number.

    A visit names a sample and the time that it is read, when it may look different: mostly ``epoch * len(stream) + sample``.

    Attributes:
        sequence_length: s, tokens of a sample.
        fingerprint: Equal for equal samples.
    """

    sequence_length: int
    fingerprint: str

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample, in the first epoch."""
        ...

    def visits(self, numbers: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Which visits the sample numbers of training stand for, counted over all epochs; int64 of the same shape."""
        ...

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """Rows of samples (b, ...) by visit or ``PADDING``, in the form in which worker processes send them."""
        ...

    def as_batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The batch that rows are made into."""
        ...


class BlockStream(Dataset[dict[str, torch.Tensor]]):
    """Random access to blocks of s + 1 tokens; subclasses say where they are (``_read``).

    Args:
        blocks: How many there are.
        sequence_length: s, tokens of a sample.
        max_samples: Use the first so many blocks only.
        fingerprint: Equal for equal data.
    """

    def __init__(self, *, blocks: int, sequence_length: int, max_samples: int | None, fingerprint: str) -> None:
        self.sequence_length = sequence_length
        self.fingerprint = fingerprint
        self._blocks = blocks if max_samples is None else min(blocks, max_samples)

    @abstractmethod
    def _read(self, index: int) -> np.ndarray:
        """Block ``index``: s + 1 tokens, of any integer type."""

    def __len__(self) -> int:
        """Number of samples."""
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample: ``input_ids`` and ``labels``, int64 of shape (s,)."""
        return {name: rows[0] for name, rows in self.batch([index]).items()}

    def visits(self, numbers: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Visits in the order of training."""
        return sample_visits(numbers, size=self._blocks, seed=seed, shuffle=shuffle)

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        """What a DataLoader calls; see ``blocks``. A sample is the same in every epoch."""
        return self.blocks([PADDING if visit == PADDING else visit % self._blocks for visit in visits])

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 of shape (b, s); the index ``PADDING`` gives an ignored row."""
        return self.as_batch(self.blocks(indices))

    def blocks(self, indices: Sequence[int]) -> np.ndarray:
        """Blocks, int32 of shape (b, s + 1); rows of ``PADDING`` for that index.

        The form in which worker processes send them: a quarter of a batch, and no shared memory to set up.
        """
        blocks_bs = np.full((len(indices), self.sequence_length + 1), PADDING, np.int32)
        for row, index in enumerate(indices):
            if index != PADDING:
                if not 0 <= index < self._blocks:
                    raise IndexError(f"sample {index} of {self._blocks}")
                blocks_bs[row] = self._read(int(index))
        return blocks_bs

    def as_batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, int64 of shape (b, s), of blocks of s + 1 tokens."""
        tokens_bs = torch.from_numpy(rows).long()
        inputs_bs, labels_bs = tokens_bs[:, :-1].contiguous(), tokens_bs[:, 1:].contiguous()
        padding_b = tokens_bs[:, 0] == PADDING
        inputs_bs[padding_b] = 0
        labels_bs[padding_b] = IGNORE_INDEX
        return {"input_ids": inputs_bs, "labels": labels_bs}


class TokenStream(BlockStream):
    """Random access to the blocks of one split of a prepared folder; opened anew in every process that reads it.

    Args:
        folder: What ``prepare`` made (verify it first: ``verify_store``).
        split: ``"train"`` or ``"validation"``.
        sequence_length: s, tokens of a sample.
        max_samples: Use the first so many blocks only.

    Raises:
        StoreError: The folder is not prepared data, or the split holds no block of this length.
    """

    def __init__(
        self, folder: str | Path, *, split: SplitName = "train", sequence_length: int, max_samples: int | None = None
    ) -> None:
        check_integer("sequence_length", sequence_length)
        if max_samples is not None:
            check_integer("max_samples", max_samples)
        manifest = Manifest.read(folder)
        self._folder, self._record, self._vocabulary_size = Path(folder, split), manifest.splits[split], manifest.vocabulary_size
        self._map: tuple[int, ChunkMap] | None = None
        self._block_size = sequence_length + 1
        chunks = self._open().chunks if self._record.tokens else ()
        blocks = sum(chunk.tokens // self._block_size for chunk in chunks)
        if not blocks:
            tokens, longest = self._record.tokens, max((chunk.tokens for chunk in chunks), default=0)
            raise StoreError(
                f"{folder}: no {split} sample of sequence_length={sequence_length} (+ 1 label): the split has {tokens} tokens in "
                f"chunks of at most {longest}; use sequence_length <= {max(longest - 1, 0)}, more text"
                + (", or a bigger validation_fraction" if split == "validation" else "")
            )
        super().__init__(
            blocks=blocks, sequence_length=sequence_length, max_samples=max_samples, fingerprint=manifest.fingerprint(split)
        )

    def _read(self, index: int) -> np.ndarray:
        return self._open().read(index)

    def _open(self) -> ChunkMap:
        # Maps of files must not be shared by a forked worker with its parent.
        if self._map is None or self._map[0] != os.getpid():
            chunks = ChunkMap(
                self._folder, self._record.dtype, vocabulary_size=self._vocabulary_size, block_size=self._block_size
            )
            self._map = (os.getpid(), chunks)
        return self._map[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}
