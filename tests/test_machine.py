"""Machine limits that prevent ranks from starting."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.machine_limits import check_machine, check_other_gpus
from tests.conformance.toys import LitNet, Place, loader, make_trainer

PLACE: dict[str, Any] = {"world_size": 4, "start_method": "fork", "accelerator": "cpu"}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the limits of open files by a list [soft, hard]."""
    found = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.__setitem__(slice(None), new))
    return found


def test_ordinary_machine_is_accepted(limits: list[int]) -> None:
    check_machine(**PLACE)
    assert limits == [1024, 1024]


def test_soft_limit_of_open_files_is_raised(limits: list[int]) -> None:
    limits[:] = [64, 4096]
    check_machine(**PLACE)
    assert limits == [128, 4096]


def test_low_limit_of_open_files_is_refused(limits: list[int]) -> None:
    limits[:] = [64, 64]
    with pytest.raises(
        ValueError,
        match=r"at most 64 open files, but each of 4 processes needs up to 128\. .*ulimit "
        r"-n 128",
    ):
        check_machine(**PLACE)


def test_read_only_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Lock", lock)
    with pytest.raises(
        ValueError, match=r"start_method='fork' needs semaphores.*/dev/shm: Read-only file system"
    ):
        check_machine(**PLACE)
    check_machine(**{**PLACE, "start_method": "popen"})


def test_missing_loopback_interface_is_refused_before_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(
        ValueError,
        match=r"cannot connect to 127\.0\.0\.1: Network is unreachable\. .*ip link set lo up",
    ):
        make_trainer(Place(world_size=2)).fit(LitNet(), loader())


def _gpu(uuid: str, name: str = "NVIDIA H100") -> Any:
    return SimpleNamespace(uuid=uuid, name=name)


def test_distinct_gpus_are_accepted() -> None:
    store = dist.HashStore()
    for rank in range(4):
        check_other_gpus(store, rank=rank, tensor_ranks=(rank // 2 * 2, 1), gpu=_gpu(f"{rank}"))
    # Tensor groups may differ from each other.
    check_other_gpus(store, rank=4, tensor_ranks=(4,), gpu=_gpu("4", "NVIDIA A100"))


def test_two_ranks_on_one_gpu_are_refused() -> None:
    store = dist.HashStore()
    check_other_gpus(store, rank=2, tensor_ranks=(2,), gpu=_gpu("GPU-1"))
    with pytest.raises(
        ValueError, match=r"^ranks 2 and 5 use the same NVIDIA H100 \(GPU-1\).*devices="
    ):
        check_other_gpus(store, rank=5, tensor_ranks=(5,), gpu=_gpu("GPU-1"))


def test_different_gpus_in_tensor_group_are_refused() -> None:
    store = dist.HashStore()
    check_other_gpus(store, rank=1, tensor_ranks=(0, 1), gpu=_gpu("GPU-1"))
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size=2: .*NVIDIA H100 and NVIDIA A100 .*ranks 0, 1"
    ):
        check_other_gpus(store, rank=0, tensor_ranks=(0, 1), gpu=_gpu("GPU-0", "NVIDIA A100"))


def test_unknown_backend_and_nccl_without_gpus_are_refused() -> None:
    with pytest.raises((TypeError, ValueError), match=r"process_group_backend='ncll'.*'nccl'"):
        PTDPStrategy(process_group_backend="ncll")
    place = Place(world_size=2, layout={"process_group_backend": "nccl"})
    with pytest.raises(ValueError, match=r"process_group_backend='nccl'.*accelerator='cpu'"):
        make_trainer(place).fit(LitNet(), loader())
