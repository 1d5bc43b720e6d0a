"""Assumptions of world/communicators.py about "nccl", checked against the installed torch.

A stand-in for the backend records how torch creates groups with a bound device, without a GPU.
"""

import pickle
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from lightning_ptdp.checkpoint import same_outcome, save_agreement
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.torch_distributed import (
    binds_device,
    flight_record,
    is_communication_error,
    nccl_options,
)
from lightning_ptdp.world import mesh as mesh_module
from lightning_ptdp.world.communicators import communicators
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh, default_group_options

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")

LIMIT = timedelta(seconds=30)


@dataclass(frozen=True)
class Created:
    """A communicator that torch requested from the backend."""

    ranks: tuple[int, ...]
    device: torch.device | None
    is_split: bool
    is_lazy: bool
    timeout: timedelta


class StandIn(c10d.Backend):
    """Backend that supports splitting and completes collectives immediately."""

    supports_splitting = True

    @property
    def options(self):
        """Return the options; torch's own property would recurse endlessly in Python."""
        return c10d.Backend.Options(self.getBackendName(), LIMIT)

    def getBackendName(self):  # noqa: N802 - torch's name
        return "nccl2"

    def eager_connect_single_device(self, device): ...

    def allreduce(self, tensors, options):
        done = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)


@contextmanager
def stand_in(rank, size, device):
    """Make ``dist`` create "nccl" groups with the stand-in.

    The default group uses the package's options.
    """
    created = []

    def create(options, given):
        one = Created(
            ranks=tuple(options.global_ranks_in_group),
            device=options.process_group.bound_device_id,
            is_split=options.split_from is not None,
            is_lazy=getattr(given, "lazy_init", False),
            timeout=options.timeout,
        )
        created.append(one)
        return StandIn(options.group_rank, options.group_size)

    backend = distributed_c10d.Backend
    backend._ensure_backend_registered("nccl")
    plugin = backend._BackendPlugin(create, True)
    accelerator = {
        "current_accelerator": lambda **_: torch.device("cuda"),
        "device_count": lambda: 8,
        "is_available": lambda: True,
    }
    with (
        mock.patch.dict(backend._plugins, {"NCCL": plugin}),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(mesh_module, "_connect"),
        mock.patch.object(mesh_module, "_connect_channel"),
    ):
        options = default_group_options("nccl", device, LIMIT)
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=rank, world_size=size, **options
        )
        try:
            yield created
        finally:
            dist.destroy_process_group()


def test_binds_device_matches_registered_nccl_backend():
    """With torch 2.15, "nccl" is nccl2, which needs the device."""
    backend = distributed_c10d.Backend
    if hasattr(backend, "_ensure_backend_registered"):
        backend._ensure_backend_registered("nccl")
    plugin = backend._plugins.get("NCCL")  # None if torch itself creates it
    name = "" if plugin is None else plugin.creator_fn.__name__
    assert binds_device() == ("nccl2" in name), name


@pytest.mark.skipif(not binds_device(), reason="this torch takes the device from the tensors")
def test_nccl2_uses_bound_device_or_infers_it_from_rank():
    group = mock.Mock(bound_device_id=torch.device("cuda", 3))
    options = mock.Mock(enable_reconfigure=False, process_group=group)
    find = distributed_c10d._nccl2_device
    assert find(options) == torch.device("cuda", 3)
    group.bound_device_id, options.global_ranks_in_group, options.group_rank = None, [], 5
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=4),
        mock.patch.dict("os.environ"),
    ):
        distributed_c10d.os.environ.pop("LOCAL_RANK", None)
        assert find(options) == torch.device("cuda", 1), (
            "the device is not the rank modulo the number of GPUs"
        )


@pytest.mark.skipif(not binds_device(), reason="this torch splits no group")
def test_torch_splits_only_eager_groups():
    with stand_in(0, 4, torch.device("cuda", 2)) as created:
        dist.new_group([0, 1], use_local_synchronization=True)
        options = nccl_options(LIMIT, high_priority=False)
        dist.new_group([0, 1], use_local_synchronization=True, pg_options=options)
    assert [one.is_split for one in created] == [False, True, False]


@pytest.mark.skipif(not binds_device(), reason="torch itself creates this backend's groups")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3, "world_size": 6},
        {"expert_parallel_size": 2, "context_parallel_size": 2},
    ],
)
def test_groups_are_bound_to_device_and_not_split(options):
    layout = ParallelLayout(**{"world_size": 8, **options})
    calls = []
    for rank in range(layout.world_size):
        device = torch.device("cuda", 7 - rank)
        with (
            stand_in(rank, layout.world_size, device) as created,
            mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
        ):
            mesh = ProcessMesh.create(layout=layout, rank=rank, timeout=LIMIT, device=device)
            middle = tuple(range(1, layout.pipeline_parallel_size - 1))
            if middle:
                here = mesh.group("pipeline").rank
                mesh.subgroup("pipeline", middle if here in middle else (0, 2))
            calls.append(new_group.call_count)
        assert len(created) == len(communicators(layout, rank)) + (len(middle) and here != 1)
        assert not any(one.is_split for one in created)
        assert {one.device for one in created} == {device if binds_device() else None}
        assert all(one.is_lazy == binds_device() for one in created[1:])
        # The hang guard acts at 1.1 times the limit.
        assert all(one.timeout > 1.5 * LIMIT for one in created)
    assert len(set(calls)) == 1, "ranks created different numbers of groups, which torch counts"


MESSAGES = [
    "NCCL operation timed out",
    "Watchdog caught collective operation timeout: NCCL operation timed out",
    "NCCL communicator was aborted after a previous error",
    "Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)",
    "NCCL AllReduce failed: remote process exited or there was a network error",
    "NCCL Send failed in batch operation: unhandled system error",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_nccl_error_skips_agreement_between_ranks(message):
    assert is_communication_error(RuntimeError(message))
    assert not is_communication_error(ValueError(message))
    no_collective = mock.patch.object(save_agreement, "gather", side_effect=AssertionError)
    with (
        no_collective,
        pytest.raises(RuntimeError, match=message.split("(")[0]),
        same_outcome("the test"),
    ):
        raise RuntimeError(message)
    with no_collective, pytest.raises(PeerError), same_outcome("the test"):
        raise PeerError("lost another rank") from RuntimeError(message)


@pytest.mark.parametrize("message", ["NCCL version 2.10 is too old", "the NCCL operation failed"])
def test_other_errors_are_not_communication_errors(message):
    assert not is_communication_error(RuntimeError(message))


@pytest.mark.skipif(not binds_device(), reason="NCCL of this torch records itself")
def test_flight_record_is_read_from_backend_in_use():
    def create(store, rank, size, timeout):
        return StandIn(rank, size)

    dist.Backend.register_backend("stand_in", create, devices=["cpu"])
    dist.init_process_group("stand_in", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.zeros(3))
        assert pickle.loads(flight_record())["entries"]
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not binds_device(), reason="torch has no backends in Python yet")
def test_failed_rank_ends_though_destroying_its_groups_waits():
    """As with NCCL, the end of a group waits for posted receives, which nobody serves any more."""
    script = """
        import atexit, threading
        import torch.distributed as dist
        from lightning_ptdp.pipeline.watchdog import Watchdog
        from tests.test_nccl2 import StandIn

        class Waiting(StandIn):
            served = threading.Event()

            def shutdown(self):
                self.served.wait()

            def abort(self):
                self.served.set()

        make = lambda store, rank, size, limit: Waiting(rank, size)
        dist.Backend.register_backend("waiting", make, devices=["cpu"])
        dist.init_process_group("waiting", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        watchdog = Watchdog(rank=0, world_size=2, ranks=[0, 1], limit_s=1, waits_raise=False)
        watchdog.annotate(ValueError())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, timeout=120)


def test_failed_rank_aborts_process_groups_before_exit():
    script = """
        import atexit
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from lightning_ptdp.pipeline.watchdog import Watchdog

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        atexit.register(lambda: print("left to destroy:", dist.is_initialized()))
        watchdog = Watchdog(rank=0, world_size=2, ranks=[0, 1], limit_s=1, waits_raise=False)
        watchdog.annotate(ValueError())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "left to destroy: False\n", done.stderr
