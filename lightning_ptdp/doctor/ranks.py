"""Checks with real processes, which form a group as in training, use it and measure it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ptdp.base.forked_processes import Outcome, Tell, run_ranks
from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.doctor.bandwidth import Measurement, check_links, measure
from lightning_ptdp.doctor.calibration import calibrated, cores_of, measure_device, memory_of
from lightning_ptdp.doctor.check import Check, failed, ok
from lightning_ptdp.doctor.collective_checks import COLLECTIVES, GroupMember
from lightning_ptdp.planner import Device
from lightning_ptdp.world.mesh import default_group_options
from lightning_ptdp.world.rendezvous_address import (
    LOOPBACK,
    listen_on_loopback,
    meeting_store,
    reserved_port,
)

_GROUP = "creating the group"


@dataclass(frozen=True, kw_only=True)
class RankCheck:
    """Results of the ranks.

    Attributes:
        checks: Checks of the group and of each collective.
        measurements: Measurements of links; empty if the ranks failed earlier or there is only one.
    """

    checks: tuple[Check, ...]
    measurements: tuple[Measurement, ...]


def check_ranks(*, count: int, backend: str, timeout_s: float) -> RankCheck:
    """Start ``count`` processes on this machine, test each collective, and measure the links.

    Args:
        count: Number of processes.
        backend: "gloo" (on the CPU) or "nccl" (on as many GPUs).
        timeout_s: Seconds after which unfinished ranks are named and ended.
    """
    outcome = _run(_use, count, backend, timeout_s)
    checks = tuple(_checks(outcome, count, backend, timeout_s))
    measurements = outcome.results[0]["measurements"] if 0 in outcome.results else []
    links = (check_links(measurements),) if measurements else ()
    return RankCheck(checks=(*checks, *links), measurements=tuple(measurements))


def calibrate_ranks(*, count: int, backend: str, timeout_s: float) -> Device:
    """Start ``count`` processes on this machine and calibrate their devices.

    The processes are started as in training.

    Args:
        count: Number of processes.
        backend: "gloo" (on the CPU) or "nccl" (on as many GPUs).
        timeout_s: Seconds after which unfinished ranks are named and ended.

    Raises:
        RuntimeError: A rank failed or hangs. The message names it.
    """
    outcome = _run(_calibrate, count, backend, timeout_s)
    if problem := outcome.explain():
        raise RuntimeError(f"{problem}: {_mend(backend)}")
    first = outcome.results[0]
    return calibrated(
        first["name"],
        [outcome.results[rank]["figures"] for rank in range(count)],
        kind="cuda" if backend == "nccl" else "cpu",
        memory_bytes=first["memory_bytes"],
        cores=first["cores"],
    )


def _run(
    work: Callable[[GroupMember, Tell], dict[str, Any]], count: int, backend: str, timeout_s: float
) -> Outcome:
    """Return the results of ``work`` on each rank of a group, with the seconds to form it."""

    def run(rank: int, tell: Tell) -> dict[str, Any]:
        start = time.perf_counter()
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        tell(_GROUP)
        # The parent's limit ends first and names the rank. torch's limit ends a process that lost
        # its parent.
        limit = timedelta(seconds=2 * timeout_s)
        listen_on_loopback()
        store = meeting_store(LOOPBACK, port, keeps=rank == 0, one_machine=True, limit=limit)
        options = default_group_options(backend, device, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, **options)
        formed = time.perf_counter() - start
        result = work(GroupMember(rank=rank, size=count, device=device), tell)
        tell("destroying the group")
        dist.destroy_process_group()
        return {"formed_s": formed, **result}

    with reserved_port() as port:
        return run_ranks(run, count=count, timeout_s=timeout_s)


def _calibrate(place: GroupMember, tell: Tell) -> dict[str, Any]:
    return {
        "name": device_name(place.device),
        "figures": measure_device(place, tell),
        "memory_bytes": memory_of(place.device, place.size),
        "cores": cores_of(place.device),
    }


def _use(place: GroupMember, tell: Tell) -> dict[str, Any]:
    wrong = []
    measurements: list[Measurement] = []
    if place.size > 1:
        for name, use in COLLECTIVES.items():
            tell(name)
            if not use(place):
                wrong.append(name)
        measurements = measure(place, tell)
    return {"wrong": wrong, "measurements": measurements}


def _checks(outcome: Outcome, count: int, backend: str, timeout_s: float) -> Iterator[Check]:
    problem = outcome.explain()
    steps = {step for log in outcome.reports.values() for step in log}
    started = [name for name in COLLECTIVES if name in steps]
    if problem:
        passed = f"; correct until then: {', '.join(started[:-1])}" if len(started) > 1 else ""
        late = f" after {timeout_s:g} s" if outcome.late and not outcome.errors else ""
        yield failed("group", f"{problem}{late}{passed}", _mend(backend))
        return
    formed = max(result["formed_s"] for result in outcome.results.values())
    yield ok(
        "group", f"{count} {'process' if count == 1 else 'processes'} joined in {formed:.2f} s"
    )
    for name in started:
        ranks = [str(rank) for rank, result in outcome.results.items() if name in result["wrong"]]
        if ranks:
            yield failed(name, f"wrong result on rank {', '.join(ranks)}", _mend(backend))
        else:
            yield ok(name, "correct on all ranks")


def _mend(backend: str) -> str:
    if backend == "nccl":
        return (
            "use NCCL_DEBUG=INFO for details, and try NCCL_P2P_DISABLE=1, NCCL_SOCKET_IFNAME, "
            "or --backend gloo"
        )
    return (
        "try GLOO_SOCKET_IFNAME=lo, or a longer --timeout; usual causes are a firewall or a "
        "host name that cannot be resolved"
    )
