"""Checks of the data against the layout: batches, microbatches and sequence length."""

from __future__ import annotations

from lightning_ptdp.attention import check_sequence
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["check_data"]


def check_data(data: object, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Check the sizes of batches and sequences against the layout.

    The batch sizes of a loader or data module must match the microbatches and the schedule. A data
    module's ``batch_plans`` may depend on the number of replicas. Sequence and context parallelism
    must be able to split ``sequence_length``, if the data have this attribute.

    Raises:
        ValueError: A replica's batch is smaller than ``num_microbatches`` or ``micro_batch_size``,
            the schedule does not accept the number of microbatches, or the length is not divisible.
    """
    if hasattr(data, "batch_plans"):
        sizes = [plan.replica_batch for plan in data.batch_plans(num_replicas=layout.num_replicas)]
    else:
        sizes = [getattr(data, "batch_size", None)]
    for size in sizes:
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            _check_batch(size, config)
    length = getattr(data, "sequence_length", None)
    if isinstance(length, int):
        _check_length(length, config)


def _check_batch(size: int, config: PTDPConfig) -> None:
    for field, value in (
        ("num_microbatches", config.num_microbatches),
        ("micro_batch_size", config.micro_batch_size),
    ):
        if value is not None and size < value:
            raise ValueError(
                f"{field}={value} is larger than the batch of {size} samples that the train "
                f"dataloader gives each replica. Use {field}={size} or less, or a batch size "
                f"of at least {value}"
            )
    if config.micro_batch_size is not None:
        try:
            config.build_schedule(config.microbatches(size))
        except ValueError as error:
            raise ValueError(
                f"micro_batch_size={config.micro_batch_size} splits a replica's batch of "
                f"{size} samples into {config.microbatches(size)} microbatches, which the "
                f"schedule does not support: {error}"
            ) from None


def _check_length(length: int, config: PTDPConfig) -> None:
    size = config.tensor_parallel_size if config.sequence_parallel else 1
    check_sequence(length, config.context_parallel_size, sequence_parallel_size=size)
    if length % size:
        nearest = sorted({length // size * size, -(-length // size) * size} - {0})
        raise ValueError(
            f"sequence_length={length} is not divisible by tensor_parallel_size={size}, over "
            "which sequence_parallel=True splits it. Use "
            f"sequence_length={' or '.join(map(str, nearest))}, or sequence_parallel=False"
        )
