"""World of the strategy: identity of this rank, rendezvous and process groups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from lightning_ptdp.base.random import derive_seed, seed_process
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.pipeline.watchdog import Watchdog
from lightning_ptdp.shims.glibc import Heap, compute_without_preemption
from lightning_ptdp.shims.lightning import Launcher
from lightning_ptdp.strategy.checks.machine_limits import (
    check_device,
    check_machine,
    check_nccl,
    check_other_gpus,
    check_processes,
)
from lightning_ptdp.strategy.expected_ranks import ExpectedRanks
from lightning_ptdp.strategy.rendezvous import join
from lightning_ptdp.strategy.running_strategy import Run, RunningStrategy, ValidationClock
from lightning_ptdp.strategy.stopping import Interruption, StopRequest
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh, default_group_options
from lightning_ptdp.world.rendezvous_address import (
    LOOPBACK,
    launched_processes,
    listen_anywhere,
    listen_on_loopback,
    rendezvous_store,
    torchrun_keeps_store,
)


class World(RunningStrategy):
    """Layer of the strategy: ranks, sizes, process groups."""

    _launcher: Launcher
    _parent: int
    _changes: contextlib.ExitStack
    """Changes of this process that ``leave_environment`` undoes."""
    _heap: Heap | None = None
    _layout: tuple[PTDPConfig, int, ParallelLayout] | None = None

    @property
    def root_device(self) -> torch.device:
        """Return this rank's device."""
        return self.parallel_devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        """Return this rank, or the one as which it acts in the user's step."""
        return self.own_rank if self._acting_rank is None else self._acting_rank

    @property
    def own_rank(self) -> int:
        """Return this rank."""
        return 0 if self._is_alone else super().global_rank

    @property
    def local_rank(self) -> int:
        """Return the index of this rank on its node."""
        return 0 if self._is_alone else super().local_rank

    @property
    def node_rank(self) -> int:
        """Return the index of this node."""
        return 0 if self._is_alone else super().node_rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return 1 if self._is_alone else super().world_size

    @property
    def _is_alone(self) -> bool:
        """Return True if there is only one process.

        The environment is not asked then: in a SLURM job that was not started by srun it would be
        wrong."""
        return self.num_nodes * self.num_processes == 1

    @property
    def starts_all_ranks(self) -> bool:
        """Return True in the process that starts all ranks, or that is the only one."""
        return self._is_alone or (
            self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally
        )

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Return True if ranks log different values, so that Lightning reduces them.

        Hooks may log values of a slice of the sequence."""
        return self.layout.size("replica_sum") > 1

    @property
    def layout(self) -> ParallelLayout:
        """Return the degrees of parallelism in this world."""
        config = self.config
        world_size = max(1, self.num_nodes * self.num_processes)
        if self._layout is None or self._layout[0] is not config or self._layout[1] != world_size:
            self._layout = config, world_size, config.layout(world_size)
        return self._layout[2]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Return the sampler's arguments, which split samples over replicas.

        All ranks of a replica read the same samples."""
        layout = self.layout
        return {"num_replicas": layout.num_replicas, "rank": layout.replica(self.own_rank)}

    def follow_launcher(self) -> None:
        """Take the numbers of devices and nodes from a launcher if the Trainer has its defaults.

        These are one node, and one device on a CPU or with a single visible GPU. No process is
        forked or spawned if the launcher has started all."""
        found = launched_processes(os.environ)
        devices = self.parallel_devices
        if found is None or not self.cluster_environment.creates_processes_externally:
            return
        if len(devices) == 1 and (devices[0].type == "cpu" or torch.cuda.device_count() == 1):
            self.parallel_devices = devices * found[0]
        if self.num_nodes == 1 and self.num_processes == found[0]:
            self.num_nodes = found[1]
        if found == (self.num_processes, self.num_nodes):
            self.config = replace(self.config, start_method="popen")

    def check_processes(self) -> None:
        """Refuse to fit if a launcher has started processes that would not join.

        Raises:
            ValueError: It has; the message says what would work.
        """
        check_processes(
            self.cluster_environment,
            os.environ,
            devices=self.num_processes,
            num_nodes=self.num_nodes,
        )

    def check_machine(self) -> None:
        """Check that this machine lets the ranks start, if this process starts all of them.

        Raises:
            ValueError: A limit of the machine is too low, or NCCL has no GPU.
        """
        if self.config.process_group_backend == "nccl" and self.root_device.type == "cpu":
            raise ValueError(
                "process_group_backend='nccl' needs GPUs, but accelerator='cpu': leave the option "
                "out, or use 'gloo'"
            )
        if self.starts_all_ranks and not self._is_alone:
            check_machine(
                world_size=self.num_processes,
                start_method=self.config.start_method,
                accelerator=self.root_device.type,
            )

    def setup_environment(self) -> None:
        """Join the process group and make the mesh."""
        check_device(self.root_device, precision=str(self.lightning_module.trainer.precision))
        super().setup_environment()
        self.set_world_ranks()
        layout = self.layout
        if layout.world_size > 1 and self.num_nodes == 1:
            self._changes.callback(listen_anywhere, listen_on_loopback())
        self._run = self._begin(layout, self._run)
        if self._heap is None and self.root_device.type == "cpu":
            self._heap = Heap()
            self._changes.callback(self._heap.close)
            self._changes.callback(compute_without_preemption())
        if self.global_rank != 0:
            # Every rank would print this warning of ModelCheckpoint.
            warnings.filterwarnings("ignore", message="The dirpath has changed")
        if layout.world_size > 1 and layout.num_replicas == 1:
            # Ranks of a single replica hold equal values. Lightning's advice to reduce them does
            # not apply.
            warnings.filterwarnings(
                "ignore", message=".*sync_dist=True.*accumulate the metric across devices.*"
            )

    def _begin(self, layout: ParallelLayout, before: Run | None) -> Run:
        """Return the state of a new run.

        Parts of the previous run are reused. The ranks agree on the seed and the name of the new
        run."""
        if layout.world_size > 1 and not dist.is_initialized():
            mesh, board = self._join(layout)
        elif before is not None:
            mesh = before.mesh
            board = before.board
        else:
            mesh = self._make_mesh(layout)
            board = None
        if before is None or before.watchdog.closed:
            watchdog = Watchdog.create(mesh=mesh, limit_s=self.config.timeout_s, store=board)
        else:
            watchdog = before.watchdog
        self._run = None
        try:
            with watchdog.during("broadcast from rank 0"):
                seed, name = self.broadcast((self._reset_seed(), uuid.uuid4().hex))
        except BaseException:
            watchdog.close()  # no teardown would find it
            raise
        if layout.divides_model and "PL_GLOBAL_SEED" not in os.environ:
            # The ranks of a replica must augment their samples in the same way. seed_everything has
            # given all ranks the same seed.
            seed_process(derive_seed(seed, "process", layout.replica(self.global_rank)))
        trainer = self.lightning_module.trainer
        on_device = self.root_device.type == "cuda"
        return Run(
            mesh=mesh,
            board=board,
            watchdog=watchdog,
            interruption=Interruption(trainer, watchdog, run=name, on_device=on_device),
            stop_request=StopRequest(trainer, alone=layout.world_size == 1),
            validation_clock=ValidationClock(trainer),
            seed=seed,
        )

    def _make_mesh(self, layout: ParallelLayout) -> ProcessMesh:
        return ProcessMesh.create(
            layout=layout,
            rank=self.global_rank,
            timeout=self.config.timeout,
            device=self.root_device,
            channel_ctas=self.config.channel_ctas,
        )

    def _reset_seed(self) -> int:
        """Reset the random numbers to the user's seed, and return the seed.

        Lightning's strategies reset them too. In a single process the random numbers continue
        unchanged."""
        with contextlib.nullcontext() if self.layout.world_size > 1 else self._names.isolate_rng():
            self._names.reset_seed()
            return self.config.seed if self.config.seed is not None else torch.initial_seed()

    def _join(self, layout: ParallelLayout) -> tuple[ProcessMesh, dist.Store | None]:
        backend = self.config.process_group_backend or self._names.default_backend(self.root_device)
        environment = self.cluster_environment
        limit = self.config.timeout
        one_machine = self.num_nodes == 1
        by_torchrun = torchrun_keeps_store()
        expected = ExpectedRanks(
            rank=self.global_rank,
            world_size=layout.world_size,
            address=environment.main_address if by_torchrun or not one_machine else LOOPBACK,
            port=environment.main_port,
            num_nodes=self.num_nodes,
            started_by_hand=isinstance(environment, self._names.LightningEnvironment),
        )

        open_store = partial(
            rendezvous_store,
            expected.address,
            expected.port,
            keeps=expected.rank == 0 and not by_torchrun,
            one_machine=one_machine,
            limit=limit,
        )

        def make(store: dist.Store) -> tuple[ProcessMesh, dist.Store]:
            if self.root_device.type == "cuda":
                torch.cuda.set_device(self.root_device)  # each thread has its own
            if backend == "nccl":
                check_nccl()
                check_other_gpus(
                    store,
                    rank=expected.rank,
                    tensor_ranks=layout.group_of("tensor", expected.rank),
                    gpu=torch.cuda.get_device_properties(self.root_device),
                )
            options = default_group_options(backend, self.root_device, limit)
            self._names.init_process_group(
                environment, backend, expected.rank, layout.world_size, store=store, **options
            )
            mesh = self._make_mesh(layout)
            # After the loss of its host, torch tries for twice the limit to connect, without a
            # check of the time.
            return mesh, store.clone()

        return join(expected, open_store=open_store, make=make, limit=limit, ended=self._ended)

    def trim_heap(self) -> None:
        """Return free memory to the system between two steps on a CPU."""
        if self._heap is not None:
            self._heap.trim_if_grown()

    def leave_environment(self) -> None:
        """Restore the user's network interfaces, and the usual heap and scheduling.

        Groups that are made later use these interfaces."""
        self._heap = None
        self._changes.close()

    def _ended(self) -> str:
        """Return a message about ended child or parent processes; "" if there are none."""
        first = self.own_rank - self.local_rank
        for local_rank, process in enumerate(getattr(self._launcher, "procs", ()), start=1):
            if isinstance(process, subprocess.Popen) and process.poll() is not None:
                return (
                    f"rank {first + local_rank} was lost: its process ended with exit code "
                    f"{process.returncode}"
                )
        if self.local_rank and self.config.start_method == "popen" and self._parent != os.getppid():
            return f"rank {first}, or the process that started this one, was lost"
        return ""

    def set_world_ranks(self) -> None:
        """Set this process's rank and world size in Lightning's environment and helpers."""
        if self.cluster_environment is not None:
            world_size = self.num_nodes * self.num_processes
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank if world_size > 1 else 0
            )
            self.cluster_environment.set_world_size(world_size)
        self._act_as(self._acting_rank)
