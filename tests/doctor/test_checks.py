"""Tests of single doctor checks with given inputs."""

import os
import socket
from importlib import metadata

import pytest
import torch

from lightning_ptdp.doctor import Status
from lightning_ptdp.doctor.folder_checks import (
    check_clock,
    check_data_folder,
    check_database_locks,
    check_root_dir,
    check_tracking_store,
)
from lightning_ptdp.doctor.links import Measurement, check_links
from lightning_ptdp.doctor.machine_checks import (
    check_arithmetic,
    check_cores,
    check_devices,
    check_entry_points,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_recipes,
    check_shared_memory,
)

GIB = 2**30


def has(version):
    return lambda name: version


def has_nothing(name):
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("requirement", "installed", "status", "words"),
    [
        ("torch<3,>=2.11", has("2.15.0+cu128"), Status.OK, "2.15.0"),
        (
            "torch<3,>=2.11",
            has("2.9.1"),
            Status.FAILED,
            "2.9.1 is installed, but lightning-ptdp needs >=2.11,<3",
        ),
        ("torch<3,>=2.11", has_nothing, Status.FAILED, "not installed"),
        (
            "transformers<6,>=5; extra == 'hf'",
            has_nothing,
            Status.OK,
            "optional: pip install 'transformers>=5,<6'",
        ),
        ("transformers<6,>=5; extra == 'hf'", has("4.0"), Status.WARNING, "4.0 is installed, but"),
    ],
)
def test_package_versions_are_checked(requirement, installed, status, words):
    (check,) = check_packages([requirement], installed)
    assert (check.status, check.subject) == (status, requirement.partition("<")[0])
    assert words in check.found
    assert bool(check.remedy) == (status != Status.OK)


def test_development_extras_are_not_checked():
    assert not list(check_packages(["ruff>=0.12; extra == 'test'"], has_nothing))
    assert {check.subject for check in check_packages()} >= {"torch", "lightning", "mlflow"}


def test_python_version_is_checked():
    assert check_python().status == Status.OK
    assert check_python("3.10.4").status == Status.FAILED


def test_disabled_backend_autoload_gives_warning():
    assert check_entry_points({}).status == Status.OK
    assert check_entry_points({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).status == Status.WARNING


def test_recipes_check_fails_without_recipes():
    def none():
        raise FileNotFoundError("no recipes in x")

    assert check_recipes(lambda: ["gpt/nano"]).found == "1 found"
    assert check_recipes(none).status == Status.FAILED


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (check_cores(cores=4, processes=4, accelerated=False), Status.OK),
        (check_cores(cores=2, processes=4, accelerated=False), Status.WARNING),
        (check_cores(cores=2, processes=4, accelerated=True), Status.OK),
        (check_memory(available=8 * GIB, total=16 * GIB, limit=None, processes=4), Status.OK),
        (
            check_memory(available=8 * GIB, total=16 * GIB, limit=2 * GIB, processes=4),
            Status.WARNING,
        ),
        (check_memory(available=1 * GIB, total=16 * GIB, limit=None, processes=4), Status.WARNING),
        (check_shared_memory(8 * GIB), Status.OK),
        (check_shared_memory(64 * 2**20), Status.WARNING),
        (check_shared_memory(None), Status.WARNING),
        (check_open_files(1024, 4096), Status.OK),
        (check_open_files(-1, -1), Status.OK),
        (check_open_files(256, -1), Status.WARNING),
    ],
)
def test_machine_resources_are_checked(check, status):
    assert check.status == status, check
    assert bool(check.remedy) == (status != Status.OK)


def test_arithmetic_is_compared_with_float64(monkeypatch):
    checks = list(check_arithmetic(torch.device("cpu")))
    assert [check.status for check in checks] == [Status.OK, Status.OK]
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: product(a, b) + (a.dtype != torch.float64)
    )
    assert [check.status for check in check_arithmetic(torch.device("cpu"))] == [
        Status.FAILED,
        Status.FAILED,
    ]


def test_devices_or_their_absence_are_reported():
    first, *others = check_devices(1)
    assert first.subject == "GPUs"
    assert others


def test_folder_checks_accept_new_folders_and_refuse_files(tmp_path):
    there, new, file = tmp_path, tmp_path / "a" / "b", tmp_path / "file"
    file.write_text("")
    for folder in (there, new):
        assert check_root_dir(folder).status != Status.FAILED
        assert check_database_locks(folder).status == Status.OK
        assert check_clock(folder).status == Status.OK
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a check left files behind"
    for check in (check_root_dir, check_database_locks, check_clock):
        assert check(file).status == Status.FAILED


def test_clock_offset_gives_warning(tmp_path, monkeypatch):
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path: utime(path, (0, 1e9)))
    check = check_clock(tmp_path)
    assert check.status == Status.WARNING
    assert "s off" in check.found


def test_tracking_store_is_checked(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]  # bound, and not listening
        assert check_tracking_store(f"http://127.0.0.1:{port}", timeout_s=2).status == Status.FAILED
    assert (
        check_tracking_store(f"sqlite:///{tmp_path / 'mlflow.db'}", timeout_s=2).status == Status.OK
    )


def test_data_folder_check_fails_without_data(tmp_path):
    check = check_data_folder(tmp_path)
    assert (check.status, "ptdp prepare" in check.remedy) == (Status.FAILED, True)


def link(name, rate, size=2**20):
    return Measurement(operation=name, size=size, seconds=1.0, bytes_per_s=rate)


def test_slow_link_is_named():
    slow_and_small = link("send 0 to 1", 1.0, size=8)
    even = [
        slow_and_small,
        link("send 0 to 1", 1e9),
        link("send 1 to 2", 1.2e9),
        link("all-reduce", 1e8),
    ]
    assert check_links(even).status == Status.OK
    check = check_links([*even, link("send 2 to 0", 4e8)])
    assert (check.status, "the slowest is send 2 to 0" in check.found) == (Status.WARNING, True)
