"""Machine limits that prevent ranks from starting."""

import errno
import multiprocessing
import os
import resource
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.strategy.checks.machine_limits import (
    check_machine,
    check_nccl,
    check_other_gpus,
)
from tests.conformance.toys import LitNet, Place, loader, make_trainer

PLACE = {"world_size": 4, "start_method": "fork", "accelerator": "cpu"}


@pytest.fixture
def limits(monkeypatch):
    """Replace the limits of open files by a list [soft, hard]."""
    found = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.__setitem__(slice(None), new))
    return found


def test_ordinary_machine_is_accepted(limits):
    check_machine(**PLACE)
    assert limits == [1024, 1024]


def test_soft_limit_of_open_files_is_raised(limits):
    limits[:] = [64, 4096]
    check_machine(**PLACE)
    assert limits == [128, 4096]


def test_low_limit_of_open_files_is_refused(limits):
    limits[:] = [64, 64]
    with pytest.raises(
        ValueError,
        match=r"at most 64 open files, but each of 4 processes needs up to 128\. .*ulimit "
        r"-n 128",
    ):
        check_machine(**PLACE)


def test_read_only_shared_memory_is_refused(monkeypatch):
    def lock(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Lock", lock)
    with pytest.raises(
        ValueError, match=r"start_method='fork' needs semaphores.*/dev/shm: Read-only file system"
    ):
        check_machine(**PLACE)
    check_machine(**{**PLACE, "start_method": "popen"})


def test_missing_loopback_interface_is_refused_before_launch(monkeypatch):
    def connect(*_, **__):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(
        ValueError,
        match=r"cannot connect to 127\.0\.0\.1: Network is unreachable\. .*ip link set lo up",
    ):
        make_trainer(Place(world_size=2)).fit(LitNet(), loader())


def _gpu(uuid, name="NVIDIA H100"):
    return SimpleNamespace(uuid=uuid, name=name)


def test_distinct_gpus_are_accepted():
    store = dist.HashStore()
    for rank in range(4):
        check_other_gpus(store, rank=rank, tensor_ranks=(rank // 2 * 2, 1), gpu=_gpu(f"{rank}"))
    # Tensor groups may differ from each other.
    check_other_gpus(store, rank=4, tensor_ranks=(4,), gpu=_gpu("4", "NVIDIA A100"))


def test_two_ranks_on_one_gpu_are_refused():
    store = dist.HashStore()
    check_other_gpus(store, rank=2, tensor_ranks=(2,), gpu=_gpu("GPU-1"))
    with pytest.raises(
        ValueError, match=r"^ranks 2 and 5 use the same NVIDIA H100 \(GPU-1\).*devices="
    ):
        check_other_gpus(store, rank=5, tensor_ranks=(5,), gpu=_gpu("GPU-1"))


def test_different_gpus_in_tensor_group_are_refused():
    store = dist.HashStore()
    check_other_gpus(store, rank=1, tensor_ranks=(0, 1), gpu=_gpu("GPU-1"))
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size=2: .*NVIDIA H100 and NVIDIA A100 .*ranks 0, 1"
    ):
        check_other_gpus(store, rank=0, tensor_ranks=(0, 1), gpu=_gpu("GPU-0", "NVIDIA A100"))


def test_rank_without_device_is_refused_before_launch(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ValueError, match=r"^devices=2, so local rank 3 has no device\. Start 2"):
        make_trainer(Place(world_size=2))


@pytest.mark.parametrize("numbers", [(2, 3), (0, 1)])
def test_too_few_visible_gpus_are_refused_before_launch(numbers, monkeypatch):
    """Lightning saw more GPUs, for example before CUDA_VISIBLE_DEVICES was set."""
    devices = [torch.device("cuda", number) for number in numbers]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: max(numbers))
    place = Place(world_size=2, layout={"parallel_devices": devices})
    with pytest.raises(
        ValueError,
        match=rf"^devices=\[{numbers[0]}, {numbers[1]}\], but local rank 0 sees {max(numbers)} GPUs"
        ".*CUDA_VISIBLE_DEVICES",
    ):
        make_trainer(place, accelerator="gpu", devices=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert make_trainer(place, accelerator="gpu", devices=1).strategy.root_device == devices[0]


def test_old_driver_is_refused_before_groups_exist(monkeypatch):
    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12080). Please update"
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # read from NVML
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("too late"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    place = Place(world_size=2, layout={"parallel_devices": devices})
    trainer = make_trainer(place, accelerator="gpu")
    with pytest.raises(
        ValueError,
        match=r"^accelerator='gpu': torch .* too old \(found version 12080\)\. Install a driver "
        r"for CUDA [\d.]+, or a torch",
    ):
        trainer.fit(LitNet(), loader())


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")
def test_older_nccl_library_is_refused(monkeypatch):
    check_nccl()
    monkeypatch.setattr(dist.ProcessGroupNCCL, "get_runtime_nccl_version", lambda: (2, 19, 3))
    with pytest.raises(ValueError, match=r"^NCCL 2\.19\.3 is loaded, but torch .*LD_LIBRARY_PATH"):
        check_nccl()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")
def test_unknown_nccl_is_refused(monkeypatch):
    backend = dist.Backend
    plugin = backend._BackendPlugin(test_unknown_nccl_is_refused, True)
    monkeypatch.setitem(backend._plugins, "NCCL", plugin)
    with pytest.raises(ValueError, match=r"^process_group_backend='nccl' is tests\..*'gloo'"):
        check_nccl()


def test_unknown_backend_and_nccl_without_gpus_are_refused():
    with pytest.raises((TypeError, ValueError), match=r"process_group_backend='ncll'.*'nccl'"):
        PTDPStrategy(process_group_backend="ncll")
    place = Place(world_size=2, layout={"process_group_backend": "nccl"})
    with pytest.raises(ValueError, match=r"process_group_backend='nccl'.*accelerator='cpu'"):
        make_trainer(place).fit(LitNet(), loader())
