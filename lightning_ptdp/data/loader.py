"""Loaders of one replica's samples, in order, with a position that can be saved.

The order is one endless sequence of sample numbers (``stream.py``). A step of d
replicas with batches of B samples takes the next d·B numbers. Replica r takes the r-th B of them::

    numbers   0 1 2 3 4 5 6 7 8 ...          d = 2, B = 2
    step 0    r0  r1
    step 1            r0  r1

The position is therefore one number: the count of samples taken by all replicas together. It means
the same for any d and B. If d·B grows during training (``RampUp``), the position also determines
the size of the next step. Ranks of one replica (tensor, context and pipeline peers) pass the same
``replica_rank`` and read the same samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_ptdp.base.option_types import Count, Size, check_integer, check_types
from lightning_ptdp.data.data_error import DataError
from lightning_ptdp.data.stream import PADDING, Batch, SampleStream
from lightning_ptdp.world.batch_size import RampUp

_STATE_VERSION = 1
_AHEAD = 64
_REMEMBERED = 8


@dataclass(eq=False)
class _BatchLoader:
    """Loader of one replica's part of a stream."""

    stream: SampleStream
    _: KW_ONLY
    batch_size: Size
    num_replicas: Size = 1
    replica_rank: Count = 0
    num_workers: Count = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_integer("replica_rank", self.replica_rank, least=0, most=self.num_replicas - 1)

    def _read(self, visits: Iterable[list[int]]) -> Iterator[Batch]:
        loader: DataLoader[Batch] = DataLoader(
            self.stream,
            batch_sampler=visits,
            collate_fn=_as_read,
            num_workers=self.num_workers,
            # Without its own generator, every iteration would draw from the global one and change
            # the random numbers of the model.
            generator=torch.Generator(),
        )
        for rows in loader:
            batch = self.stream.as_batch(rows)
            yield (
                {name: tensor.pin_memory() for name, tensor in batch.items()}
                if self.pin_memory
                else batch
            )


@dataclass(eq=False)
class TokenLoader(_BatchLoader):
    """Endless training batches of one replica, resumable after any batch.

    One iteration yields ``len(loader)`` batches from the current position on, and continues over
    the end of an epoch into the next: after a resume in mid-epoch, Lightning asks only for the rest
    of its epoch. Samples are counted when they are handed out, so that workers that read ahead do
    not change the position.

    Args:
        stream: Stream of samples.
        batch_size: B, samples of a batch of this replica (micro-batch size times number of
            microbatches).
        seed: Seed of the order.
        shuffle: Use a new permutation in every epoch; otherwise the stored order.
        num_replicas: d.
        replica_rank: This replica, 0 to d - 1; not the global rank.
        num_workers: Number of processes that read ahead; the batches do not depend on it.
        pin_memory: Put batches into page-locked memory, for CUDA.
        in_flight: Function that returns how many batches were handed out but not yet used for
            training, a few at most. The saved position excludes them.
        ramp_up: Growth of the samples of a step to d·B. Default: every step takes d·B.

    The stream determines the content of a batch. For a ``TokenStream``, it is ``{"input_ids",
    "labels"}``, int64 of shape (B, s).

    Raises:
        DataError: A step takes more samples than the stream has.
        ValueError: A number is out of range, ``ramp_up`` does not end at d·B samples, or d does not
            divide all its sizes.
    """

    seed: Count = 0
    shuffle: bool = True
    in_flight: Callable[[], int] | None = None
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        full = self.step_samples
        self.sizes = self.ramp_up or RampUp.constant(full)
        if self.sizes.stop != full:
            raise ValueError(
                f"ramp_up ends at {self.sizes.stop} samples per step, but batch_size "
                f"{self.batch_size} x {self.num_replicas} replicas = {full}"
            )
        self.sizes.plans(data_parallel_size=self.num_replicas, micro_batch_size=1)
        self.consumed_samples = 0
        # Positions at which the last batches began.
        self._starts: deque[int] = deque(maxlen=_REMEMBERED)
        if len(self.stream) < full:
            raise DataError(
                f"a step takes batch_size {self.batch_size} x {self.num_replicas} replicas = "
                f"{full} samples, but the data have {len(self.stream)} of sequence_length "
                f"{self.stream.sequence_length}. Use a batch of at most "
                f"{len(self.stream) // self.num_replicas}, a shorter sequence_length, or more text"
            )

    @property
    def step_samples(self) -> int:
        """Samples that all replicas take in one step, d·B, after the ramp-up."""
        return self.batch_size * self.num_replicas

    @property
    def epoch(self) -> int:
        """Return how many times the data have been read in full."""
        return self.consumed_samples // len(self.stream)

    def __len__(self) -> int:
        """Return the number of steps in the current epoch, from its start.

        With a ramp-up, later epochs have fewer steps.
        """
        return self.sizes.epoch_steps(self.consumed_samples, samples=len(self.stream))

    def steps_of_epochs(self, epochs: int) -> int:
        """Return the number of steps in the first ``epochs`` epochs."""
        return self.sizes.steps_of_epochs(epochs, samples=len(self.stream))

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._read(self._steps()):
            self._starts.append(self.consumed_samples)
            self.consumed_samples += self.sizes.global_batch(self.consumed_samples)
            yield batch

    def visits(self, start: int, steps: int) -> np.ndarray:
        """Return this replica's visits of ``steps`` steps of equal size, int64 (steps, B).

        ``start`` is the first sample number of the first step, over all replicas.
        """
        size, equal_steps = self.sizes.stretch(start)
        assert equal_steps is None or steps <= equal_steps, "the steps have different sizes"
        batch_size = size // self.num_replicas
        first = start + self.replica_rank * batch_size
        numbers = first + size * np.arange(steps)[:, None] + np.arange(batch_size)[None, :]
        return self.stream.visits(numbers, seed=self.seed, shuffle=self.shuffle)

    def _steps(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        left = len(self)
        while left:
            size, equal_steps = self.sizes.stretch(start)
            steps = min(_AHEAD, left, left if equal_steps is None else equal_steps)
            yield from self.visits(start, steps).tolist()
            start += steps * size
            left -= steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position.

        It is equal on all ranks, and valid for any number of replicas, batch size or number of
        workers.
        """
        unfinished = min(self.in_flight(), len(self._starts)) if self.in_flight is not None else 0
        return {
            "version": _STATE_VERSION,
            "consumed_samples": self._starts[-unfinished] if unfinished else self.consumed_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": len(self.stream),
            "sequence_length": self.stream.sequence_length,
            "data": self.stream.fingerprint,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            DataError: The position belongs to other data, another sequence length or another seed.
        """
        expected = self.state_dict()
        differences = [
            f"{name} is {state_dict.get(name)!r} in the checkpoint, but {value!r} in this training"
            for name, value in expected.items()
            if name != "consumed_samples" and state_dict.get(name) != value
        ]
        if differences:
            raise DataError(
                "cannot continue at the checkpoint's position in the data: "
                f"{'; '.join(differences)}. Use the same values, or start a new training from "
                "the weights"
            )
        check_integer("consumed_samples", state_dict.get("consumed_samples"), least=0)
        self.consumed_samples = state_dict["consumed_samples"]
        self._starts.clear()


@dataclass(eq=False)
class EvaluationLoader(_BatchLoader):
    """All samples once, in equally many batches of equal shape on every replica.

    The samples are distributed evenly over all microbatches of all replicas. Each microbatch is
    filled up with rows whose labels are all ``IGNORE_INDEX``. Every sample therefore counts exactly
    once for any number of replicas, and no microbatch is all padding unless there are fewer samples
    than microbatches. Weight losses by counted tokens.

    Args:
        stream: Stream of samples.
        batch_size: Samples of a batch of this replica.
        micro_batch_size: Rows of a microbatch, a divisor of ``batch_size``. Default:
            ``batch_size``.
        num_replicas: d.
        replica_rank: This replica, 0 to d - 1.
        num_workers: Number of processes that read ahead.
        pin_memory: Put batches into page-locked memory, for CUDA.
    """

    micro_batch_size: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % (self.micro_batch_size or self.batch_size):
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )

    def __len__(self) -> int:
        """Return the number of batches of every replica."""
        return -(-len(self.stream) // (self.batch_size * self.num_replicas))

    def __iter__(self) -> Iterator[Batch]:
        yield from self._read(map(self._visits, range(len(self))))

    def indices(self, step: int) -> list[int]:
        """Return the sample numbers of this replica's batch ``step``; ``PADDING`` fills up."""
        micro_batch_size = self.micro_batch_size or self.batch_size
        microbatches = self.batch_size // micro_batch_size
        slots = len(self) * self.num_replicas * microbatches
        first = (step * self.num_replicas + self.replica_rank) * microbatches
        rows: list[int] = []
        for slot in range(first, first + microbatches):
            samples = range(
                slot * len(self.stream) // slots, (slot + 1) * len(self.stream) // slots
            )
            rows += [*samples, *[PADDING] * (micro_batch_size - len(samples))]
        return rows

    def _visits(self, step: int) -> list[int]:
        numbers = np.array(self.indices(step))
        visits = self.stream.visits(numbers, seed=0, shuffle=False)
        return np.where(numbers == PADDING, PADDING, visits).tolist()


def _as_read(rows: object) -> object:
    return rows
