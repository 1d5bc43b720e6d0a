"""Process groups of one rank, created from a layout and connected at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ptdp.shims.torch_distributed import (
    accepts_max_ctas,
    binds_device,
    nccl_options,
    resolve_group,
)
from lightning_ptdp.world.axes import SETS
from lightning_ptdp.world.communicators import (
    CHANNEL,
    CHANNEL_CTAS,
    URGENT,
    channel_rounds,
    group_names,
    shared_name,
)
from lightning_ptdp.world.layout import ParallelLayout

_BEYOND_GUARD = 2  # times the limit: later than every limit of the hang guard
_CPU = torch.device("cpu")
T = TypeVar("T")


class LostHandle:
    """Replacement for the handle of a process group that was pickled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this module was pickled together with its process groups, which exist only in the "
            "processes that created them. Create a new module and load the checkpoint or state_dict"
        )


@dataclass(frozen=True)
class Group:
    """A process group from the view of one member.

    Attributes:
        handle: Value of ``group`` in calls of ``torch.distributed``; None if the group has one
            rank, which needs no communication.
        ranks: Global ranks of the members, in the order of the axis.
        rank: Position of this process in ``ranks``.
    """

    handle: Any = None
    ranks: tuple[int, ...] = (0,)
    rank: int = 0

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    @property
    def name(self) -> str:
        """Return the name by which torch finds the group in this process."""
        return self.handle.group_name

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every member; collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    @classmethod
    def named(cls, name: str) -> Group:
        """Return the group of that name."""
        handle = resolve_group(name)
        return cls(handle, tuple(dist.get_process_group_ranks(handle)), dist.get_rank(handle))

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace the process group, which cannot be pickled.

        An unpickled group can be inspected, but cannot communicate.
        """
        return Group, (self.handle if self.handle is None else LostHandle(), self.ranks, self.rank)

    def __deepcopy__(self, memo: Any) -> Group:
        """Return self: the copy of a module uses the same process group."""
        return self


@dataclass(frozen=True, kw_only=True)
class ProcessMesh:
    """This rank's coordinates and its group on every axis and set of axes."""

    layout: ParallelLayout
    rank: int = 0
    timeout: timedelta | None = None
    device: torch.device = _CPU
    groups: dict[str, Group] = field(default_factory=dict)
    channels: dict[tuple[int, int, str], Any] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        *,
        layout: ParallelLayout,
        rank: int,
        timeout: timedelta | None = None,
        device: torch.device = _CPU,
        channel_ctas: int | None = None,
    ) -> ProcessMesh:
        """Create and connect the groups; collective over the world.

        The default process group must exist if the world has two ranks or more.

        Args:
            layout: The degrees of parallelism.
            rank: This process.
            timeout: Limit of every wait for another rank.
            device: Device of the tensors that the groups exchange.
            channel_ctas: Maximum number of the GPU's thread blocks that NCCL may use for a message
                between stages; None: ``CHANNEL_CTAS`` if NCCL accepts a number.
        """
        mesh = cls(layout=layout, rank=rank, timeout=timeout, device=device)
        shared: dict[tuple[str, tuple[int, ...]], Group] = {}
        if layout.world_size > 1:
            _connect(None, device)
        for axis in group_names(layout):
            ranks = layout.group_of(axis, rank)
            key = (shared_name(axis), ranks)
            if key not in shared:
                shared[key] = mesh._new_group(ranks, axis) if len(ranks) > 1 else Group(None, ranks)
            mesh.groups[axis] = shared[key]
        mesh._open_channels(channel_ctas)
        return mesh

    @property
    def where(self) -> str:
        """Return this rank's coordinates, for messages."""
        return ", ".join(
            f"{axis} {place}" for axis, place in self.layout.coordinates(self.rank).items()
        )

    def group(self, axis: str) -> Group:
        """Return this rank's group on an axis, or a set of axes (``layout.SETS``)."""
        return self.groups[axis]

    def subgroup(self, axis: str, places: tuple[int, ...]) -> Group:
        """Return the group of an axis's members at ``places``, created on first use.

        The places are ascending and include this rank's. The call is collective over the axis: its
        ranks must divide the axis into groups, and must do so equally often and in the same order.
        """
        parent = self.group(axis)
        if len(places) == parent.size:
            return parent
        ranks = tuple(parent.ranks[place] for place in places)
        for key in group_names(self.layout):
            # All ranks create the same number of groups: those of one rank are created again.
            if key not in URGENT and self.groups[key].ranks == ranks and len(ranks) > 1:
                return self.groups[key]
        return self._made(axis, ranks)

    @property
    def world(self) -> Group:
        """Return the group of all ranks."""
        size = self.layout.world_size
        return Group(dist.group.WORLD if size > 1 else None, tuple(range(size)), self.rank)

    def levels(self, axes: tuple[str, ...], nodes: int) -> tuple[Group, Group]:
        """Return two groups: this rank's node, and the ranks with its place in the other nodes.

        Together they cover the ranks of several axes in two levels. Neighbours share a node. The
        call is collective over the world the first time: every rank must request the same numbers
        in the same order. With one node the first group has all ranks.
        """
        ranks = self.layout.group_of(axes, self.rank)
        names = (*SETS, *axes)  # sets first: context parallelism does not share its group
        parent = next(group for group in map(self.group, names) if group.ranks == ranks)
        if nodes == 1:
            return parent, Group(None, (self.rank,), 0)
        size = parent.size // nodes
        assert size * nodes == parent.size, (nodes, parent.ranks)
        node, place = divmod(parent.rank, size)
        inside = parent.ranks[node * size : (node + 1) * size]
        between = parent.ranks[place::size]
        if size == 1:
            return Group(None, inside, 0), parent
        # A thread reduces over them, so they share no communicator with the other groups.
        return self._made("inside", inside), self._made("between", between)

    def apart(self, group: Group) -> Group:
        """Return a group of the same ranks with a communicator of its own, created on first use."""
        return self._made("apart", group.ranks) if group.size > 1 else group

    def _made(self, name: str, ranks: tuple[int, ...]) -> Group:
        """Return the group of ``ranks`` for this purpose, created on first use."""
        key = f"{name}{ranks}"
        if key not in self.groups:
            self.groups[key] = self._new_group(ranks, key)
        return self.groups[key]

    def _new_group(self, ranks: tuple[int, ...], axis: str) -> Group:
        """Return a connected group.

        Groups that ranks create at the same time are disjoint, so that no group waits for another.
        """
        handle = _unconnected_group(ranks, self.timeout, axis)
        if len(ranks) > 1:
            _connect(handle, self.device)
        return Group(handle, ranks, ranks.index(self.rank))

    def _open_channels(self, max_ctas: int | None) -> None:
        """Open a communicator for each (source, destination, direction) of neighbouring stages.

        Sends and receives on one NCCL communicator run in the order in which they were issued. With
        two directions of traffic on one communicator, ranks that each send before they receive wait
        for each other for ever (most easily at p = 2, where the next and the previous rank are the
        same). Therefore every channel has its own communicator. They are created and connected in
        rounds of disjoint pairs, in which no rank can wait for a rank of another pair. A rank
        without a pair in a round creates a group of itself, so that all ranks create the same
        number of groups.
        """
        ranks = self.groups["pipeline"].ranks
        for pairs in channel_rounds(self.layout):
            channels = [(ranks[source], ranks[target], way) for source, target, way in pairs]
            channel = next((one for one in channels if self.rank in one[:2]), None)
            members = (self.rank,) if channel is None else tuple(sorted(channel[:2]))
            handle = _unconnected_group(members, self.timeout, CHANNEL, max_ctas)
            if channel is not None:
                _connect_channel(*channel[:2], self.rank, handle, self.device)
                self.channels[channel] = handle


def default_group_options(backend: str, device: torch.device, limit: timedelta) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` that communicators.py requires."""
    if backend != "nccl":
        return {"timeout": limit}
    return {"timeout": _BEYOND_GUARD * limit, "device_id": device if binds_device() else None}


def _unconnected_group(
    ranks: tuple[int, ...], timeout: timedelta | None, axis: str, max_ctas: int | None = None
) -> Any:
    options = None
    backend = None
    if len(ranks) == 1:
        backend = "gloo"  # it is only counted; NCCL may allocate even for one rank
    elif dist.get_backend() == "nccl":
        timeout = timeout and _BEYOND_GUARD * timeout
        if axis == CHANNEL and max_ctas is None and accepts_max_ctas():
            max_ctas = CHANNEL_CTAS
        options = nccl_options(timeout, high_priority=axis in URGENT, max_ctas=max_ctas)
    return dist.new_group(
        list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=axis,
    )


def _connect(group: Any, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _connect_channel(source: int, target: int, rank: int, group: Any, device: torch.device) -> None:
    """Send one element along the channel.

    NCCL has a separate connection for messages, which a collective does not create.
    """
    element = torch.zeros(1, device=device)
    if rank == source:
        dist.send(element, target, group=group)
    else:
        dist.recv(element, source, group=group)
