"""Tests of background saving: saved values, completion and failures."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    background,
    data_files,
    mark_latest,
    read_full,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.background import HostCopies
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.saving import FolderSaves
from tests.checkpoint.layouts import replicated
from tests.models.fits import quiet_trainer
from tests.tiny_gpt import LitTiny, PaddedTokens, Run

LIMIT = timedelta(seconds=30)


class Gate:
    """Gate that blocks writing until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.opened, self.reached, self._error = threading.Event(), threading.Event(), error
        self._write = data_files._write
        monkeypatch.setattr(data_files, "_write", self._wait)

    def _wait(self, *args):
        self.reached.set()
        assert self.opened.wait(30)
        if self._error is not None:
            raise self._error
        return self._write(*args)


def _start(saver, path, tensor, then=None):
    saver.save(
        path,
        tensors=replicated({"w": tensor}),
        state={},
        metadata={},
        then=then or (lambda: mark_latest(path)),
    )


class OnGPU(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cuda = True


class Driver:
    """Stand-in for the CUDA runtime that records locked pages by address.

    ``calls`` lists the bytes of each lock, and "unlock". ``error`` is the pending error, which the
    next kernel raises.
    """

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.calls, self.locked, self.error = answer, [], {}, 0

    def runtime(self):
        return SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)

    def _lock(self, place, size, flags):
        assert flags == 0 and place not in self.locked
        self.calls.append(size)
        self.error = self.answer
        if self.answer == 0:
            self.locked[place] = size
        return self.answer

    def launch(self, *_, **__):
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: invalid argument")

    def _unlock(self, place):
        self.calls.append("unlock")
        del self.locked[place]
        return 0


def on_gpu(*values):
    return [value.as_subclass(OnGPU) for value in values]


def test_pinned_buffer_is_reused_until_shape_changes(tmp_path, monkeypatch):
    """The last of three saves has another shape. Tensors begin at multiples of 64 bytes."""
    driver, waited = Driver(), []
    monkeypatch.setattr(torch.cuda, "cudart", driver.runtime)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda: waited.append(threading.current_thread())
    )
    saver = BackgroundSaver(limit=LIMIT)
    for step, last in enumerate((3, 3, 17)):
        values = {
            "model/a": torch.full((4,), float(step)),
            "optimizer/a": torch.full((last,), float(step)),
        }
        tensors = {
            name: (value.as_subclass(OnGPU), Placement.replicated(tuple(value.shape)))
            for name, value in values.items()
        }
        saver.save(tmp_path / str(step), tensors=tensors, state={}, metadata={}, then=lambda: None)
    saver.close()
    assert driver.calls == [128, "unlock", 192, "unlock"]
    assert waited == [threading.main_thread()] * 3, (
        "each save must synchronize once, in the main thread"
    )
    for step in range(3):
        assert torch.equal(read_full(tmp_path / str(step))["a"], torch.full((4,), float(step)))


def test_previous_buffer_is_freed_before_a_larger_one_is_allocated(tmp_path, monkeypatch):
    saver = BackgroundSaver(limit=LIMIT)
    references = []
    allocate = HostCopies._allocate

    def counted(copies, total, *, lock):
        storage = copies._buffer.untyped_storage()
        references.append(torch._C._storage_Use_Count(storage._cdata))
        allocate(copies, total, lock=lock)

    monkeypatch.setattr(HostCopies, "_allocate", counted)
    for step, size in enumerate((3, 100)):
        tensors = {"model/a": (torch.ones(size), Placement.replicated((size,)))}
        saver.save(tmp_path / str(step), tensors=tensors, state={}, metadata={}, then=lambda: None)
    saver.close()
    assert references == [2, 2], "the buffer and its storage here"


@pytest.mark.parametrize("answer", [0, 1])
def test_host_copies_are_equal_with_and_without_page_locking(answer, monkeypatch):
    driver = Driver(answer)
    monkeypatch.setattr(torch.cuda, "cudart", driver.runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", driver.launch)
    given = [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 3, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(65, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
    ]
    copies = HostCopies()
    made = copies(on_gpu(*given))
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(made, given, strict=True))
    assert all(copy.is_contiguous() for copy in made)
    assert driver.error == 0, "the next kernel would raise it"
    del copies
    assert driver.calls == [448, "unlock"][: 2 - answer]
    assert not driver.locked


def test_save_captures_values_at_call_time(tmp_path, monkeypatch):
    gate, saver, tensor = Gate(monkeypatch), BackgroundSaver(limit=LIMIT), torch.ones(4)
    _start(saver, tmp_path / "a", tensor)
    tensor.fill_(2)
    assert gate.reached.wait(30)
    assert not (tmp_path / "a").exists() and not (tmp_path / "latest").is_symlink()
    gate.opened.set()
    saver.wait()
    assert torch.equal(read_full(tmp_path / "latest")["w"], torch.ones(4))
    _start(saver, tmp_path / "b", tensor)
    _start(saver, tmp_path / "c", tensor * 2)  # waits for b
    assert torch.equal(read_full(tmp_path / "b")["w"], torch.full((4,), 2.0))
    saver.close()
    assert os.readlink(tmp_path / "latest") == "c"


def test_removal_waits_for_pending_save(tmp_path, monkeypatch):
    gate, saver, removed = Gate(monkeypatch), BackgroundSaver(limit=LIMIT), []
    saver.after(lambda: removed.append("idle"))
    _start(saver, tmp_path / "a", torch.ones(4), then=lambda: removed.append("then"))
    saver.after(lambda: removed.append("after"))
    assert removed == ["idle"]
    gate.opened.set()
    saver.wait()
    assert removed == ["idle", "then", "after"]


def test_failure_is_raised_by_next_save_and_removes_nothing(tmp_path, monkeypatch):
    saver, removed = BackgroundSaver(limit=LIMIT), []
    _start(saver, tmp_path / "a", torch.ones(4))
    saver.wait()
    with monkeypatch.context() as patch:
        gate = Gate(patch, OSError("no space left"))
        _start(saver, tmp_path / "b", torch.ones(4))
        saver.after(lambda: removed.append("a"))
        gate.opened.set()
        with pytest.raises(
            CheckpointError, match=r"saving the checkpoint .*b failed.*no space left"
        ):
            _start(saver, tmp_path / "c", torch.ones(4))
    assert removed == []
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    _start(saver, tmp_path / "c", torch.ones(4))
    saver.close()
    assert os.readlink(tmp_path / "latest") == "c"


def test_connection_error_of_torch_is_raised_unchanged(tmp_path, monkeypatch):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")

    def fail(*_, **__):
        raise lost

    monkeypatch.setattr(background, "save_rectangles", fail)
    saver = BackgroundSaver(limit=LIMIT)
    _start(saver, tmp_path / "a", torch.ones(4))
    with pytest.raises(RuntimeError) as caught:
        saver.wait()
    assert caught.value is lost, "the strategy recognizes the error by its class and text"


def test_wait_times_out(tmp_path, monkeypatch):
    gate, saver = Gate(monkeypatch), BackgroundSaver(limit=LIMIT)
    _start(saver, tmp_path / "a", torch.ones(4))
    with pytest.raises(CheckpointError, match=r"a did not end within 0\.01 s"):
        saver.wait(timedelta(seconds=0.01))
    gate.opened.set()
    saver.wait()


@pytest.mark.parametrize(
    ("error", "most_s"),
    [
        (PeerError("rank 1 does not answer"), 0.2),  # the save needs rank 1
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer"), 0.2),
        (CheckpointError("the disk is full"), 60),
        (ValueError("of the user"), 300),
    ],
)
def test_patience_after_error_depends_on_what_save_needs(error, most_s, monkeypatch):
    saves, waited = FolderSaves(), []
    saves._saver = BackgroundSaver(limit=LIMIT)
    monkeypatch.setattr(saves._saver, "wait", waited.append)
    saves.end(error, timedelta(minutes=5))
    assert waited == [timedelta(seconds=most_s)]


def _train(rank, folder, async_save, resume, steps):
    L.seed_everything(3, verbose=False)
    strategy = PTDPStrategy(pipeline_parallel_size=2, num_microbatches=2, async_save=async_save)
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_steps=steps,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    data = PaddedTokens(8)
    sampler = DistributedSampler(data, **strategy.distributed_sampler_kwargs, shuffle=False)
    trainer.fit(
        LitTiny(Run(layers=4)), DataLoader(data, batch_size=8, sampler=sampler), ckpt_path=resume
    )
    return strategy.gather_state_dict()


def test_async_run_resumes_bitwise_equal_despite_damage(pool, tmp_path):
    whole = pool.run(_train, world_size=2, args=(str(tmp_path / "sync"), False, None, 4))[0]
    pool.run(_train, world_size=2, args=(str(tmp_path / "async"), True, None, 3))
    found = sorted(path.name for path in (tmp_path / "async").iterdir())
    assert found == ["latest", "step=2.ckpt", "step=3.ckpt"]
    for name in found:
        verify_checkpoint(tmp_path / "async" / name)
    assert os.readlink(tmp_path / "async" / "latest") == "step=3.ckpt"
    damaged = tmp_path / "async" / "step=3.ckpt" / "rank1-0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    resumed = pool.run(
        _train,
        world_size=2,
        args=(str(tmp_path / "again"), True, str(tmp_path / "async" / "latest"), 4),
    )[0]
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
