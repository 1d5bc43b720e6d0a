"""Snapshots of a training in the memory of the nodes, from which a restart continues.

Every node has the whole training state, so that the loss of any node but the last one loses nothing.
A snapshot is a checkpoint folder, written beside the next step (``BackgroundSaver``). The previous
one is removed when it is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from datetime import timedelta
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_ptdp.checkpoint import (
    CheckpointError,
    SaveFolders,
    complete_checkpoints,
    same_outcome,
)
from lightning_ptdp.checkpoint.memory_folders import MemoryFolder
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero, own_rank
from lightning_ptdp.strategy.model_space import Checkpoint, ModelSpace
from lightning_ptdp.strategy.saving import FolderSaves
from lightning_ptdp.world.layout import ParallelLayout, Sharding

_CHUNK = 64 << 20  # bytes


class Snapshots:
    """Snapshots of one training.

    Args:
        folder: Folder of the training's checkpoints, the same on all ranks.
        ranks_per_node: Number of ranks of each node.
        limit: Limit of every wait for another rank.
        keeper: Folders of the training.
        continued: Snapshots of the run that this one continues. They are removed when the first
            snapshot is complete, and at the end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks_per_node: int,
        limit: timedelta,
        keeper: SaveFolders,
        continued: MemoryFolder | None,
    ) -> None:
        self._place = from_rank_zero(lambda: MemoryFolder.new(folder))
        self._continued, self._limit = continued, limit
        self._saves = FolderSaves(keeper=keeper, group=_node_group(ranks_per_node, limit))
        self._leads = is_rank_zero(self._saves.group)
        with same_outcome("creating the folder of snapshots"):
            if self._leads:
                self._place.create()

    def take(
        self, space: ModelSpace, checkpoint: Checkpoint, *, facts: Mapping[str, object]
    ) -> None:
        """Begin to save a snapshot, after the previous one is complete; collective.

        Args:
            space: The model.
            checkpoint: Lightning's checkpoint after an optimizer step.
            facts: Facts about the run, in JSON types.

        Raises:
            CheckpointError: The previous snapshot failed.
        """
        target = self._place.path / f"step-{checkpoint['global_step']}"
        self._saves.in_background = True
        self._saves.save(
            space,
            checkpoint,
            str(target),
            facts=facts,
            limit=self._limit,
            done=lambda: self._publish(target),
        )

    def keep(self, exception: BaseException) -> None:
        """Complete the current snapshot after an exception, if the other ranks can."""
        self._saves.end(exception, self._limit)
        if is_rank_zero() and (kept := self._place.steps()):
            newest = max(kept, key=lambda name: kept[name])
            print(f"the snapshot {self._place.path / newest} is kept in memory", flush=True)

    def remove(self) -> None:
        """Remove all snapshots at the end of the training."""
        with contextlib.suppress(CheckpointError):
            self._saves.finish(lambda _: contextlib.nullcontext())
        if self._leads:
            for place in filter(None, (self._place, self._continued)):
                place.remove(linked=is_rank_zero())

    def _publish(self, target: Path) -> None:
        self._place.publish(target, linked=is_rank_zero())
        if self._continued is not None:
            self._continued.remove(linked=is_rank_zero())
            self._continued = None


def check_nodes(
    layout: ParallelLayout, *, shard: Sharding, num_nodes: int, replica_nodes: int
) -> None:
    """Check that every node holds the whole training state.

    Args:
        layout: The layout.
        shard: What the replicas share.
        num_nodes: Number of nodes, with as many ranks each.
        replica_nodes: Number of nodes over which replicas keep whole copies.

    Raises:
        ValueError: The state is divided among nodes.
    """
    size = layout.world_size // num_nodes
    node = set(range(size))
    reason = ""
    if any(not {*layout.group_of("shards", rank)} <= node for rank in node):
        reason = f"{layout.describe()} divides the model among nodes"
    elif shard != "none" and replica_nodes % num_nodes:
        reason = f"shard={shard!r} divides it among the replicas of all nodes"
    if reason:
        raise ValueError(
            "snapshot_every_n_steps needs the whole training state on every node, because a lost "
            f"node loses its memory, but {reason} ({num_nodes} nodes of {size} processes). Keep "
            "the model inside a node, with data_parallel_replicas=num_nodes if replicas share its "
            "states; or leave snapshots out"
        )


def fetch_snapshot(
    path: Path, *, ranks_per_node: int, limit: timedelta
) -> tuple[Path, MemoryFolder]:
    """Return the newest snapshot of a training, on every node, and the folder of its snapshots.

    Nodes without it receive it from another node. If no node has one, this is the newest checkpoint
    on the disk beside the link. Collective.

    Args:
        path: A snapshot, the folder of snapshots, or the link to it; the same on all ranks.
        ranks_per_node: Number of ranks of each node.
        limit: Limit of every wait for another rank.

    Raises:
        CheckpointError: There is no checkpoint; or one could not be copied.
    """
    place = from_rank_zero(lambda: MemoryFolder.of(path))
    steps = gather(place.steps())  # not times: the clocks of nodes differ
    _, newest = max(((s, name) for found in steps for name, s in found.items()), default=(0, ""))
    if not newest:
        on_disk = from_rank_zero(lambda: complete_checkpoints(place.link.parent))
        if not on_disk:
            raise CheckpointError(
                f"the snapshots of {place.link} are lost, and there is no checkpoint beside it. "
                "Remove the link, if it exists, to begin a new training"
            )
        _tell(f"the snapshots of {place.link.parent} are lost. Training resumes from {on_disk[0]}")
        return Path(on_disk[0]), place
    holders = [rank for rank, found in enumerate(steps) if newest in found]
    missing = [rank for rank, found in enumerate(steps) if newest not in found]
    if missing:
        leaders = sorted({rank // ranks_per_node * ranks_per_node for rank in missing})
        ranks = [holders[0], *leaders]
        group = dist.new_group(sorted(ranks), backend="gloo", timeout=limit)
        with same_outcome(f"copying {newest} to the memory of other nodes"):
            if own_rank() in ranks:
                _copy(place, newest, source=holders[0], group=group)
    _tell(f"training resumes from the snapshot {place.path / newest} in memory")
    return place.path / newest, place


def _copy(place: MemoryFolder, name: str, *, source: int, group: Any) -> None:
    sends = own_rank() == source
    target = place.path / name
    part = place.path / f"{name}.tmp-{os.getpid():x}"
    sizes = [{one.name: one.stat().st_size for one in target.iterdir()} if sends else {}]
    dist.broadcast_object_list(sizes, src=source, group=group)
    if not sends:
        place.create()
        part.mkdir()
    for file, size in sizes[0].items():
        with open((target if sends else part) / file, "rb" if sends else "wb") as stream:
            for begin in range(0, size, _CHUNK):
                chunk = torch.empty(min(_CHUNK, size - begin), dtype=torch.uint8)
                if sends:
                    cast(BufferedReader, stream).readinto(chunk.numpy().data)
                dist.broadcast(chunk, src=source, group=group)
                if not sends:
                    stream.write(chunk.numpy().data)
    if not sends:
        os.rename(part, target)


def _node_group(ranks_per_node: int, limit: timedelta) -> Any:
    """Return a gloo group of this node's ranks; None if there is one node."""
    if not dist.is_initialized() or ranks_per_node == dist.get_world_size():
        return None
    groups = [
        dist.new_group(list(range(first, first + ranks_per_node)), backend="gloo", timeout=limit)
        for first in range(0, dist.get_world_size(), ranks_per_node)
    ]
    return groups[own_rank() // ranks_per_node]


def _tell(message: str) -> None:
    if is_rank_zero():
        print(message, flush=True)
