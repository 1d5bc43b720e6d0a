"""Agreement of ranks about data and the next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.base.nested import Nested, batch_size, iterate_tensors, named_tensors
from lightning_ptdp.engine.loss_inspection import IGNORED
from lightning_ptdp.world.mesh import ProcessMesh

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ = 65536
"""Elements of a tensor that are read; a larger tensor is read in equal steps."""
_MASK = 2**62 - 1
_NOTHING = -(2**63)


class BatchMismatchError(PTDPError, RuntimeError):
    """Ranks of one replica read different samples."""


def batch_sums(batch: Nested, *, replica: int, replicas: int, device: torch.device) -> Tensor:
    """Return the checksum of a batch, (2 * replicas) int64 on ``device``.

    Its maximum over ranks shows whether each replica's ranks have the same batch. The sums are of
    integers, because sums of floating-point numbers may depend on the order in which a device adds.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in iterate_tensors(batch):
        total = total * 1_000_003 + _checksum(tensor).to(device, non_blocking=True)
    total = total & _MASK
    sums = torch.full((2 * replicas,), _NOTHING, dtype=torch.int64, device=device)
    sums[2 * replica] = total
    sums[2 * replica + 1] = -total
    return sums


def _checksum(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.element_size() not in _BITS:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.reshape(-1)[:: -(-tensor.numel() // _READ) or 1].contiguous()
    bits = flat.view(_BITS[flat.element_size()]).to(torch.int64)
    return (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum() + tensor.numel()


# ---- Counts of the labels in a batch that are not ignored ----------------------------------------
#
# They give the expected number of tokens, and show if equally weighted parts of a batch have
# different numbers of labels.


_PARTS = 1_000_000


def expected_tokens(batch: Nested, samples: int) -> int:
    """Return the expected number of tokens in a batch of this form.

    It is the number of elements of the batch's largest tensor of integers.
    """
    sizes = [
        tensor.numel()
        for _, tensor in named_tensors(batch)
        if not tensor.is_floating_point() and tensor.dim() <= 2
    ]
    return max([samples, *sizes])


def label_spread(batch: Nested, sizes: Sequence[int], *, device: torch.device) -> Tensor:
    """Return the most labels per sample in a microbatch, and the negative of the least.

    Ignored labels do not count. The values are in millionths, (2) int64 on ``device``.

    Args:
        batch: The whole batch.
        sizes: Numbers of samples in its microbatches.
        device: Device of the result.
    """
    samples = sum(sizes)
    tensors = _integers(batch, samples) if sizes else []
    if not tensors:
        return torch.zeros(2, dtype=torch.int64, device=device)
    counts = (tensors[0][1] != IGNORED).reshape(samples, -1).sum(1)
    # Other tensors may be labels too. Replicas may pad tokens to different lengths.
    for _, other in tensors[1:]:
        counts = counts - (other == IGNORED).reshape(samples, -1).sum(1)
    if len(set(sizes)) == 1:
        shares = counts.view(len(sizes), -1).sum(1) * _PARTS // sizes[0]
    else:
        shares = torch.stack(
            [part.sum() * _PARTS // len(part) for part in counts.split(list(sizes))]
        )
    return torch.stack([shares.amax(), -shares.amin()]).to(device, non_blocking=True)


def is_uneven(most: float, negative_least: float) -> bool:
    """Return True if ``label_spread``, or its maximum over ranks, shows unequal numbers."""
    return most + negative_least > 1  # tolerates rounding


def describe_uneven(batch: Nested, samples: int) -> str:
    """Return the warning about the labels of ``batch``."""
    tensors = _integers(batch, samples)
    ignoring = (name for name, one in tensors if (one == IGNORED).any())
    name = next(ignoring, tensors[0][0] if tensors else "")
    label_name = f"'{name}'" if name else "the labels"
    return (
        "the microbatches or replicas of a batch have different numbers of labels other than "
        f"{IGNORED} in {label_name}, and training_step returns no 'num_tokens'. The mean of each "
        "microbatch has the same weight, so the loss is not the mean over all labels as in "
        f"one process. Return {{'loss': loss, 'num_tokens': (labels != {IGNORED}).sum()}} "
        "from training_step"
    )


def _integers(batch: Nested, samples: int) -> list[tuple[str, Tensor]]:
    """Return the tensors that may hold labels, with their names.

    The first one seems to: by its name, else the last one of integers.
    """
    tensors = [
        (name, tensor)
        for name, tensor in named_tensors(batch)
        if tensor.dtype in (torch.int64, torch.int32)
        and tensor.layout is torch.strided
        and tensor.dim()
        and tensor.size(0) == samples
        and tensor.numel()
    ]
    is_label = [any(word in name.lower() for word in ("label", "target")) for name, _ in tensors]
    first = is_label.index(True) if True in is_label else -1
    return [*tensors[first:], *tensors[:first]]


# ---- Agreement of the ranks ----------------------------------------------------------------------
#
# Before a step, all ranks of a replica must have the same samples. The ranks also compare how
# unevenly labels are ignored.


@dataclass(kw_only=True, eq=False)
class RankAgreement:
    """Comparison of batches and loaders, and the results that all ranks agree on.

    Attributes:
        mesh: This rank's place.
        sizes: Returns the numbers of samples in a batch's microbatches; raises ValueError for a
            batch that cannot be split.
        device: This rank's device.
        joined_by: Option by which replicas communicate in every microbatch of a training step; ""
            if none does.
        expected_tokens: Expected number of tokens in a replica's batch, the largest of all
            replicas.
        awaits_counts: Numbers of microbatches must be compared before the step. A GPU reports them
            one batch later, when replicas with other numbers already wait for each other.
    """

    mesh: ProcessMesh
    sizes: Callable[[Nested], Sequence[int]]
    device: torch.device
    joined_by: str
    expected_tokens: int = 0
    awaits_counts: bool = False
    _is_uneven: bool = False
    _warned: bool = False
    _count: int | None = None
    _counted: dict[Hashable, bool] = field(default_factory=dict)

    def collect(self, batch: Nested, *, training: bool) -> Tensor | None:
        """Return the numbers whose maximum over ranks ``take`` expects.

        In training the maximum is over the world, in evaluation over a replica. None means that no
        rank needs the numbers of another.
        """
        layout = self.mesh.layout
        parts = list[Tensor]()
        if layout.model_parallel_size > 1:
            replica, replicas = (
                (layout.replica(self.mesh.rank), layout.num_replicas) if training else (0, 1)
            )
            parts.append(batch_sums(batch, replica=replica, replicas=replicas, device=self.device))
        if training and layout.world_size > 1:
            try:
                sizes = self.sizes(batch)
            except ValueError:  # the step itself refuses such a batch
                sizes = ()
            changed = self._count not in (None, len(sizes))
            self.awaits_counts = changed and self.joined_by != "" and self.device.type == "cuda"
            self._count = len(sizes)
            tokens = expected_tokens(batch, sum(sizes))
            # A batch that the step refuses has no microbatches, and changes neither maximum.
            counts = [tokens, len(sizes), -len(sizes) or _NOTHING]
            parts.append(torch.tensor(counts).to(self.device, non_blocking=True))
            parts.append(label_spread(batch, () if self._warned else sizes, device=self.device))
        return torch.cat(parts) if parts else None

    def take(self, numbers: Sequence[int], *, training: bool) -> None:
        """Take the maximum of the numbers over the ranks.

        Raises:
            BatchMismatchError: On all ranks: the ranks of a replica read different batches, or
                replicas that must compute equally many microbatches do not.
        """
        if training and numbers:
            self.compare_counts(numbers)
            *numbers, self.expected_tokens, _, _, most, least = numbers
            self.note_spread((most, least))
        for replica, (high, low) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            if high != -low:  # otherwise training would silently give meaningless results
                raise BatchMismatchError(
                    f"the ranks of replica {replica} read different batches, but all of them must "
                    "read the same samples with the same augmentation. Shard data by "
                    "trainer.strategy.distributed_sampler_kwargs (replica number and count) "
                    "instead of the global rank, and seed shuffling and augmentation by the replica"
                )

    def compare_counts(self, numbers: Sequence[int]) -> None:
        """Compare the replicas' numbers of microbatches, given the maxima of a training batch.

        Raises:
            BatchMismatchError: They differ, but must not.
        """
        *_, many, few, _, _ = numbers
        if self.joined_by and many and many != -few:
            raise BatchMismatchError(
                f"the replicas' batches have between {-few} and {many} microbatches, but with "
                f"{self.joined_by} the replicas communicate in every microbatch. Give every "
                "replica batches of the same size, as DistributedSampler does"
            )

    def collect_alone(self, batch: Nested, sizes: Sequence[int]) -> Tensor | None:
        """Return the spread of labels for a single process; None after the warning was issued."""
        self.expected_tokens = expected_tokens(batch, sum(sizes))
        return None if self._warned else label_spread(batch, sizes, device=self.device)

    def note_spread(self, spread: Sequence[float]) -> None:
        """Record whether labels are unevenly ignored, from values of ``label_spread``.

        An empty ``spread`` is ignored.
        """
        if spread:
            self._is_uneven |= is_uneven(*spread)

    def warn_of_uneven(self, batch: Nested, *, counted: bool) -> None:
        """Warn once, on rank 0, of uneven labels in a step that does not count its tokens."""
        if self._is_uneven and not counted and not self._warned and self.mesh.rank == 0:
            warnings.warn(describe_uneven(batch, batch_size(batch)), stacklevel=2)
        self._warned |= self._is_uneven

    def check_counted(self, key: Hashable, counted: bool) -> None:
        """Check that all replicas count the tokens of all batches, or of none.

        The first call with a key is collective over the replicas, and waits for the device.

        Args:
            key: Stage of the Trainer, the step, and the loader of its batches.
            counted: Whether the step returned its number of tokens.

        Raises:
            ValueError: They differ, so a replica would wait for a sum that another does not start.
        """
        differs = counted != self._counted.get(key, counted)
        if key not in self._counted:
            self._counted[key] = counted
            flags = torch.tensor([counted, not counted], dtype=torch.int32, device=self.device)
            group = self.mesh.group("replica_sum").handle
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            differs = bool(flags.all())
        if differs:
            raise ValueError(
                "the step returned 'num_tokens' for some batches or replicas, but not for others. "
                "Return it always, also as 0"
            )

    def is_same_length(self, length: int | None) -> bool:
        """Return True if all loaders are known to give the same number of batches.

        The call is collective over the replicas. ``length`` is the number of batches of this rank's
        loader; None if it has no length.
        """
        group = self.mesh.group("replicas")
        if group.size == 1:
            return True
        length = -1 if length is None else length
        extremes = torch.tensor([length, -length], device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group.handle)
        least, greatest = extremes.tolist()
        return bool(length >= 0 and least == -greatest)
