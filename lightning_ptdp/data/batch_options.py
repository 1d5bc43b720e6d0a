"""The batch sizes that a user gives a data module, and what follows from them for a number of
replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.world.batch_size import BatchPlan, RampUp

__all__ = ["BatchOptions", "RampUpOptions"]

_MICRO_BATCH_SIZE = 8


class RampUpOptions(TypedDict):
    """Growth of the global batch to its full size; a mapping, because checkpoints and YAML hold
    it."""

    start: Size
    """Global batch of the first step, a multiple of the samples that a microbatch of every replica
    takes."""
    increment: Size
    """By how many samples it grows at once, such a multiple too."""
    samples: Size
    """Over how many samples it grows."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Sizes as given: of ``global_batch_size = micro_batch_size * num_microbatches * replicas`` any
    two, the third follows.

    Args:
        global_batch_size: Samples of a step of all replicas.
        micro_batch_size: Samples of a microbatch. Default: 8, or what follows.
        num_microbatches: Microbatches of a step of one replica. Default: 1, or what follows.
        ramp_up: Begin with a global batch of ``start`` samples, which grows by ``increment`` at a
            time to the full one over the first ``samples`` samples (arXiv 2005.14165, section 2.3).
            The strategy follows with ``PTDPStrategy(micro_batch_size=...)``.

    Raises:
        ValueError: A number is out of range, or they are not enough, or the ramp-up has other keys;
            names field and value.
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
                f"global_batch_size={self.global_batch_size} alone does not say how it is cut: "
                "give micro_batch_size or "
                "num_microbatches too"
            )

    def plan(self, num_replicas: int) -> BatchPlan:
        """Sizes of a step of ``num_replicas`` replicas, after the ramp-up.

        Raises:
            ValueError: They do not divide; says what would.
        """
        follows = self.global_batch_size is not None
        return BatchPlan.derive(
            data_parallel_size=num_replicas,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size
            if follows
            else self.micro_batch_size or _MICRO_BATCH_SIZE,
            num_microbatches=self.num_microbatches if follows else self.num_microbatches or 1,
        )

    def ramp(self, num_replicas: int) -> RampUp:
        """The global batch of every step; constant without ``ramp_up``.

        Raises:
            ValueError: The ramp does not end at the global batch, or one of its sizes is not a
                number of microbatches on every replica.
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
                f"microbatches of {plan.micro_batch_size} on "
                f"{num_replicas} replicas: {error}. Its start and increment must be multiples of "
                f"{unit}"
            ) from None
        return ramp

    def plans(self, num_replicas: int) -> tuple[BatchPlan, ...]:
        """The plan of every size that there will be, in their order.

        Raises:
            ValueError: As for ``plan`` and ``ramp``.
        """
        micro_batch_size = self.plan(num_replicas).micro_batch_size
        return self.ramp(num_replicas).plans(
            data_parallel_size=num_replicas, micro_batch_size=micro_batch_size
        )
