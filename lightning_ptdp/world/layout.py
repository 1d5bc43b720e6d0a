"""Layout of the ranks: axes, degrees of parallelism, coordinates and group members.

Ranks are laid out as an array ``(pipeline, data, context, tensor)`` in row-major order. Tensor
parallelism is innermost, so that it stays inside a node. Pipeline parallelism is outermost, so that
its small messages cross nodes (arXiv 2104.04473, section 3.2)::

    p=2 d=2 t=2          data 0        data 1
    pipeline 0           0   1         2   3
    pipeline 1           4   5         6   7
                         t0  t1        t0  t1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from lightning_ptdp.base.option_types import Size, check_types
from lightning_ptdp.world.axes import (
    AXES,
    SETS,
    Axis,
    StagePlacement,
    Stages,
    check_interleaving,
    nearest_divisors,
    nearest_multiples,
)

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
"""State that is sharded over the replicas; each value includes the values before it."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Options of a layout, without the world size.

    Attributes:
        tensor_parallel_size: t, ranks that share one layer's matrices.
        pipeline_parallel_size: p, ranks that share the layers.
        virtual_pipeline_size: v, model chunks that a pipeline rank holds (interleaving).
        context_parallel_size: c, ranks that share one sequence along time.
        expert_parallel_size: e, ranks of data and context parallelism over which the experts of a
            mixture are distributed.
        expert_tensor_parallel_size: Tensor-parallel ranks over which each expert is split: 1 or t.
        sequence_parallel: Split the activations between tensor-parallel regions along the sequence
            (arXiv 2205.05198, section 4.2.2).
    """

    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    virtual_pipeline_size: Size = 1
    context_parallel_size: Size = 1
    expert_parallel_size: Size = 1
    expert_tensor_parallel_size: Size = 1
    sequence_parallel: bool = False

    @property
    def smallest_world_size(self) -> int:
        """Return the number of processes of the smallest world that holds the model."""

        def size(axes: Iterable[Axis]) -> int:
            names = (f"{axis.name}_parallel_size" for axis in axes if axis.name != "data")
            return math.prod(getattr(self, name) for name in names)

        dimensions = [axis for axis in AXES if axis.within is None]
        world = size(dimensions)
        for axis in AXES:
            if axis.within is not None:
                within_size = size(row for row in dimensions if row.reads in SETS[axis.within])
                world *= math.lcm(within_size, size([axis])) // within_size
        return world


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(Degrees, Stages):
    """The degrees of parallelism of one run, checked.

    Args:
        world_size: Number of processes.
        placement: Placement of the stages on the ranks (axes.py); decided by the
            schedule.

    The data-parallel size d is the remainder of the world: ``world_size / (t * p * c)``.

    Attributes:
        axes: The table of axes, in the order in which messages name them.

    Raises:
        ValueError: A degree is not a positive integer, the world size is not a multiple of t*p*c, e
            does not divide d*c, experts are split over a part of t, v > 1 without a pipeline,
            sequence parallelism without tensor parallelism, or an unknown placement.
    """

    axes: ClassVar[tuple[Axis, ...]] = AXES
    rank_of_stage = Stages.rank_of

    world_size: Size
    placement: StagePlacement = "loop"

    def __post_init__(self) -> None:
        check_types(self)
        names = [f"{axis.name}_parallel_size" for axis in self._dimensions if axis.name != "data"]
        sizes = [getattr(self, name) for name in names]
        model = math.prod(sizes)
        if self.world_size % model:
            nearest = nearest_multiples(self.world_size, model)
            raise ValueError(
                f"world_size={self.world_size} is not divisible by {' * '.join(names)} = "
                f"{' * '.join(map(str, sizes))} = {model}. Use {nearest} processes, or sizes "
                f"whose product is one of {nearest_divisors(self.world_size, model)}"
            )
        for axis in self.blocked:
            self._check_blocks(axis)
        if self.expert_tensor_parallel_size not in (1, self.tensor_parallel_size):
            raise ValueError(
                f"expert_tensor_parallel_size={self.expert_tensor_parallel_size} must be "
                f"{self.tensor_parallel_size} (each expert is split over all ranks of "
                f"tensor_parallel_size={self.tensor_parallel_size}) or 1 (experts are not split)"
                if self.tensor_parallel_size > 1
                else f"expert_tensor_parallel_size={self.expert_tensor_parallel_size} splits "
                "each expert over the tensor-parallel ranks, but tensor_parallel_size=1. "
                "Increase tensor_parallel_size, or use expert_tensor_parallel_size=1"
            )
        check_interleaving(self.pipeline_parallel_size, self.virtual_pipeline_size)
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True splits activations over the tensor-parallel ranks, "
                "but tensor_parallel_size=1. Use tensor_parallel_size=2 or more, or "
                "sequence_parallel=False"
            )

    @classmethod
    def options(cls) -> dict[str, int | bool]:
        """Return the options of a layout with their defaults.

        They are the degrees and ``sequence_parallel``.
        """
        return {field.name: getattr(cls, field.name) for field in fields(Degrees)}

    @classmethod
    def chosen(cls, options: Mapping[str, Any], *, world_size: int) -> ParallelLayout:
        """Return the layout on ``world_size`` processes of a strategy with these options.

        Other options are ignored.

        Raises:
            ValueError: The constructor refuses the options.
        """
        return cls(
            world_size=world_size,
            **{name: options.get(name, default) for name, default in cls.options().items()},
        )

    @cached_property
    def data_parallel_size(self) -> int:
        """Return d, the part of the world that the other axes leave."""
        return self.world_size // math.prod(
            self.size(axis.name) for axis in self._dimensions if axis.name != "data"
        )

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that read the samples of one replica."""
        return self.size("model")

    @property
    def divides_model(self) -> bool:
        """Return True if a rank holds or reads only a part of the model or data of one process."""
        return self.size("model") > 1 or self.size("shards") > 1

    @cached_property
    def blocked(self) -> tuple[Axis, ...]:
        """Return the axes with more than one rank that take the ranks of other axes in blocks."""
        return tuple(
            axis for axis in self.axes if axis.within is not None and self.size(axis.name) > 1
        )

    def summed(self, sharded: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which the gradient of a parameter is a sum.

        The parameter is split over the axes ``sharded``. The result names axes, or ranks of other
        blocks, whose ranks read another part of the batch.
        """
        replica_axes = tuple(axis.others for axis in self.blocked if axis.name in sharded)
        return replica_axes or tuple(
            axis.name
            for axis in self._dimensions
            if axis.reads != "same" and axis.name not in sharded
        )

    @property
    def gradient_sums(self) -> tuple[tuple[str, ...], ...]:
        """Return the values that ``summed`` has, of any parameter on any rank."""
        return self.summed(()), *(self.summed((axis.name,)) for axis in self.blocked)

    @property
    def num_replicas(self) -> int:
        """Return the number of ranks that read other samples."""
        return self.size("replicas")

    def replica(self, rank: int) -> int:
        """Return the index of the replica that ``rank`` belongs to."""
        return self.group_of("replicas", rank).index(rank)

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis, or a set of axes (``SETS``)."""
        if axis in SETS:
            blocks = (
                math.prod(self.size(row.name) for row in self.blocked) if axis == "shards" else 1
            )
            return blocks * math.prod(map(self.size, self._moving(axis)))
        blocked = self._blocked(axis)
        if blocked is not None and axis == blocked.others:
            return self.size(blocked.within or "") // self.size(blocked.name)
        return int(getattr(self, f"{axis}_parallel_size"))

    @property
    def last_stage_rank(self) -> int:
        """Return the pipeline rank on which the loss is computed."""
        return self.rank_of(self.num_stages - 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of ``rank`` on each axis, the outermost first.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not a rank of {self.world_size} processes")
        values = {}
        for name in reversed(self._order):
            rank, values[name] = divmod(rank, self.size(name))
        return {name: values[name] for name in self._order}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at ``coordinates``."""
        rank = 0
        for name in self._order:
            rank = rank * self.size(name) + coordinates[name]
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of an axis, or of a set of axes (``SETS``).

        Each group is in the order of that axis. Every rank is in exactly one group.
        """
        return tuple(dict.fromkeys(self.group_of(axis, rank) for rank in range(self.world_size)))

    def group_of(self, axis: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the group that contains ``rank``, of an axis, a set, or several axes.

        It is computed without listing the other groups.
        """
        if (blocked := self._blocked(axis)) is not None:
            ranks = self.group_of(blocked.within or (), rank)
            size = self.size(blocked.name)
            first, place = divmod(ranks.index(rank), size)
            return ranks[first * size :][:size] if axis == blocked.name else ranks[place::size]
        if axis == "shards" and self.blocked:
            (block,) = self.blocked
            members = (
                self.group_of(self._moving("shards"), peer)
                for peer in self.group_of(block.name, rank)
            )
            return tuple(sorted(itertools.chain(*members)))
        coordinates = self.coordinates(rank)
        moving = self._moving(axis)
        places = itertools.product(*(range(self.size(name)) for name in moving))
        return tuple(
            self.rank({**coordinates, **dict(zip(moving, place, strict=True))}) for place in places
        )

    def stride(self, axis: str) -> int:
        """Return the distance between the ranks of neighbours on an axis.

        For a set of axes, this is the distance on its innermost axis.
        """
        if (blocked := self._blocked(axis)) is not None:
            return self.stride(blocked.within or "") * (
                1 if axis == blocked.name else self.size(blocked.name)
            )
        order = self._order
        moving = self._moving(axis)
        return math.prod(map(self.size, order[order.index(moving[-1]) + 1 :]))

    def named_axes(self) -> tuple[Axis, ...]:
        """Return the axes that summaries name."""
        return tuple(axis for axis in self.axes if axis.always_named or self.size(axis.name) > 1)

    def describe(self) -> str:
        """Return a short form for logs: ``t2 p2 v2 d1``."""
        chunks = (
            {"pipeline": f" v{self.virtual_pipeline_size}"}
            if self.virtual_pipeline_size > 1
            else {}
        )
        text = " ".join(
            f"{axis.letter}{self.size(axis.name)}{chunks.get(axis.name, '')}"
            for axis in self.named_axes()
        )
        split = (
            f" et{self.expert_tensor_parallel_size}" if self.expert_tensor_parallel_size > 1 else ""
        )
        return text + split + (" sp" if self.sequence_parallel else "")

    @cached_property
    def _order(self) -> list[str]:
        return [axis.name for axis in sorted(self._dimensions, key=lambda axis: axis.place)]

    @cached_property
    def _dimensions(self) -> tuple[Axis, ...]:
        """Return the axes whose degrees multiply to the world size."""
        return tuple(axis for axis in self.axes if axis.within is None)

    def _moving(self, axis: str | Sequence[str]) -> list[str]:
        if isinstance(axis, str):
            axis = (
                tuple(row.name for row in self._dimensions if row.reads in SETS[axis])
                if axis in SETS
                else (axis,)
            )
        return [name for name in self._order if name in axis]

    def _blocked(self, axis: str | Sequence[str]) -> Axis | None:
        """Return the axis that takes ranks in blocks and to which ``axis`` belongs.

        ``axis`` is the name of that axis, or of the ranks in its other blocks.
        """
        if not isinstance(axis, str):
            axis = axis[0] if len(axis) == 1 else ""
        return next(
            (row for row in self.axes if row.within is not None and axis in (row.name, row.others)),
            None,
        )

    def _check_blocks(self, axis: Axis) -> None:
        assert axis.within is not None
        count = self.size(axis.within)
        size = self.size(axis.name)
        if count % size:
            axes = [row.name for row in self._dimensions if row.reads in SETS[axis.within]]
            raise ValueError(
                f"{axis.name}_parallel_size={size} does not divide {count}, the ranks of "
                f"{' and '.join(axes)} parallelism. Use one of {nearest_divisors(count, size)}, "
                "or other sizes"
            )
