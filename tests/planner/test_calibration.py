"""The file of ``ptdp doctor --calibrate``: whose it is, and what is wrong with it; and what is measured."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from lightning_ptdp.doctor import calibration as measuring
from lightning_ptdp.doctor.bandwidth import Measurement
from lightning_ptdp.doctor.collectives import Place
from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import Device, device_here, find_device, layer_time, load_calibration, product_time, save_calibration
from lightning_ptdp.planner.calibration import MACHINE_FILE
from tests.planner.jobs import choice, small_job

PRODUCTS = ((64, 64, 64, 1e9), (64, 64, 1024, 4e9), (1024, 1024, 1024, 16e9))


def device() -> Device:
    return dataclasses.replace(find_device("cpu"), flops_32=16e9, products=PRODUCTS, operation_s=3e-6)


def test_a_file_holds_the_device_and_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert device_here("cpu") is find_device("cpu")
    save_calibration(device(), MACHINE_FILE)
    found = load_calibration(MACHINE_FILE)
    assert (found.device, found.doubt()) == (device(), "")
    assert device_here("cpu") == device()
    assert device_here("NVIDIA H200") is find_device("h200")


def test_stale_and_foreign_files_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_calibration(device(), MACHINE_FILE)
    content = json.loads(MACHINE_FILE.read_text())

    def doubt(**changes: object) -> str:
        MACHINE_FILE.write_text(json.dumps({**content, **changes}))
        assert device_here("cpu") is find_device("cpu"), "it is not used for what is measured here"
        return load_calibration(MACHINE_FILE).doubt()

    assert "is 100 days old" in doubt(made=(datetime.now(UTC) - timedelta(days=100, hours=1)).isoformat())
    assert "was measured elsewhere (host 'there', here" in doubt(machine={**content["machine"], "host": "there"})
    assert "torch '1.0', here" in doubt(machine={**content["machine"], "torch": "1.0"})


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), 7, "its format is 7"),
        (("device",), {}, "KeyError"),
        (("device", "flops_32"), -1, "flops_32=-1 must be greater than 0"),
        (("device", "memory_bandwidth"), "fast", "memory_bandwidth='fast'"),
        (("device", "memory_share"), 3, "memory_share=3 is a share"),
        (("device", "products"), [[1, 2, 3, -4]], "must be greater than 0"),
        (("device", "cluster", "node", "bandwidth"), 0, "bandwidth=0 must be greater"),
        (("made",), "2020-01-01", "has no time zone"),
        (("made",), "yesterday", "yesterday"),
    ],
)
def test_absurd_files(tmp_path: Path, place: tuple[str, ...], value: object, words: str) -> None:
    path = tmp_path / "mine.json"
    save_calibration(device(), path)
    content = json.loads(path.read_text())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="calibrate again, or name a device") as error:
        load_calibration(path)
    assert words in str(error.value) and "mine.json" in str(error.value)


def test_products_are_as_fast_as_was_measured_nearby() -> None:
    for m, n, k, rate in PRODUCTS:
        assert product_time(device(), 4, m, n, k) == pytest.approx(2 * m * n * k / rate, rel=0.01)
    between = 2 * 256 * 256 * 512 / product_time(device(), 4, 256, 256, 512)
    assert 1e9 < between < 16e9


def test_a_cpu_launches_and_computes_one_after_the_other() -> None:
    job = small_job(GPTConfig.gpt2(hidden_size=64, num_heads=2, sequence_length=64), precision="32-true", device="cpu")

    def forward(seconds: float) -> float:
        slow = dataclasses.replace(job.device, operation_s=seconds)
        return layer_time(dataclasses.replace(job, device=slow), choice()).forward

    assert forward(2e-5) - forward(1e-5) == pytest.approx(1e-5 * job.software.operations)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SIDES", {"cpu": (16, 64)})
    monkeypatch.setattr(measuring, "_BUDGET_S", 0.001)
    figures = measuring.measure_device(Place(rank=0, size=1, device=torch.device("cpu")), lambda what: None)
    assert len(figures.products) == 8 and min(figures.other, figures.stream, figures.attention, figures.operation_s) > 0
    slower = dataclasses.replace(figures, stream=figures.stream / 2)
    # An all-reduce among two: 2 steps of 1 ms, and every byte once over the link at 1 GB/s.
    links = [
        Measurement(operation="all-reduce", size=size, seconds=0.002 + size / 1e9, bytes_per_s=1.0) for size in (1000, 10_000_000)
    ]
    found = measuring.calibrated("cpu", [figures, slower], links, kind="cpu", memory_bytes=1e9)
    assert (found.stream, found.memory_bytes, found.kind) == (slower.stream, 1e9, "cpu")
    assert found.flops_32 == max(rate for *_, rate in figures.products)
    assert (found.cluster.node.bandwidth, found.cluster.node.latency_s) == pytest.approx((1e9, 0.001))
