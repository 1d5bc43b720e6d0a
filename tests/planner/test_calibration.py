"""Calibration files of ``ptdp doctor --calibrate``: origin, validation and measurements."""

import dataclasses
import json
from datetime import UTC, datetime, timedelta

import pytest
import torch

from lightning_ptdp.doctor import calibration as measuring
from lightning_ptdp.doctor import links
from lightning_ptdp.doctor.links import GroupMember, Links
from lightning_ptdp.models import GPTConfig
from lightning_ptdp.planner import (
    Link,
    Measured,
    device_here,
    figures_source,
    find_device,
    layer_time,
    load_calibration,
    save_calibration,
    simulated_step_time,
    step_time,
)
from lightning_ptdp.planner.calibrated_device import MACHINE_FILE
from lightning_ptdp.planner.communication import group_link
from lightning_ptdp.planner.pass_time import product_time
from lightning_ptdp.world.layout import ParallelLayout
from tests.planner.jobs import choice, small_job

PRODUCTS = ((64, 64, 64, 1e9), (64, 64, 1024, 4e9), (1024, 1024, 1024, 16e9))


MEASURED = Measured(
    processes=2,
    cores=2,
    products=PRODUCTS,
    attention=((128, 64, 1e9, 2e9), (512, 64, 4e9, 8e9)),
    gated=2e9,
    loss=1e9,
    optimizer=3e9,
    operation_s=3e-6,
)


def device(**changes):
    """Return a calibrated CPU. Options replace measured values."""
    collectives = (
        ("all-reduce", 2, 1000, 1e-3),
        ("all-reduce", 2, 3000, 3e-3),
        ("send", 0, 1000, 5e-4),
    )
    cluster = dataclasses.replace(find_device("cpu").cluster, collectives=collectives)
    return dataclasses.replace(
        find_device("cpu"),
        flops_32=16e9,
        cluster=cluster,
        measured=dataclasses.replace(MEASURED, **changes),
    )


TINY = GPTConfig.gpt2(hidden_size=64, num_heads=2, sequence_length=64)


def job_on(device, model=TINY, **changes):
    job = small_job(model, precision="32-true", device="cpu", **changes)
    return dataclasses.replace(job, device=device)


def test_calibration_file_is_used_for_its_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert device_here("cpu") is find_device("cpu")
    save_calibration(device(), MACHINE_FILE)
    found = load_calibration(MACHINE_FILE)
    assert (found.device, found.doubt()) == (device(), "")
    assert device_here("cpu") == device()
    assert device_here("NVIDIA H200") is find_device("h200")


def test_stale_or_foreign_calibration_is_reported_and_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_calibration(device(), MACHINE_FILE)
    content = json.loads(MACHINE_FILE.read_text())

    def doubt(**changes):
        MACHINE_FILE.write_text(json.dumps({**content, **changes}))
        assert device_here("cpu") is find_device("cpu"), "a doubtful calibration is used"
        return load_calibration(MACHINE_FILE).doubt()

    assert "is 100 days old" in doubt(
        made=(datetime.now(UTC) - timedelta(days=100, hours=1)).isoformat()
    )
    assert "was measured on another machine (host 'there', here" in doubt(
        machine={**content["machine"], "host": "there"}
    )
    assert "torch '1.0', here" in doubt(machine={**content["machine"], "torch": "1.0"})


def test_source_of_device_figures_is_reported():
    assert figures_source(device(), 2) == "calibrated with --devices 2"
    assert (
        "with --devices 2 instead of 4; to calibrate, run ptdp doctor --calibrate --devices 4"
        in figures_source(device(), 4)
    )
    assert (
        "not calibrated; to calibrate, run ptdp doctor --calibrate --devices 8"
        in figures_source(find_device("h100"), 8)
    )


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), 7, "its format is 7"),
        (("device",), {}, "KeyError"),
        (("device", "flops_32"), -1, "flops_32=-1 must be greater than 0"),
        (("device", "memory_bandwidth"), "fast", "memory_bandwidth='fast'"),
        (("device", "memory_share"), 3, "memory_share=3 must be a share"),
        (("device", "measured", "products"), [[1, 2, 3, -4]], "must be greater than 0"),
        (("device", "measured", "attention"), [], "must not be empty"),
        (("device", "measured", "cores"), -1, "cores=-1"),
        (("device", "cluster", "collectives"), [["send", 0, 1, -1]], "must take longer"),
        (("device", "cluster", "node", "bandwidth"), 0, "bandwidth=0 must be greater"),
        (("made",), "2020-01-01", "has no time zone"),
        (("made",), "yesterday", "yesterday"),
    ],
)
def test_invalid_calibration_file_is_refused(tmp_path, place, value, words):
    path = tmp_path / "mine.json"
    save_calibration(device(), path)
    content = json.loads(path.read_text())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="Calibrate again, or name a device") as error:
        load_calibration(path)
    assert words in str(error.value) and "mine.json" in str(error.value)


def test_product_time_is_interpolated_between_measurements():
    for m, n, k, rate in PRODUCTS:
        assert product_time(device(), 4, m, n, k) == pytest.approx(2 * m * n * k / rate, rel=0.01)
    between = 2 * 256 * 256 * 512 / product_time(device(), 4, 256, 256, 512)
    assert 1e9 < between < 16e9


def test_launch_time_is_added_to_compute_time_on_cpu():
    slow, quick = (job_on(device(operation_s=seconds)) for seconds in (2e-5, 1e-5))
    added = layer_time(slow, choice()).forward - layer_time(quick, choice()).forward
    assert added == pytest.approx(1e-5 * slow.software.operations)


def test_calibration_measures_products_and_collectives(monkeypatch, pool):
    for figures in pool.run(measured_here, world_size=2):
        assert all(0 < seconds < 10 for seconds in figures.seconds.values())
    names = {(operation, members) for operation, members, _ in figures.links.seconds}
    assert names == {("all-reduce", 2), ("reduce-scatter", 2), ("all-gather", 2), ("send", 0)}
    for name in ("_SIDES", "_POSITIONS", "_CHANNELS"):
        monkeypatch.setattr(measuring, name, SMALL[name])
    figures = dataclasses.replace(figures, memory_bytes=1e9, cores=3)
    slower = dataclasses.replace(
        figures, seconds={key: 2 * value for key, value in figures.seconds.items()}
    )
    found = measuring.calibrated([figures, slower])
    assert (found.measured.processes, found.measured.cores) == (2, 3)
    assert (found.memory_bytes, found.kind) == (1e9, "cpu")
    rates = {tuple(shape): rate for *shape, rate in found.measured.products}
    assert rates[16, 64, 64] == pytest.approx(
        2 * 16 * 64 * 64 / slower.seconds["product", 16, 64, 64]
    )
    assert found.flops_32 == max(rates.values())
    assert "2 processes on 3 cores" in measuring.describe(found)
    seconds = dict.fromkeys(figures.links.seconds, 1.0) | {
        # Two ranks: 2 steps of 1 ms, and every byte crosses the link once at 1 GB/s.
        ("all-reduce", 2, size): 0.002 + size / 1e9
        for size in (1000, 10_000_000)
    }
    known = dataclasses.replace(figures, links=Links(seconds=seconds))
    cluster = measuring.calibrated([known, known]).cluster
    assert (cluster.node.bandwidth, cluster.node.latency_s) == pytest.approx((1e9, 0.001))


SMALL = {
    "_SIDES": {"cpu": (16, 64)},
    "_POSITIONS": {"cpu": (16,)},
    "_CHANNELS": (8,),
    "_BUDGET_S": 1e-4,
    "_ROUNDS": 1,
}


def measured_here(rank):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(measuring, name, value)
        patch.setattr(links, "_ROUNDS", 1)
        patch.setattr(links, "LINK_SIZES", (1000, 10_000_000))
        return measuring.measure_device(
            GroupMember(rank=rank, size=2, device=torch.device("cpu")), lambda what: None
        )


def test_attention_and_collectives_are_interpolated():
    forward, backward = MEASURED.attention_rates(128, 64)
    assert (forward, backward) == (pytest.approx(1e9, rel=0.01), pytest.approx(2e9, rel=0.01))
    assert 1e9 < MEASURED.attention_rates(256, 64)[0] < 4e9
    two, four = (
        group_link(ParallelLayout(world_size=t, tensor_parallel_size=t), device().cluster, "tensor")
        for t in (2, 4)
    )
    assert [two.all_reduce(size) for size in (1, 1000, 2000, 30_000)] == pytest.approx(
        [1e-3, 1e-3, 2e-3, 0.03]
    )
    assert two.send(1000) == 5e-4
    assert four.all_reduce(1000) == dataclasses.replace(four, measured=()).all_reduce(1000), (
        "an unmeasured group does not use the figures of the link"
    )


def test_collectives_overlap_only_with_free_cores():
    how = choice(world_size=2, tensor_parallel_size=2)
    few, many = (job_on(device(cores=cores), world_size=2) for cores in (2, 4))
    assert not few.overlaps and many.overlaps
    assert layer_time(few, how).communication > layer_time(many, how).communication


@pytest.mark.parametrize(
    ("p", "cores", "expected"),
    [(1, 4, 1.0), (1, 2, 2.0), (2, 4, 1.0), (2, 2, 4 / 3), (2, 1, 8 / 3)],
)
def test_step_time_with_processes_sharing_cores(p, cores, expected):
    """Check the slowdown of four processes on too few cores.

    Without a pipeline, each of 4 processes on 2 cores has half of a core. With 2 stages and m = 2,
    a stage waits in a third of the step. 2 cores are then always busy, so the work determines the
    time."""
    model = dataclasses.replace(TINY, num_layers=2, vocabulary_size=8)
    how = choice(world_size=4, pipeline_parallel_size=p, b=1 if p == 2 else 2, m=2 if p == 2 else 1)
    times = {}
    for count in (cores, 8):
        fast = dataclasses.replace(
            find_device("cpu").cluster, node=Link(bandwidth=1e15, latency_s=0.0)
        )
        one = dataclasses.replace(device(cores=count), cluster=fast)
        job = job_on(one, model, world_size=4)
        times[count] = simulated_step_time(job, how)
        closed = step_time(job, how)
        assert closed.total == pytest.approx(times[count].total, rel=0.12)
    assert times[8].sharing == 0
    assert times[cores].total / times[8].total == pytest.approx(expected, rel=0.05)
