"""Batch sizes of a data module, and the plans that follow for a number of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.world.batch_size import BatchPlan, RampUp

_MICRO_BATCH_SIZE = 8


class RampUpOptions(TypedDict):
    """Growth of the global batch to its full size.

    A plain mapping, because checkpoints and YAML files contain it.
    """

    start: Size
    """Global batch of the first step: a multiple of ``micro_batch_size * replicas``."""
    increment: Size
    """Samples added to the global batch at a time: a multiple of ``micro_batch_size * replicas``.
    """
    samples: Size
    """Number of samples over which the global batch grows."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch sizes as the user gives them.

    ``global_batch_size = micro_batch_size * num_microbatches * replicas``. Any two sizes determine
    the third.

    Args:
        global_batch_size: Samples in one step of all replicas.
        micro_batch_size: Samples in a microbatch. Default: 8, or derived from the other two.
        num_microbatches: Microbatches in one step of one replica. Default: 1, or derived from the
            other two.
        ramp_up: Start with a global batch of ``start`` samples and grow it by ``increment`` at a
            time to its full size, over the first ``samples`` samples (arXiv 2005.14165, section
            2.3). The strategy needs ``PTDPStrategy(micro_batch_size=...)`` to follow.

    Raises:
        ValueError: A number is out of range, too few sizes are given, or the ramp-up has other
            keys. The message names field and value.
    """

    global_batch_size: Size | None = None
    micro_batch_size: Size | None = None
    num_microbatches: Size | None = None
    ramp_up: RampUpOptions | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if (
            self.global_batch_size is not None
            and self.micro_batch_size is None
            and self.num_microbatches is None
        ):
            raise ValueError(
                f"global_batch_size={self.global_batch_size} alone does not determine the "
                "microbatches. Set micro_batch_size or num_microbatches, too"
            )

    def plan(self, num_replicas: int) -> BatchPlan:
        """Return the sizes of a step of ``num_replicas`` replicas after the ramp-up.

        Raises:
            ValueError: The sizes do not divide. The message gives sizes that do.
        """
        derived = self.global_batch_size is not None
        return BatchPlan.derive(
            data_parallel_size=num_replicas,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size
            if derived
            else self.micro_batch_size or _MICRO_BATCH_SIZE,
            num_microbatches=self.num_microbatches if derived else self.num_microbatches or 1,
        )

    def ramp(self, num_replicas: int) -> RampUp:
        """Return the global batch of every step; it is constant without ``ramp_up``.

        Raises:
            ValueError: The ramp does not end at the global batch, or one of its sizes is not a
                whole number of microbatches on every replica.
        """
        plan = self.plan(num_replicas)
        full = plan.global_batch
        if self.ramp_up is None:
            return RampUp(start=full, stop=full, increment=1, samples=1)
        try:
            ramp = RampUp(stop=full, **self.ramp_up)
            ramp.plans(data_parallel_size=num_replicas, micro_batch_size=plan.micro_batch_size)
        except ValueError as error:
            unit = plan.micro_batch_size * num_replicas
            raise ValueError(
                f"ramp_up={dict(self.ramp_up)} up to a global batch of stop={full}, in "
                f"microbatches of {plan.micro_batch_size} on {num_replicas} replicas: {error}. Its "
                f"start and increment must be multiples of {unit}"
            ) from None
        return ramp

    def plans(self, num_replicas: int) -> tuple[BatchPlan, ...]:
        """Return the plans of all sizes that the ramp-up passes through, in order.

        Raises:
            ValueError: As for ``plan`` and ``ramp``.
        """
        micro_batch_size = self.plan(num_replicas).micro_batch_size
        return self.ramp(num_replicas).plans(
            data_parallel_size=num_replicas, micro_batch_size=micro_batch_size
        )
