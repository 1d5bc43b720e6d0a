"""Tests of snapshots in memory: what a restart finds, in any layout, and what is left behind."""

import contextlib
import gc
import os
import shutil
import threading
import time
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lightning_ptdp.checkpoint import (
    CheckpointError,
    memory_folders,
    newest_checkpoint,
    read_full,
    read_metadata,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.files import SPARE
from lightning_ptdp.checkpoint.memory_folders import LINK, MemoryFolder, check_memory
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy import snapshots as snapshots_module
from lightning_ptdp.strategy.snapshots import check_nodes, fetch_snapshot
from lightning_ptdp.world.layout import ParallelLayout
from tests.checkpoint.layouts import replicated
from tests.models.fits import quiet_trainer
from tests.tiny_gpt import LitTiny, Run

STEPS, LOST_AFTER = 6, 4
LAYOUTS = {
    "d2": {},
    "t2": {"tensor_parallel_size": 2},
    "p2v2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "num_microbatches": 2},
    "d2 sharded": {"shard": "parameters"},
}


class Lost(RuntimeError):
    """Stands for the loss of a process."""


class Resumable(DataLoader):
    """Loader that continues after the batches that it has yielded."""

    seen = begin = 0

    def __iter__(self):
        for self.seen, batch in enumerate(super().__iter__(), 1):
            if self.seen > self.begin:
                yield batch

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.begin = state["seen"]


class Failing(LitTiny):
    """Fails on every rank in the step after ``LOST_AFTER``."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == LOST_AFTER:
            raise Lost


def fit(rank, folder, layout, fails, every, start=""):
    """Train in ``layout``; return the weights, and what was in memory when it failed."""
    memory_folders._ROOT = Path(folder) / "shm"  # in a forked process of the pool
    strategy = PTDPStrategy(**layout, snapshot_every_n_steps=every)
    run = Run(steps=STEPS, clip=None)
    module = (Failing if fails else LitTiny)(run)
    seen = {"newest": newest_checkpoint(Path(folder) / "runs")}
    world = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer(
        Path(folder) / "runs",
        devices=world,
        strategy=strategy,
        max_steps=STEPS,
        use_distributed_sampler=False,
    )
    plain = run.make_loaders(trainer)[0]
    loader = Resumable(plain.dataset, batch_size=plain.batch_size, sampler=plain.sampler)
    L.seed_everything(3, verbose=False)
    try:
        trainer.fit(module, loader, ckpt_path=start or seen["newest"])
    except Lost:
        assert fails
    weights = strategy.gather_state_dict() if not fails else {}
    return {**seen, "step": trainer.global_step, "weights": weights}


@pytest.fixture
def shm(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(memory_folders, "_ROOT", root)
    return root


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """Return a function that trains in a layout without loss and returns the weights."""
    folder = str(tmp_path_factory.mktemp("whole"))

    @cache
    def train(layout):
        return pool.run(fit, world_size=2, args=(folder, LAYOUTS[layout], False, None))[0][
            "weights"
        ]

    return train


def snapshots(shm):
    return sorted(path.name for path in shm.glob("*/*/step-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("resumed", LAYOUTS)
@pytest.mark.parametrize("lost", ["d2", "p2v2"])
def test_restart_continues_from_newest_step_in_any_layout(
    pool, shm, tmp_path, whole, lost, resumed
):
    folder = str(tmp_path)
    pool.run(fit, world_size=2, args=(folder, LAYOUTS[lost], True, 1))
    assert snapshots(shm) == [f"step-{LOST_AFTER}"]
    newest = newest_checkpoint(tmp_path / "runs")
    assert newest is not None and read_metadata(newest).run["global_step"] == LOST_AFTER
    results = pool.run(fit, world_size=2, args=(folder, LAYOUTS[resumed], False, 1))
    assert all(result["newest"] == newest for result in results)
    assert results[0]["step"] == STEPS
    exact = lost == resumed
    for name, value in whole(resumed).items():
        other = results[0]["weights"][name]
        assert torch.equal(value, other) if exact else torch.allclose(value, other, atol=1e-5), name
    assert not [*shm.glob("*/*")]
    assert not [*(tmp_path / "runs").rglob(LINK)]


MEMORY = Path("/proc/self/cwd/shm")  # the same path on every node, another folder on each


def fit_on_two_nodes(rank, folder, fails, start):
    """Train two replicas, each on a node with a memory of its own."""
    memory_folders._ROOT = MEMORY
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # the pool has connected them
    os.environ.update(address, LOCAL_RANK="0", NODE_RANK=str(rank), GROUP_RANK=str(rank))
    strategy = PTDPStrategy(snapshot_every_n_steps=1)
    run = Run(steps=STEPS, clip=None)
    with contextlib.chdir(Path(folder) / f"node{rank}"):
        trainer = quiet_trainer(
            Path(folder) / "runs",
            num_nodes=2,
            strategy=strategy,
            max_steps=STEPS,
            use_distributed_sampler=False,
        )
        try:
            module = (Failing if fails else LitTiny)(run)
            trainer.fit(module, run.make_loaders(trainer)[0], ckpt_path=start)
        except Lost:
            assert fails
        kept = sorted(path.name for path in MEMORY.glob("*/*/*"))
    return {"kept": kept, "step": trainer.global_step}


def fetch(rank, folder, given):
    """Look for the newest snapshot on two nodes with two ranks each."""
    memory_folders._ROOT = MEMORY
    with contextlib.chdir(Path(folder) / f"node{rank // 2}"):
        try:
            found, _ = fetch_snapshot(Path(given), ranks_per_node=2, limit=timedelta(seconds=30))
        except CheckpointError as error:
            return str(error)
        verify_checkpoint(found)
        return f"{found.name} {read_full(found)['w'].tolist()}"


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_folders, "_ROOT", MEMORY)
    folders = [tmp_path / f"node{number}" for number in range(2)]
    for folder in folders:
        (folder / "shm").mkdir(parents=True)
    return folders


def save(path, step):
    save_checkpoint(
        path / f"step-{step}",
        tensors=replicated({"w": torch.full((2,), float(step))}),
        state={},
        metadata={},
    )


def test_every_node_keeps_whole_snapshot(pool, tmp_path, nodes):
    results = pool.run(fit_on_two_nodes, world_size=2, args=(str(tmp_path), True, None))
    assert [result["kept"] for result in results] == [["link", f"step-{LOST_AFTER}"]] * 2
    shutil.rmtree(nodes[0] / "shm")  # node 0 is replaced
    (nodes[0] / "shm").mkdir()
    link = str(tmp_path / "runs" / LINK)
    results = pool.run(fit_on_two_nodes, world_size=2, args=(str(tmp_path), False, link))
    assert results == [{"kept": [], "step": STEPS}] * 2
    assert not os.path.lexists(link)


@pytest.mark.parametrize("given", ["link", "snapshot"])
def test_nodes_without_newest_snapshot_receive_it(pool, tmp_path, nodes, given):
    place = MemoryFolder.new(tmp_path / "runs")
    # node 0 was lost in step 2, and its clock was ahead
    for node, step in ((nodes[1], 2), (nodes[0], 1)):
        with contextlib.chdir(node):
            place.create()
            save(place.path, step)
            place.publish(place.path / f"step-{step}", linked=node == nodes[0])
    path = str(place.link if given == "link" else place.path / "step-1")
    assert pool.run(fetch, world_size=4, args=(str(tmp_path), path)) == ["step-2 [2.0, 2.0]"] * 4
    shutil.rmtree(nodes[0] / "shm")
    shutil.rmtree(nodes[1] / "shm")
    (message,) = {*pool.run(fetch, world_size=4, args=(str(tmp_path), path))}
    assert "are lost, and there is no checkpoint beside it" in message
    save(tmp_path / "runs", 0)
    path = str(place.link)
    assert pool.run(fetch, world_size=4, args=(str(tmp_path), path)) == ["step-0 [0.0, 0.0]"] * 4


@pytest.mark.parametrize(
    ("layout", "shard", "replica_nodes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "none", 1, "t1 p2 d2 divides the model among nodes"),
        ({}, "optimizer", 1, "shard='optimizer' divides it among the replicas of all nodes"),
        ({}, "optimizer", 2, ""),
        ({"tensor_parallel_size": 2}, "none", 1, ""),
    ],
)
def test_state_that_no_node_holds_is_refused(layout, shard, replica_nodes, message):
    made = ParallelLayout(world_size=4, **layout)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_nodes(made, shard=shard, num_nodes=2, replica_nodes=replica_nodes)


def test_single_files_are_refused_before_launch(shm, tmp_path):
    strategy = PTDPStrategy(snapshot_every_n_steps=1, checkpoint_format="file")
    run = Run()
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=1)
    with pytest.raises(MisconfigurationException, match="=1 writes folders"):
        trainer.fit(LitTiny(Run(eager=True)), run.make_loaders(trainer)[0])


def test_too_little_memory_is_refused_before_launch(shm, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    check_memory(500)
    strategy = PTDPStrategy(snapshot_every_n_steps=1)
    run = Run()
    trainer = quiet_trainer(tmp_path, strategy=strategy, max_steps=1)
    with pytest.raises(ValueError, match=r"but 0\.0 MB are free"):
        trainer.fit(LitTiny(Run(eager=True)), run.make_loaders(trainer)[0])
    assert not [*tmp_path.rglob("step-*")]


def test_snapshot_without_link_is_removed_when_its_process_has_ended(shm, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    killed, running, linked = (MemoryFolder.new(runs / str(number)) for number in range(3))
    for number, place in enumerate((killed, running, linked)):
        (runs / str(number)).mkdir()
        place.create()
    save(linked.path, 1)
    half_linked = linked.link.with_name(f"{LINK}.tmp-{'0' * 12}")
    half_linked.symlink_to(killed.path)
    linked.publish(linked.path / "step-1", linked=True)
    assert not half_linked.is_symlink(), "a link of a process that was killed here is left"
    del killed, linked._lock
    gc.collect()
    MemoryFolder.new(runs).create()
    assert {path.name for path in shm.glob("*/*")} >= {running.path.name, linked.path.name}
    assert len([*shm.glob("*/*")]) == 3


def test_folder_of_a_process_that_is_just_starting_is_not_taken_for_abandoned(
    shm, tmp_path, monkeypatch
):
    """Another training looks for abandoned folders before the new one is locked."""
    (tmp_path / "other").mkdir()
    starting, other = MemoryFolder.new(tmp_path), MemoryFolder.new(tmp_path / "other")
    looking = threading.Thread(target=other.create)
    write = Path.write_text

    def interrupted(path, *args, **kwargs):
        written = write(path, *args, **kwargs)
        if path.parent == starting.path:
            looking.start()
            looking.join(0.5)
        return written

    monkeypatch.setattr(Path, "write_text", interrupted)
    starting.create()
    looking.join()
    assert starting.path.is_dir() and other.path.is_dir()


def with_snapshot(folder):
    """The memory folder of the checkpoints, with the snapshot of one step."""
    place = MemoryFolder.new(folder)
    place.create()
    save(place.path, 1)
    place.publish(place.path / "step-1", linked=True)
    return place


def test_newer_checkpoint_on_disk_is_preferred(shm, tmp_path):
    place = with_snapshot(tmp_path)
    assert newest_checkpoint(tmp_path) == place.path / "step-1"
    save(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_next_snapshot_is_written_over_the_older_one(shm, tmp_path):
    place = MemoryFolder.new(tmp_path)
    place.create()
    files = []
    for step in range(1, 5):
        save(place.path, step)
        place.publish(place.path / f"step-{step}", linked=True)
        assert snapshots(shm) == [f"step-{step}"]
        file = place.path / f"step-{step}" / "rank0-0.safetensors"
        files.append(file.stat().st_ino)
        (value,) = load_file(file).values()
        assert value.tolist() == [step, step]
        verify_checkpoint(file.parent)
    assert files[:2] == files[2:]
    used = len([*place.path.rglob("*.safetensors")])
    place.trim()
    assert len([*place.path.rglob("*.safetensors")]) == used - 1 == 1


def test_process_lost_while_removing_snapshots_leaves_nothing(shm, tmp_path, monkeypatch):
    for calls in count():
        place = with_snapshot(tmp_path)
        with monkeypatch.context() as lost, contextlib.suppress(KeyboardInterrupt):
            left = iter(range(calls))
            for name in ("unlink", "rmdir"):
                lost.setattr(os, name, partial(_until_lost, left, getattr(os, name)))
            place.remove(linked=True)
            break
        del place._lock
        gc.collect()
        MemoryFolder.new(tmp_path).create()
        assert len([*shm.glob("*/*")]) == 1 + place.link.is_symlink(), calls
    assert calls > 6


def test_interrupted_copy_to_another_node_is_no_snapshot(shm, tmp_path, monkeypatch):
    """Files have their sizes before their values arrive."""
    here, there = MemoryFolder.new(tmp_path / "here"), MemoryFolder.new(tmp_path / "there")
    here.create()
    save(here.path, 1)
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(iterdir(folder))))
    files, chunks = [], []
    send = SimpleNamespace(
        broadcast_object_list=lambda sizes, **_: files.append(sizes[0]),
        broadcast=lambda chunk, **_: chunks.append(chunk.clone()),
    )
    monkeypatch.setattr(snapshots_module, "dist", send)
    snapshots_module._copy(here, "step-1", source=0, group=None)
    left = iter(chunks[:-1])
    receive = SimpleNamespace(
        broadcast_object_list=lambda sizes, **_: sizes.__setitem__(0, files[0]),
        broadcast=lambda chunk, **_: chunk.copy_(next(left)),
    )
    monkeypatch.setattr(snapshots_module, "dist", receive)
    with pytest.raises(StopIteration):
        snapshots_module._copy(there, "step-1", source=1, group=None)
    assert len([*there.path.glob("*/*")]) == len(files[0])
    assert there.steps() == {}


def test_folder_is_created_while_another_run_removes_the_last_one(shm, tmp_path, monkeypatch):
    other = MemoryFolder.new(tmp_path / "other")
    other.create()
    lstat = os.lstat

    def removing(path):
        monkeypatch.undo()
        monkeypatch.setattr(memory_folders, "_ROOT", shm)
        other.remove(linked=True)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", removing)
    place = MemoryFolder.new(tmp_path)
    place.create()
    assert [*shm.glob("*/*")] == [place.path]


def test_memory_of_ended_process_is_not_counted(shm, tmp_path):
    place = MemoryFolder.new(tmp_path)
    place.create()
    for step in (1, 2):
        save(place.path, step)
        place.publish(place.path / f"step-{step}", linked=True)
    spare = place.path / SPARE
    check_memory(1)
    assert spare.exists(), "its process still runs"
    del place._lock
    gc.collect()
    check_memory(1)
    assert not spare.exists()
    assert snapshots(shm) == ["step-2"]


def test_process_lost_while_publishing_leaves_newest_snapshot(shm, tmp_path, monkeypatch):
    """The clock of this process is behind that of the process that wrote the checkpoint on the
    disk; the times of checkpoints increase all the same."""
    first, second = MemoryFolder.new(tmp_path), MemoryFolder.new(tmp_path)
    clock = count(time.time() + 86400)
    for place, calls in ((first, 9), (second, 1), (second, 2), (second, 3)):
        place.create()
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", partial(next, clock))
            save(tmp_path, 1)
            save(place.path, 2)
        with monkeypatch.context() as lost:
            left = iter(range(calls - 1))
            for name in ("symlink", "utime", "replace"):
                lost.setattr(os, name, partial(_until_lost, left, getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                place.publish(place.path / "step-2", linked=True)
        assert newest_checkpoint(tmp_path).name == "step-2", calls


def _until_lost(left, call, *args, **kwargs):
    if next(left, None) is None:
        raise KeyboardInterrupt
    return call(*args, **kwargs)


def test_clock_of_another_node_does_not_make_its_snapshot_newer(shm, tmp_path, monkeypatch):
    place = with_snapshot(tmp_path)
    shutil.rmtree(place.path / "step-1")
    tomorrow = time.time() + 86400
    with monkeypatch.context() as other_node:
        other_node.setattr(time, "time", lambda: tomorrow)
        save(place.path, 1)
    save(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
