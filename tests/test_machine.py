"""Limits of the machine that stop ranks from starting."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import socket
from typing import Any

import pytest

from lightning_ptdp.strategy.checks.machine_limits import check_machine
from tests.conformance.toys import LitNet, Place, loader, make_trainer

PLACE: dict[str, Any] = {"world_size": 4, "start_method": "fork", "accelerator": "cpu"}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of open files (soft, hard), as they are set and read."""
    found = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.__setitem__(slice(None), new))
    return found


def test_ordinary_machine(limits: list[int]) -> None:
    check_machine(**PLACE)
    assert limits == [1024, 1024]


def test_soft_limit_of_open_files_is_raised(limits: list[int]) -> None:
    limits[:] = [64, 4096]
    check_machine(**PLACE)
    assert limits == [128, 4096]


def test_too_few_open_files_are_refused(limits: list[int]) -> None:
    limits[:] = [64, 64]
    with pytest.raises(
        ValueError,
        match=r"at most 64 are allowed here, and each of 4 processes needs up to 128\. .*ulimit "
        r"-n 128",
    ):
        check_machine(**PLACE)


def test_shared_memory_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
