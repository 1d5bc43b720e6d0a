"""Checks with real processes, which form a group as in training, test it and measure it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.forked_processes import Outcome, Tell, run_ranks
from lightning_ptdp.doctor.calibration import calibrated, measure_device
from lightning_ptdp.doctor.links import GroupMember, Measurement, check_links, measure
from lightning_ptdp.doctor.machine_checks import Check, failed, ok
from lightning_ptdp.planner import Device
from lightning_ptdp.shims.torch_distributed import all_gather_single, reduce_scatter_single
from lightning_ptdp.world.mesh import default_group_options
from lightning_ptdp.world.rendezvous_address import (
    LOOPBACK,
    listen_on_loopback,
    rendezvous_store,
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
    outcome = _run(
        lambda place, tell: {"figures": measure_device(place, tell)}, count, backend, timeout_s
    )
    if problem := outcome.explain():
        raise RuntimeError(f"{problem}: {_mend(backend)}")
    return calibrated([outcome.results[rank]["figures"] for rank in range(count)])


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
        store = rendezvous_store(LOOPBACK, port, keeps=rank == 0, one_machine=True, limit=limit)
        options = default_group_options(backend, device, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, **options)
        formed = time.perf_counter() - start
        result = work(GroupMember(rank=rank, size=count, device=device), tell)
        tell("destroying the group")
        dist.destroy_process_group()
        return {"formed_s": formed, **result}

    with reserved_port() as port:
        return run_ranks(run, count=count, timeout_s=timeout_s)


def _use(place: GroupMember, tell: Tell) -> dict[str, Any]:
    if place.size == 1:
        return {"wrong": [], "measurements": []}
    wrong = []
    for name, use in COLLECTIVES.items():
        tell(name)
        if not use(place):
            wrong.append(name)
    return {"wrong": wrong, "measurements": measure(place, tell)}


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


# ---- Tests of every kind of communication that training uses, each with a known answer -----------


def _all_reduce(place: GroupMember) -> bool:
    summed = place.full(5, place.rank + 1)
    largest = place.full(5, place.rank)
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return _is(summed, place.size * (place.size + 1) / 2) and _is(largest, place.size - 1)


def _broadcast(place: GroupMember) -> bool:
    tensor = place.full(5, place.rank)
    dist.broadcast(tensor, place.size - 1)
    return _is(tensor, place.size - 1)


def _reduce_scatter(place: GroupMember) -> bool:
    source = torch.arange(place.size, dtype=torch.float32, device=place.device).repeat_interleave(3)
    output = place.full(3, -1)
    reduce_scatter_single(output, source, dist.group.WORLD)
    return _is(output, place.rank * place.size)


def _all_gather(place: GroupMember) -> bool:
    output = place.full(3 * place.size, -1)
    all_gather_single(output, place.full(3, place.rank), dist.group.WORLD)
    return bool((output.cpu() == torch.arange(place.size).repeat_interleave(3)).all())


def _all_to_all(place: GroupMember) -> bool:
    source = place.rank * place.size + torch.arange(
        place.size, dtype=torch.float32, device=place.device
    )
    output = place.full(place.size, -1)
    dist.all_to_all_single(output, source)
    return bool((output.cpu() == torch.arange(place.size) * place.size + place.rank).all())


def _exchange(place: GroupMember, *steps: int) -> bool:
    """Send every rank's number to the rank ``step`` after it in a ring, for all steps at once."""
    received = {step: place.full(5, -1) for step in steps}
    operations: list[dist.P2POp] = []
    for tag, (step, buffer) in enumerate(received.items()):
        after, before = ((place.rank + offset) % place.size for offset in (step, -step))
        operations.append(dist.P2POp(dist.isend, place.full(5, place.rank), after, tag=tag))
        operations.append(dist.P2POp(dist.irecv, buffer, before, tag=tag))
    # All operations are one batch. The first message between two ranks blocks both until the other
    # rank joins, so separate sends in a ring would deadlock.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return all(_is(buffer, (place.rank - step) % place.size) for step, buffer in received.items())


def _objects(place: GroupMember) -> bool:
    gathered: list[Any] = [None] * place.size
    dist.all_gather_object(gathered, {"rank": place.rank})
    box = ["from the first" if place.rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    return gathered == [{"rank": rank} for rank in range(place.size)] and box == ["from the first"]


def _groups(place: GroupMember) -> bool:
    """Test the groups of neighbours, and one gloo group of all ranks.

    Training uses a gloo group in addition to NCCL for agreements between ranks.
    """
    right = True
    for first in range(0, place.size - 1, 2):
        group: Any = dist.new_group([first, first + 1])
        if place.rank in (first, first + 1):
            tensor = place.full(5, place.rank)
            dist.all_reduce(tensor, group=group)
            right = right and _is(tensor, 2 * first + 1)
    flag = torch.ones(())
    world: Any = dist.new_group(backend="gloo")
    dist.all_reduce(flag, group=world)
    return right and flag.item() == place.size


def _barrier(place: GroupMember) -> bool:
    dist.barrier(device_ids=[place.device.index] if place.device.type == "cuda" else None)
    return True


COLLECTIVES: Mapping[str, Callable[[GroupMember], bool]] = MappingProxyType(
    {
        "all-reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce-scatter": _reduce_scatter,
        "all-gather": _all_gather,
        "all-to-all": _all_to_all,
        "send and receive": lambda place: _exchange(place, 1),
        "both directions": lambda place: _exchange(place, 1, -1),
        "objects": _objects,
        "groups": _groups,
        "barrier": _barrier,
    }
)
"""Name -> test that returns True if the answer is correct."""


def _is(tensor: Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())
