"""Batch-size arithmetic: global batch = b * m * d, and its ramp-up over samples.

b is the micro-batch size, m the number of microbatches of a replica's step, d the number of
replicas (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from lightning_ptdp.base.option_types import Size, check_arguments, check_types
from lightning_ptdp.world.axes import nearest_divisors, nearest_multiples

_MOST_GROWTHS = 10_000
_MOST_SAMPLES = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Sizes of the batches of a step.

    Attributes:
        micro_batch_size: b, samples of a microbatch.
        num_microbatches: m, microbatches of a replica's step.
        data_parallel_size: d, replicas.
    """

    micro_batch_size: Size
    num_microbatches: Size
    data_parallel_size: Size

    @property
    def replica_batch(self) -> int:
        """Return the number of samples that one replica reads for a step: b * m."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def global_batch(self) -> int:
        """Return the number of samples of a step: b * m * d."""
        return self.replica_batch * self.data_parallel_size

    @classmethod
    def derive(
        cls,
        *,
        data_parallel_size: Size,
        global_batch_size: Size | None = None,
        micro_batch_size: Size | None = None,
        num_microbatches: Size | None = None,
    ) -> BatchPlan:
        """Return the plan from any two of the global batch, b and m.

        If all three are given, they must agree.

        Raises:
            ValueError: Fewer than two are given, one is not positive, or they do not divide; the
                message names values that would work.
        """
        check_arguments(BatchPlan.derive, locals())
        if (
            sum(
                value is not None
                for value in (global_batch_size, micro_batch_size, num_microbatches)
            )
            < 2
        ):
            raise ValueError(
                f"global_batch_size={global_batch_size}, micro_batch_size={micro_batch_size} "
                f"and num_microbatches={num_microbatches} do not determine the batch. Set two "
                "of them. The third follows from global_batch_size = micro_batch_size * "
                "num_microbatches * data_parallel_size"
            )
        if global_batch_size is None:
            assert micro_batch_size is not None and num_microbatches is not None
            global_batch_size = micro_batch_size * num_microbatches * data_parallel_size
            if global_batch_size > _MOST_SAMPLES:
                raise ValueError(
                    f"micro_batch_size={micro_batch_size} * num_microbatches={num_microbatches} * "
                    f"data_parallel_size={data_parallel_size} is a global batch of "
                    f"{global_batch_size} samples, more than the limit of {_MOST_SAMPLES}"
                )
        if micro_batch_size is None:
            assert num_microbatches is not None
            micro_batch_size = _quotient(
                global_batch_size, "num_microbatches", num_microbatches, data_parallel_size
            )
        derived = _quotient(
            global_batch_size, "micro_batch_size", micro_batch_size, data_parallel_size
        )
        if num_microbatches is not None and num_microbatches != derived:
            product = micro_batch_size * num_microbatches * data_parallel_size
            raise ValueError(
                f"global_batch_size={global_batch_size} is not micro_batch_size * "
                f"num_microbatches * data_parallel_size = {micro_batch_size} * "
                f"{num_microbatches} * {data_parallel_size} = {product}. Leave one of them "
                f"out, or use num_microbatches={derived}"
            )
        return cls(
            micro_batch_size=micro_batch_size,
            num_microbatches=derived,
            data_parallel_size=data_parallel_size,
        )


def _quotient(global_batch_size: int, field: str, value: int, replicas: int) -> int:
    """Return ``global_batch_size / (value * replicas)``."""
    unit = value * replicas
    if global_batch_size % unit == 0:
        return global_batch_size // unit
    remedy = f"Use global_batch_size={nearest_multiples(global_batch_size, unit)}"
    if global_batch_size % replicas == 0:
        remedy += f", or {field}={' or '.join(map(str, nearest_divisors(global_batch_size // replicas, value)))}"
    raise ValueError(
        f"global_batch_size={global_batch_size} is not divisible by {field} * "
        f"data_parallel_size = {value} * {replicas}. {remedy}"
    )


@dataclass(frozen=True, kw_only=True)
class RampUp:
    """Global batch that grows from ``start`` to ``stop`` in equal steps.

    The ramp takes the first ``samples`` samples. GPT-3 grew its batch from 32 k to 3.2 M tokens
    over the first 4 to 12 billion (arXiv 2005.14165, section 2.3). The size of a step depends only
    on the samples consumed before it, so that the position in the data is one number in every
    layout. With ``start`` equal to ``stop`` the size is constant.

    Attributes:
        start: Global batch of the first step.
        stop: Global batch after the ramp.
        increment: Growth of the batch at once.
        samples: Samples over which it grows.

    Raises:
        ValueError: A field is not positive, ``stop`` is smaller than ``start``, or the increment
            does not fit between them.
    """

    start: Size
    stop: Size
    increment: Size
    samples: Size

    @classmethod
    def constant(cls, size: int) -> RampUp:
        """Return a global batch of always ``size`` samples."""
        return cls(start=size, stop=size, increment=1, samples=1)

    def __post_init__(self) -> None:
        check_types(self)
        if self.stop < self.start:
            raise ValueError(
                f"stop={self.stop} is smaller than start={self.start}, but the global batch "
                "can only grow"
            )
        if (self.stop - self.start) % self.increment:
            nearest = nearest_divisors(self.stop - self.start, self.increment)
            raise ValueError(
                f"increment={self.increment} does not divide stop - start = {self.stop} - "
                f"{self.start}. Use increment={' or '.join(map(str, nearest))}"
            )
        if self._growths > _MOST_GROWTHS:
            raise ValueError(
                f"increment={self.increment} makes {self._growths} steps from start={self.start} "
                f"to stop={self.stop}, more than the limit of {_MOST_GROWTHS}. Use an increment of "
                f"at least {-(-(self.stop - self.start) // _MOST_GROWTHS)}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all global batches, in their order."""
        return tuple(range(self.start, self.stop + 1, self.increment))

    def plans(self, *, data_parallel_size: int, micro_batch_size: int) -> tuple[BatchPlan, ...]:
        """Return the plan of every size.

        Raises:
            ValueError: A size is not divisible by ``micro_batch_size * data_parallel_size``.
        """
        return tuple(
            BatchPlan.derive(
                data_parallel_size=data_parallel_size,
                global_batch_size=size,
                micro_batch_size=micro_batch_size,
            )
            for size in self.sizes
        )

    def global_batch(self, consumed: int) -> int:
        """Return the size of the step that begins after ``consumed`` samples."""
        return self.start + self.increment * min(
            self._growths, consumed * self._growths // self.samples
        )

    def stretch(self, consumed: int) -> tuple[int, int | None]:
        """Return the size of the step after ``consumed`` samples, and the number of such steps.

        The number counts the steps of this size from there on (None: all).
        """
        size = self.global_batch(consumed)
        if size == self.stop:
            return size, None
        grows_at = -(-((size - self.start) // self.increment + 1) * self.samples // self._growths)
        return size, -(-(grows_at - consumed) // size)

    def consumed(self, steps: int, *, start: int = 0) -> int:
        """Return the samples of ``steps`` steps, the first after ``start`` samples."""
        end = start
        while steps:
            size, count = self.stretch(end)
            count = steps if count is None else min(count, steps)
            end = end + count * size
            steps = steps - count
        return end - start

    def steps(self, samples: int, *, start: int = 0) -> int:
        """Return the number of whole steps in ``samples`` samples.

        The first step begins after ``start`` samples.
        """
        steps = 0
        while True:
            size, count = self.stretch(start)
            available = samples // size
            if count is None or available < count:
                return steps + available
            steps = steps + count
            start = start + count * size
            samples = samples - count * size

    def epoch_steps(self, consumed: int, *, samples: int) -> int:
        """Return the steps of the epoch that contains the step after ``consumed`` samples.

        An epoch has as many whole steps as fit into ``samples`` samples, the size of the data. The
        next epoch begins where it ends.
        """
        for first, steps in self._epochs(samples):
            if (
                consumed < first + self.consumed(steps, start=first)
                or self.global_batch(first) == self.stop
            ):
                return steps
        raise AssertionError  # the iterator of epochs is infinite

    def steps_of_epochs(self, epochs: int, *, samples: int) -> int:
        """Return the steps of the first ``epochs`` epochs over data of ``samples`` samples."""
        return sum(steps for _, steps in islice(self._epochs(samples), epochs))

    def _epochs(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yield the number of samples before each epoch, and its steps."""
        first = 0
        while True:
            steps = self.steps(samples, start=first)
            yield first, steps
            first += self.consumed(steps, start=first)

    @property
    def _growths(self) -> int:
        return (self.stop - self.start) // self.increment
