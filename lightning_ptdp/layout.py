"""Which rank does what: the degrees of parallelism, the coordinates of every rank, and the process groups.

Ranks are laid out as an array ``(pipeline, data, context, tensor)`` in row-major order: tensor parallelism is innermost,
so that it stays inside a node, and pipeline parallelism outermost, so that its small messages cross nodes
(arXiv 2104.04473, section 3.2)::

    p=2 d=2 t=2          data 0        data 1
    pipeline 0           0   1         2   3
    pipeline 1           4   5         6   7
                         t0  t1        t0  t1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_ptdp.option_types import Size, check_types
from lightning_ptdp.placement import Placement, rank_of_stage, stages_of_rank

__all__ = ["Axis", "Coordinates", "ParallelLayout", "divisors", "nearest_divisors"]

Axis = Literal["tensor", "context", "data", "pipeline", "model", "replica_sum"]

_DIMS = ("pipeline", "data", "context", "tensor")
_AXIS_DIMS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data",),
    "pipeline": ("pipeline",),
    "model": ("pipeline", "context", "tensor"),
    "replica_sum": ("data", "context"),
}


_TRIED = 100_000


def divisors(number: int) -> list[int]:
    """The divisors of ``number``, in ascending order; of one above 10^10 those that are at most 100,000, and what they leave."""
    small = [k for k in range(1, min(math.isqrt(number), _TRIED) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def nearest_divisors(number: int, wanted: int, *, count: int = 3) -> list[int]:
    """The divisors of ``number`` closest to ``wanted``, in ascending order: what an error message proposes."""
    return sorted(sorted(divisors(number), key=lambda k: (abs(k - wanted), k))[:count])


@dataclass(frozen=True, kw_only=True, order=True)
class Coordinates:
    """Where a rank stands on each axis."""

    pipeline: int = 0
    data: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The degrees of parallelism of one run, checked.

    Args:
        world_size: Number of processes.
        tensor_parallel_size: t, ranks that share one layer's matrices.
        pipeline_parallel_size: p, ranks that share the layers.
        virtual_pipeline_size: v, model chunks that a pipeline rank holds (interleaving).
        context_parallel_size: c, ranks that share one sequence along time.
        sequence_parallel: Split the activations between tensor-parallel regions along the sequence
            (arXiv 2205.05198, section 4.2.2).
        placement: Which rank holds which stage (placement.py); decided by the schedule.

    The data-parallel size d is what remains of the world: ``world_size / (t * p * c)``.

    Raises:
        ValueError: A degree is not a positive integer, the world size is not a multiple of t*p*c, v > 1 without a
            pipeline, sequence parallelism without tensor parallelism, or an unknown placement.
    """

    world_size: Size
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    virtual_pipeline_size: Size = 1
    context_parallel_size: Size = 1
    sequence_parallel: bool = False
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        check_types(self)
        model = self.model_parallel_size
        if self.world_size % model:
            lower, upper = self.world_size // model * model, -(-self.world_size // model) * model
            works = " or ".join(str(n) for n in (lower, upper) if n)
            raise ValueError(
                f"world_size={self.world_size} is not divisible by tensor_parallel_size * pipeline_parallel_size * "
                f"context_parallel_size = {self.tensor_parallel_size} * {self.pipeline_parallel_size} * "
                f"{self.context_parallel_size} = {model}; use {works} processes, or degrees whose product is one of "
                f"{nearest_divisors(self.world_size, model)}"
            )
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_size={self.virtual_pipeline_size} needs a pipeline to interleave: set "
                "pipeline_parallel_size to 2 or more, or virtual_pipeline_size=1"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True splits activations over the tensor-parallel ranks, but tensor_parallel_size=1: "
                "set tensor_parallel_size to 2 or more, or sequence_parallel=False"
            )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model: t * p * c."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas, d."""
        return self.world_size // self.model_parallel_size

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p * v."""
        return self.pipeline_parallel_size * self.virtual_pipeline_size

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds ``stage``."""
        return rank_of_stage(stage, pipeline_parallel_size=self.pipeline_parallel_size, placement=self.placement)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in ascending order."""
        return stages_of_rank(
            pipeline_rank,
            pipeline_parallel_size=self.pipeline_parallel_size,
            virtual_pipeline_size=self.virtual_pipeline_size,
            placement=self.placement,
        )

    @property
    def last_stage_rank(self) -> int:
        """The pipeline rank on which the loss is computed."""
        return self.rank_of_stage(self.num_stages - 1)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the axes (pipeline, data, context, tensor)."""
        return (
            self.pipeline_parallel_size,
            self.data_parallel_size,
            self.context_parallel_size,
            self.tensor_parallel_size,
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank``.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside the world of {self.world_size} processes")
        values = {}
        for dim, size in zip(reversed(_DIMS), reversed(self.shape), strict=True):
            rank, values[dim] = divmod(rank, size)
        return Coordinates(**values)

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at ``coordinates``."""
        rank = 0
        for dim, size in zip(_DIMS, self.shape, strict=True):
            rank = rank * size + getattr(coordinates, dim)
        return rank

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis, each in the order of that axis; every rank is in exactly one.

        ``"model"`` holds one replica, ``"replica_sum"`` the ranks over which gradients are summed (data x context).
        """
        dims = _AXIS_DIMS[axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.coordinates(rank)
            fixed = tuple(getattr(coordinates, dim) for dim in _DIMS if dim not in dims)
            found.setdefault(fixed, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of ``axis`` that contains ``rank``, computed without listing the others."""
        here = self.coordinates(rank)
        moving = _AXIS_DIMS[axis]
        sizes = dict(zip(_DIMS, self.shape, strict=True))
        total = math.prod(sizes[dim] for dim in moving)
        ranks = []
        for index in range(total):
            values = {dim: getattr(here, dim) for dim in _DIMS}
            for dim in reversed(moving):
                index, values[dim] = divmod(index, sizes[dim])
            ranks.append(self.rank(Coordinates(**values)))
        return tuple(ranks)

    def describe(self) -> str:
        """Short form for logs: ``t2 p2 v2 d1``."""
        letters = {
            "t": self.tensor_parallel_size,
            "p": self.pipeline_parallel_size,
            "v": self.virtual_pipeline_size,
            "c": self.context_parallel_size,
            "d": self.data_parallel_size,
        }
        text = " ".join(f"{k}{n}" for k, n in letters.items() if n > 1 or k in "tpd")
        return text + (" sp" if self.sequence_parallel else "")
