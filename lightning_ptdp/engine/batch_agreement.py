"""Agreement of the ranks about a batch before its step.

All ranks of a replica must have the same samples. The ranks also compare how unevenly labels are
ignored.
"""

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
    """Collects numbers of each batch, and keeps the results that all ranks agree on.

    Args:
        mesh: This rank's place.
        sizes: Returns the numbers of samples in a batch's microbatches; raises ValueError for a
            batch that cannot be split.
        device: This rank's device.

    Attributes:
        expected_tokens: Expected number of tokens in a replica's batch, the largest of all
            replicas.
    """

    def __init__(
        self, mesh: ProcessMesh, *, sizes: Callable[[Nested], Sequence[int]], device: torch.device
    ) -> None:
        self._mesh, self._sizes, self._device = mesh, sizes, device
        self._is_uneven = self._told = False
        self.expected_tokens = 0

    def collect(self, batch: Nested, *, training: bool) -> Tensor | None:
        """Return the numbers whose maximum over ranks ``take`` expects.

        In training the maximum is over the world, in evaluation over a replica. None means that no
        rank needs the numbers of another.
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
            except ValueError:  # the step itself refuses such a batch
                sizes = ()
            tokens = expected_tokens(batch, sum(sizes))
            parts.append(torch.tensor([tokens]).to(self._device, non_blocking=True))
            parts.append(label_spread(batch, () if self._told else sizes, device=self._device))
        return torch.cat(parts) if parts else None

    def take(self, numbers: Sequence[int], *, training: bool) -> None:
        """Take the maximum of the numbers over the ranks.

        Raises:
            BatchMismatchError: On all ranks: the ranks of a replica read different batches.
        """
        if training and numbers:
            *numbers, self.expected_tokens, most, least = numbers
            self.note_spread((most, least))
        check_same_batch(numbers)

    def collect_alone(self, batch: Nested, sizes: Sequence[int]) -> Tensor | None:
        """Return the spread of labels for a single process; None after the warning was issued."""
        self.expected_tokens = expected_tokens(batch, sum(sizes))
        return None if self._told else label_spread(batch, sizes, device=self._device)

    def note_spread(self, spread: Sequence[float]) -> None:
        """Record whether labels are unevenly ignored, from values of ``label_spread``.

        An empty ``spread`` is ignored.
        """
        if spread:
            self._is_uneven |= is_uneven(*spread)

    def warn_of_uneven(self, batch: Nested, *, counted: bool) -> None:
        """Warn once, on rank 0, of uneven labels in a step that does not count its tokens."""
        if self._is_uneven and not counted and not self._told and self._mesh.rank == 0:
            warnings.warn(describe_uneven(batch, batch_size(batch)), stacklevel=2)
        self._told |= self._is_uneven
