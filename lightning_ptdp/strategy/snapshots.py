"""Snapshots of a run's training state in the memory of the nodes, from which a restart continues.

Every node has the whole training state, so nothing is lost as long as one node survives. A snapshot
is a checkpoint folder, written during the next step (``BackgroundSaver``). The previous snapshot is
removed when the new one is complete.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.callbacks.artifacts import checkpoint_dirs
from lightning_ptdp.checkpoint import CheckpointError, complete_checkpoints, files, same_outcome
from lightning_ptdp.checkpoint.memory_folders import LINK, MemoryFolder, check_memory, in_memory
from lightning_ptdp.checkpoint.metadata import METADATA_FILE
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero, own_rank
from lightning_ptdp.shims.lightning import StrategyBase, Trainer, dump_checkpoint
from lightning_ptdp.strategy.saving import FolderSaves
from lightning_ptdp.world.layout import ParallelLayout, Sharding

_CHUNK = 64 << 20  # bytes


class Snapshots:
    """Snapshots that a strategy takes, and the snapshot from which a run continues.

    Args:
        strategy: The strategy, whose model is saved.
    """

    _callback: object = None
    _last_step = -1
    _place: MemoryFolder | None = None
    _continued: MemoryFolder | None = None
    _saves: FolderSaves

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    def __getstate__(self) -> dict[str, object]:
        """Return the state without that of a run, whose process groups cannot be pickled."""
        return {"_strategy": self._strategy}

    def check(self) -> None:
        """Check before launch that every node holds the training state and has memory for it.

        Raises:
            ValueError: The state is divided among nodes, or the memory is too small.
        """
        config = self._strategy.config
        if config.snapshot_every_n_steps is not None:
            check_nodes(
                self._strategy.layout,
                shard=config.shard,
                num_nodes=self._strategy.num_nodes,
                replica_nodes=config.data_parallel_replicas,
            )
            check_memory(sum(p.nbytes for p in self._strategy.lightning_module.parameters()))

    def begin(self, trainer: Trainer) -> None:
        """Let ``trainer`` take a snapshot after the optimizer steps that the option names."""
        trainer.callbacks[:] = [one for one in trainer.callbacks if one is not self._callback]
        self._place = None
        self._last_step = trainer.global_step
        if self._strategy.config.snapshot_every_n_steps is not None:
            self._callback = self._strategy._names.LambdaCallback(on_train_batch_end=self._take)
            trainer.callbacks.append(self._callback)

    def _take(self, trainer: Trainer, *_: object) -> None:
        """Begin to save a snapshot, after the previous one is complete; collective.

        Raises:
            CheckpointError: The previous snapshot failed.
        """
        strategy = self._strategy
        step = trainer.global_step
        if step % strategy.config.snapshot_every_n_steps or step == self._last_step:
            return  # the batch did not end with an optimizer step
        self._last_step = step
        with strategy.waiting_in(f"taking a snapshot of step {step}"):
            place = self._place = self._place or self._created(trainer)
            target = place.path / f"step-{step}"
            self._saves.in_background = True
            self._saves.save(
                strategy,
                dump_checkpoint(trainer),
                str(target),
                done=lambda: self._publish(place, target),
            )

    def _created(self, trainer: Trainer) -> MemoryFolder:
        """Create the folder of this run's snapshots on every node, and return it."""
        strategy = self._strategy
        folder = Path([*checkpoint_dirs(trainer), trainer.default_root_dir][0])
        place = from_rank_zero(lambda: MemoryFolder.new(folder))
        group = None
        if strategy.num_nodes > 1:
            group, _ = dist.new_subgroups(
                strategy.num_processes, backend="gloo", timeout=strategy.config.timeout
            )
        self._saves = FolderSaves(folders=strategy._saves.folders, group=group)
        with same_outcome("creating the folder of snapshots"):
            if strategy.local_rank == 0:
                place.create()
        return place

    def _publish(self, place: MemoryFolder, target: Path) -> None:
        place.publish(target, linked=is_rank_zero())
        if self._continued is not None:
            self._continued.remove(linked=is_rank_zero())
            self._continued = None

    def located(self, path: Path, *, resuming: bool) -> Path:
        """Return the path from which a checkpoint is read; ``resuming``: to continue a training."""
        strategy = self._strategy
        place = None
        if in_memory(path):
            with strategy.waiting_in(f"looking for the snapshots of {path}"):
                path, place = fetch_snapshot(
                    path, ranks_per_node=strategy.num_processes, limit=strategy.config.timeout
                )
        elif in_memory(link := path.parent / LINK):
            place = MemoryFolder.of(link)  # older than the checkpoint on the disk
        self._continued = place if resuming else None
        return path

    def keep(self, exception: BaseException) -> None:
        """Complete the current snapshot after an exception, if the other ranks can."""
        if self._place is not None:
            self._saves.end(exception, self._strategy.config.timeout)
            self._place.trim()
            if is_rank_zero() and (kept := self._place.steps()):
                newest = max(kept, key=lambda name: kept[name])
                print(f"the snapshot {self._place.path / newest} is kept in memory", flush=True)
        self._place = self._continued = None

    def remove(self) -> None:
        """Remove the snapshots of a run that has ended normally."""
        if self._place is not None:
            with contextlib.suppress(CheckpointError):
                self._saves.finish(lambda _: contextlib.nullcontext())
        for place in filter(None, (self._place, self._continued)):
            if self._strategy.local_rank == 0:
                place.remove(linked=self._strategy.is_global_zero)
        self._place = self._continued = None


def check_nodes(
    layout: ParallelLayout, *, shard: Sharding, num_nodes: int, replica_nodes: int
) -> None:
    """Check that every node holds the whole training state.

    Args:
        layout: The layout.
        shard: State that is sharded over the replicas.
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
            "the model inside a node, and use data_parallel_replicas=num_nodes with shard; or "
            "leave snapshots out"
        )


def fetch_snapshot(
    path: Path, *, ranks_per_node: int, limit: timedelta
) -> tuple[Path, MemoryFolder]:
    """Return the newest snapshot of a run, on every node, and the folder of its snapshots.

    Nodes without this snapshot receive it from another node. If no node has a snapshot, the newest
    checkpoint on the disk, beside the link, is returned instead. Collective.

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
    part = files.part_name(target)
    sizes: list[dict[str, int]] = [{}]
    if sends:
        # Without its metadata, an interrupted copy does not count as a snapshot.
        ordered = sorted(target.iterdir(), key=lambda one: one.name == METADATA_FILE)
        sizes = [{one.name: one.stat().st_size for one in ordered}]
    dist.broadcast_object_list(sizes, src=source, group=group)
    if not sends:
        place.create()
        part.mkdir()
    for file, size in sizes[0].items():
        path = (target if sends else part) / file
        if size == 0:  # cannot be mapped into memory
            path.touch()
            continue
        content = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        for chunk in content.split(_CHUNK):
            dist.broadcast(chunk, src=source, group=group)
    if not sends:
        os.rename(part, target)


def _tell(message: str) -> None:
    if is_rank_zero():
        print(message, flush=True)
