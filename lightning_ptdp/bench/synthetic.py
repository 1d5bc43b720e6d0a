"""Data module of random tokens in the shapes of another data module.

No data are read or prepared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lightning_ptdp.data import BertDataModule, PreferenceDataModule, StreamDataModule
from lightning_ptdp.data.pairs import number_to_predict
from lightning_ptdp.data.stream import IGNORE_INDEX
from lightning_ptdp.data.stream_datamodule import replica_of
from lightning_ptdp.world.batch_size import BatchPlan, RampUp

Batch = dict[str, Tensor]

_STEPS = 2**31
_SPECIAL = 3  # [CLS] and two [SEP]


class SyntheticData(LightningDataModule):
    """Batches of a ``StreamDataModule`` in size and shape, with random contents.

    Each replica repeats one batch. Batches have the size at the end of a ramp-up.

    Args:
        like: The data module; no data are read from it.
    """

    def __init__(self, like: StreamDataModule) -> None:
        super().__init__()
        self.like = like
        self.sequence_length = like.sequence_length
        self.vocabulary_size = like.vocabulary_size

    def batch_plans(self, *, num_replicas: int) -> tuple[BatchPlan, ...]:
        """Return the batch sizes after a ramp-up."""
        return self.like.batch_plans(num_replicas=num_replicas)[-1:]

    @property
    def step_sizes(self) -> RampUp:
        """Return the samples of every step, over all replicas."""
        (plan,) = self.batch_plans(num_replicas=replica_of(self.trainer)[0])
        return RampUp.constant(plan.global_batch)

    def train_dataloader(self) -> _Again:
        """Return a loader that repeats one batch, the same on all ranks of a replica."""
        num_replicas, replica = replica_of(self.trainer)
        (plan,) = self.batch_plans(num_replicas=num_replicas)
        return _Again(self._batch(plan.replica_batch, torch.Generator().manual_seed(replica)))

    def _batch(self, size: int, generator: torch.Generator) -> Batch:
        s = self.sequence_length
        if isinstance(self.like, PreferenceDataModule):
            tokens = torch.randint(self.vocabulary_size, (2, size, s + 1), generator=generator)
            pairs: Batch = {}
            for answer, part in zip(("chosen", "rejected"), tokens, strict=True):
                pairs[f"{answer}_ids"] = part[:, :-1].contiguous()
                pairs[f"{answer}_labels"] = part[:, 1:].contiguous()
            pairs["pair"] = torch.arange(size)
            return pairs
        tokens = torch.randint(self.vocabulary_size, (size, s + 1), generator=generator)
        if not isinstance(self.like, BertDataModule):
            return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        k = number_to_predict(s - _SPECIAL, self.like.mask_probability)
        positions = torch.rand(size, s, generator=generator).argsort(dim=1)[:, :k].contiguous()
        ids = tokens[:, :-1].contiguous()
        return {
            "input_ids": ids,
            "token_type_ids": (torch.arange(s) >= s // 2).long().expand(size, s).contiguous(),
            "attention_mask": torch.ones_like(ids),
            "labels": torch.full_like(ids, IGNORE_INDEX).scatter(
                1, positions, ids.gather(1, positions)
            ),
            "masked_positions": positions,
            "next_sentence_label": torch.randint(2, (size,), generator=generator),
        }


class _Again:
    """Loader that repeats one batch, practically without end."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @property
    def batch_size(self) -> int:
        return next(iter(self._batch.values())).size(0)

    def __len__(self) -> int:
        return _STEPS

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batch
