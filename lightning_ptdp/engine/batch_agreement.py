"""Facts about a batch on which ranks agree before its step: the same samples in a replica, and how
unevenly labels count."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, batch_size
from lightning_ptdp.engine.label_counts import (
    describe_uneven,
    expected_tokens,
    is_uneven,
    label_spread,
)
from lightning_ptdp.engine.rank_agreement import batch_sums, check_same_batch
from lightning_ptdp.world.mesh import ProcessMesh

__all__ = ["BatchAgreement"]


class BatchAgreement:
    """Collects numbers of each batch, and keeps what all ranks found in them.

    Args:
        mesh: This rank's place.
        sizes: Returns the samples of a batch's microbatches; raises ValueError for a batch that
            cannot be cut.
        device: This rank's device.

    Attributes:
        expected_tokens: Tokens that a replica's batch may have, the largest of all replicas.
    """

    def __init__(
        self, mesh: ProcessMesh, *, sizes: Callable[[Nested], Sequence[int]], device: torch.device
    ) -> None:
        self._mesh, self._sizes, self._device = mesh, sizes, device
        self._is_uneven = self._told = False
        self.expected_tokens = 0

    def collect(self, batch: Nested, *, training: bool) -> Tensor | None:
        """Return numbers of which ``take`` wants the maximum over ranks: the world in training, a
        replica in evaluation.

        None means that no rank needs those of another.
        """
        layout, parts = self._mesh.layout, list[Tensor]()
        if layout.model_parallel_size > 1:
            replica, replicas = (
                (layout.replica(self._mesh.rank), layout.num_replicas) if training else (0, 1)
            )
            parts.append(batch_sums(batch, replica=replica, replicas=replicas, device=self._device))
        if training and layout.world_size > 1:
            try:
                sizes = self._sizes(batch)
            except ValueError:  # the step refuses a batch that cannot be cut
                sizes = ()
            tokens = expected_tokens(batch, sum(sizes))
            parts.append(torch.tensor([tokens]).to(self._device, non_blocking=True))
            parts.append(label_spread(batch, () if self._told else sizes, device=self._device))
        return torch.cat(parts) if parts else None

    def take(self, numbers: Sequence[int], *, training: bool) -> None:
        """Take the maximum over the ranks.

        Raises:
            BatchMismatchError: On all ranks: those of a replica read different batches.
        """
        if training and numbers:
            *numbers, self.expected_tokens, most, least = numbers
            self.note_spread((most, least))
        check_same_batch(numbers)

    def collect_alone(self, batch: Nested, sizes: Sequence[int]) -> Tensor | None:
        """Return the spread of labels for one process, which agrees with nobody; None once it has
        been told."""
        self.expected_tokens = expected_tokens(batch, sum(sizes))
        return None if self._told else label_spread(batch, sizes, device=self._device)

    def note_spread(self, spread: Sequence[float]) -> None:
        """Keep whether labels count unevenly, from values of ``label_spread``; an empty one says
        nothing."""
        if spread:
            self._is_uneven |= is_uneven(*spread)

    def warn_of_uneven(self, batch: Nested, *, counted: bool) -> None:
        """Warn once, on rank 0, of uneven labels in a step that does not count its tokens."""
        if self._is_uneven and not counted and not self._told and self._mesh.rank == 0:
            warnings.warn(describe_uneven(batch, batch_size(batch)), stacklevel=2)
        self._told |= self._is_uneven
