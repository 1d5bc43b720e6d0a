"""Which samples a replica reads, in which order, and where it stands.

The order is one endless sequence of sample numbers (``order.py``). A step of d replicas with batches of B samples takes the next
d·B numbers, replica r the r-th B of them::

    numbers   0 1 2 3 4 5 6 7 8 ...          d = 2, B = 2
    step 0    r0  r1
    step 1            r0  r1

so that the position is one number, the count of samples taken by all replicas together, and it means the same for any d and B.
Where d·B grows during training (``RampUp``), the position also says how large the next step is.
Ranks of one replica (tensor, context and pipeline peers) pass the same ``replica_rank`` and read the same samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_ptdp.batch_size import RampUp
from lightning_ptdp.data.checks import check_integer
from lightning_ptdp.data.errors import DataError
from lightning_ptdp.data.stream import PADDING, SampleStream

__all__ = ["EvaluationLoader", "TokenLoader"]

Batch = dict[str, torch.Tensor]
_STATE_VERSION = 1
_AHEAD = 64
_REMEMBERED = 8


class TokenLoader:
    """Endless training batches of one replica, an epoch's worth an iteration, resumable after any batch.

    Iterating hands out ``len(loader)`` batches from the current position on and runs over the end of an epoch into the next:
    after a resume in mid-epoch Lightning asks for the rest of its epoch only. Samples are counted when they are handed out, so that
    workers that read ahead do not move the position.

    Args:
        stream: The samples.
        batch_size: B, samples of a batch of this replica (micro-batch size times number of microbatches).
        seed: Of the order.
        shuffle: A new permutation every epoch; else as stored.
        num_replicas: d.
        replica_rank: This replica, 0 to d - 1; not the global rank.
        num_workers: Processes that read ahead; the batches do not depend on it.
        pin_memory: Put batches into page-locked memory, for CUDA.
        in_flight: Returns how many batches were handed out but not yet trained on, a few at most; they are taken off the saved position.
        ramp_up: How the samples of a step grow to d·B. Default: every step takes as many.

    What is in a batch is the stream's business; for a ``TokenStream`` ``{"input_ids", "labels"}``, int64 of shape (B, s).

    Raises:
        DataError: A step takes more samples than there are.
        ValueError: A number is out of range, or ``ramp_up`` does not end at d·B samples, or d does not divide all its sizes.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        num_replicas: int = 1,
        replica_rank: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        in_flight: Callable[[], int] | None = None,
        ramp_up: RampUp | None = None,
    ) -> None:
        _check_common(batch_size, num_replicas, replica_rank, num_workers)
        check_integer("seed", seed, least=0)
        full = batch_size * num_replicas
        self.sizes = ramp_up or RampUp(start=full, stop=full, increment=1, samples=1)
        if self.sizes.stop != full:
            raise ValueError(
                f"ramp_up ends at {self.sizes.stop} samples a step, but batch_size {batch_size} x {num_replicas} replicas = {full}"
            )
        self.sizes.plans(data_parallel_size=num_replicas, micro_batch_size=1)
        self.stream = stream
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_replicas = num_replicas
        self.replica_rank = replica_rank
        self.consumed_samples = 0
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._in_flight = in_flight
        # Where the batches handed out last began.
        self._begun: deque[int] = deque(maxlen=_REMEMBERED)
        if len(stream) < self.step_samples:
            raise DataError(
                f"one step takes batch_size {batch_size} x {num_replicas} replicas = {self.step_samples} samples, but the data "
                f"hold {len(stream)} of sequence_length {stream.sequence_length}: use a batch of at most "
                f"{len(stream) // num_replicas}, a shorter sequence_length, or more text"
            )

    @property
    def step_samples(self) -> int:
        """Samples that all replicas take in one step, d·B, after the ramp-up."""
        return self.batch_size * self.num_replicas

    @property
    def epoch(self) -> int:
        """How many times the data have been seen in full."""
        return self.consumed_samples // len(self.stream)

    def __len__(self) -> int:
        """Steps in the whole of the epoch in which the position is; fewer in later epochs of a ramp-up."""
        return self.sizes.epoch_steps(self.consumed_samples, samples=len(self.stream))

    def steps_of_epochs(self, epochs: int) -> int:
        """Steps of the first so many epochs."""
        return self.sizes.steps_of_epochs(epochs, samples=len(self.stream))

    def __iter__(self) -> Iterator[Batch]:
        for batch in _read(self.stream, _TrainingRows(self), self._num_workers, self._pin_memory):
            self._begun.append(self.consumed_samples)
            self.consumed_samples += self.sizes.global_batch(self.consumed_samples)
            yield batch

    def visits(self, start: int, steps: int) -> np.ndarray:
        """This replica's visits of the stream for ``steps`` steps of one size from sample number ``start`` on; int64 (steps, B)."""
        return self.stream.visits(self._numbers(start, steps), seed=self.seed, shuffle=self.shuffle)

    def _numbers(self, start: int, steps: int) -> np.ndarray:
        size, alike = self.sizes.stretch(start)
        assert alike is None or steps <= alike, "the steps have different sizes"
        batch = size // self.num_replicas
        first = start + self.replica_rank * batch
        return first + size * np.arange(steps)[:, None] + np.arange(batch)[None, :]

    def state_dict(self) -> dict[str, Any]:
        """The position: equal on all ranks, and good for any number of replicas, batch size or workers."""
        unfinished = min(self._in_flight(), len(self._begun)) if self._in_flight is not None else 0
        return {
            "version": _STATE_VERSION,
            "consumed_samples": self._begun[-unfinished] if unfinished else self.consumed_samples,
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
        here = self.state_dict()
        differences = [
            f"{name} is {state_dict.get(name)!r} in the checkpoint and {wanted!r} here"
            for name, wanted in here.items()
            if name != "consumed_samples" and state_dict.get(name) != wanted
        ]
        if differences:
            raise DataError(
                f"cannot continue at the checkpoint's place in the data: {'; '.join(differences)}. Use the same, or start "
                "anew from the weights alone"
            )
        check_integer("consumed_samples", state_dict.get("consumed_samples"), least=0)
        self.consumed_samples = state_dict["consumed_samples"]
        self._begun.clear()


class EvaluationLoader:
    """All samples once, in the same number of equally shaped batches on every replica.

    The samples are dealt evenly over all microbatches of all replicas, and each microbatch is filled up with rows whose labels
    are all ``IGNORE_INDEX``: every sample counts exactly once for any number of replicas, and no microbatch is all padding unless
    there are fewer samples than microbatches. Weight losses by counted tokens.

    Args:
        stream: The samples.
        batch_size: Samples of a batch of this replica.
        micro_batch_size: Rows of a microbatch, a divisor of ``batch_size``; by default the batch is one.
        num_replicas: d.
        replica_rank: This replica, 0 to d - 1.
        num_workers: Processes that read ahead.
        pin_memory: Put batches into page-locked memory, for CUDA.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        num_replicas: int = 1,
        replica_rank: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        _check_common(batch_size, num_replicas, replica_rank, num_workers)
        self.micro_batch_size = batch_size if micro_batch_size is None else micro_batch_size
        check_integer("micro_batch_size", self.micro_batch_size)
        if batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size={batch_size} is not a multiple of micro_batch_size={micro_batch_size}")
        self.stream = stream
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.replica_rank = replica_rank
        self._num_workers = num_workers
        self._pin_memory = pin_memory

    def __len__(self) -> int:
        """Batches of every replica."""
        return -(-len(self.stream) // (self.batch_size * self.num_replicas))

    def __iter__(self) -> Iterator[Batch]:
        yield from _read(self.stream, _EvaluationRows(self), self._num_workers, self._pin_memory)

    def indices(self, step: int) -> list[int]:
        """Sample numbers of this replica's batch number ``step``, ``PADDING`` where a row fills up."""
        microbatches = self.batch_size // self.micro_batch_size
        slots = len(self) * self.num_replicas * microbatches
        first = (step * self.num_replicas + self.replica_rank) * microbatches
        rows: list[int] = []
        for slot in range(first, first + microbatches):
            samples = range(slot * len(self.stream) // slots, (slot + 1) * len(self.stream) // slots)
            rows += [*samples, *[PADDING] * (self.micro_batch_size - len(samples))]
        return rows


class _TrainingRows(Sampler[list[int]]):
    def __init__(self, loader: TokenLoader) -> None:
        self._loader, self._start, self._steps = loader, loader.consumed_samples, len(loader)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        start, left = self._start, self._steps
        while left:
            size, alike = self._loader.sizes.stretch(start)
            steps = min(_AHEAD, left, left if alike is None else alike)
            yield from self._loader.visits(start, steps).tolist()
            start, left = start + steps * size, left - steps


class _EvaluationRows(Sampler[list[int]]):
    def __init__(self, loader: EvaluationLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            numbers = np.array(self._loader.indices(step))
            visits = self._loader.stream.visits(numbers, seed=0, shuffle=False)
            yield np.where(numbers == PADDING, PADDING, visits).tolist()


def _read(stream: SampleStream, rows: Sampler[list[int]], num_workers: int, pin_memory: bool) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        cast(Dataset[Any], stream),
        batch_sampler=rows,
        collate_fn=_as_read,
        num_workers=num_workers,
        # Else every iteration would draw from the global generator, and change what a model draws after it.
        generator=torch.Generator(),
    )
    for rows_read in loader:
        batch = stream.as_batch(rows_read)
        yield {name: tensor.pin_memory() for name, tensor in batch.items()} if pin_memory else batch


def _as_read(batch: Any) -> Any:
    return batch


def _check_common(batch_size: int, num_replicas: int, replica_rank: int, num_workers: int) -> None:
    check_integer("batch_size", batch_size)
    check_integer("num_replicas", num_replicas)
    check_integer("replica_rank", replica_rank, least=0, most=num_replicas - 1)
    check_integer("num_workers", num_workers, least=0)
