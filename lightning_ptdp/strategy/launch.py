"""Lightning's launchers, with checks before the launch and trained weights returned."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from lightning_ptdp.base.output import survive_closed_output
from lightning_ptdp.callbacks.artifacts import mlflow_loggers
from lightning_ptdp.data_parallel.replica_buffers import overlaps
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parameters.materialize import Materializer, make_room
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.lightning import (
    Launcher,
    LightningNames,
    StrategyBase,
    Trainer,
    fits,
    lightning_names,
)
from lightning_ptdp.shims.torch_distributed import is_communication_error
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.stopping import (
    INTERRUPTED,
    ending_on_sigterm,
    forwarding_ctrl_c,
    stop_forwarding_ctrl_c,
)

_LAST_WORD_S = 5.0
_FORKED_TOO_LATE = "pytorch/wiki/Autograd-and-Fork"
_T = TypeVar("_T")


def make_launcher(strategy: StrategyBase) -> Launcher:
    """Return the launcher that starts this node's processes.

    A single process runs in this process, regardless of ``start_method``.

    Raises:
        MisconfigurationException: The method cannot start processes from a notebook or a prompt.
    """
    if strategy.num_nodes * strategy.num_processes == 1:
        return InProcessLauncher(strategy)
    start_method = strategy.config.start_method
    if start_method != "fork" and (hasattr(sys, "ps1") or sys.flags.interactive):
        # Lightning's own message would recommend one of Lightning's strategies.
        raise strategy.refusal(
            f"start_method={start_method!r} cannot start processes from a notebook or an "
            "interactive prompt, which has no script to run again. Use "
            'Trainer(strategy="ptdp_fork") or start_method="fork" and do not use CUDA before '
            "fit, or run a script"
        )
    if start_method != "popen" and multiprocessing.current_process().daemon:
        raise strategy.refusal(
            f"start_method={start_method!r} cannot start processes from a daemonic process, such as a "
            "worker of multiprocessing.Pool. Train in the main process, or in a worker of "
            "concurrent.futures.ProcessPoolExecutor"
        )
    namespace = strategy._names.namespace
    if start_method == "popen":
        return _launcher_class(namespace, _CheckedSubprocesses)(strategy)
    return _launcher_class(namespace, _CheckedProcesses)(strategy, start_method)


class InProcessLauncher:
    """Launcher that runs the function in this process.

    A forked child would inherit the locks held by threads of a notebook or a test run, but not the
    threads."""

    is_interactive_compatible = True

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    def launch(
        self,
        function: Callable[..., _T],
        *args: object,
        trainer: Trainer | None = None,
        **kwargs: object,
    ) -> _T:
        """Run the checks, then call ``function``."""
        self._strategy.check_before_launch(trainer, args)
        return function(*args, **kwargs)

    def kill(self, signum: int) -> None:
        """Do nothing, because there is no other process."""


class _Ended:
    """Result of processes that ended themselves (SIGTERM).

    Without it the main process would wait for results forever."""


def _end_loggers(trainer: Trainer | None) -> None:
    """Close the loggers of a rank that was asked to end, while its exception is still available.

    Lightning ends the loggers of the main process only. Since Python 3.13, functions that run at
    the exit of a forked process do not see the exception.
    """
    for logger in () if trainer is None else trainer.loggers:
        try:
            logger.finalize("failed")
        except Exception as error:
            warnings.warn(f"{type(logger).__name__} could not be closed: {error}", stacklevel=2)


class _CheckedLauncher(Launcher):
    """Base of the launchers that start processes, in addition to a class of Lightning's.

    A derived class has the method ``_starting``, which returns the context of the start."""

    _names: LightningNames
    _strategy: StrategyBase

    def launch(
        self,
        function: Callable[..., _T],
        *args: object,
        trainer: Trainer | None = None,
        **kwargs: object,
    ) -> _T:
        """Run the checks, then start the processes."""
        self._strategy.check_before_launch(trainer, args)
        with self._starting(trainer):
            return super().launch(function, *args, trainer=trainer, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        # Classes made in a function cannot be found by name. Spawned processes get them from the
        # arguments of this function.
        return _bare_launcher, (self._names.namespace, type(self).__mro__[1]), self.__getstate__()


class _CheckedSubprocesses(_CheckedLauncher):
    """Launcher that re-runs the script once for each process."""

    def __init__(self, strategy: StrategyBase) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def _starting(self, trainer: Trainer | None) -> Context:
        return ending_on_sigterm(self, partial(_end_loggers, trainer))

    def kill(self, signum: int) -> None:
        """Send a signal to the processes; after SIGKILL, wait for their end.

        Their end then does not count as a failure, for which Lightning would also kill this
        process."""
        super().kill(signum)
        if signum == signal.SIGKILL:
            for process in self.procs:
                process.wait()
            self.procs.clear()


class _CheckedProcesses(_CheckedLauncher):
    """Launcher that forks or spawns processes and returns the whole model to the main one.

    Lightning's launcher sends the weights through a file in the temporary folder, which may be
    small or on a disk."""

    _weights_path: str | None = None

    @contextmanager
    def _starting(self, trainer: Trainer | None) -> Iterator[None]:
        self._strategy.ranks_failed = False
        returns = trainer is not None and fits(trainer) and self._strategy.returns_weights
        try:
            with (
                shared_file() if returns else contextlib.nullcontext() as self._weights_path,
                forwarding_ctrl_c(self),
            ):
                yield
        except BaseException:
            self._strategy.ranks_failed = True
            raise

    def _wrapping_function(self, process_idx: int, trainer: Trainer, *call: Any) -> None:
        # The garbage collector writes to every object that it inspects, and the kernel copies
        # every memory page that a forked process writes to.
        gc.freeze()
        stop_forwarding_ctrl_c()
        survive_closed_output()
        self.procs.clear()  # those of an earlier run are not children of this process
        try:
            with ending_on_sigterm(self, partial(_end_loggers, trainer)):
                super()._wrapping_function(process_idx, trainer, *call)
        except KeyboardInterrupt:
            _end_loggers(trainer)
            sys.exit(INTERRUPTED)  # some versions of torch report it as success
        except SystemExit as system_exit:
            _end_loggers(trainer)
            if process_idx == 0 and not system_exit.code:
                # the queue of results follows the function and its arguments
                call[3].put(_Ended())
            raise
        except Exception as error:
            peer_lost = isinstance(error, PeerError) or is_communication_error(error)
            # The main process shows the error of the rank that ends first, and ends the other
            # ranks by SIGTERM. Wait for SIGTERM, so that the lost rank ends first.
            if peer_lost and not self._strategy.stop_requested:
                time.sleep(_LAST_WORD_S)
            if _FORKED_TOO_LATE in str(error):
                error.add_note(
                    "A backward ran in the parent process before the fork and left "
                    "threads there. Do not use the GPU or run a backward before fit, or "
                    "use start_method='popen'."
                )
            raise

    def _collect_rank_zero_results(self, trainer: Trainer, results: object) -> object:
        if self._weights_path is not None:
            _write_weights(self._strategy, self._weights_path)
        if self._strategy.local_rank != 0:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return self._names.WorkerOutput(
            best, self._weights_path, trainer.state, results, self.get_extra_results(trainer)
        )

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """Return what the main process needs, with the MLflow runs of this rank."""
        runs = [logger.stored_run for logger in mlflow_loggers(trainer)]
        return {**super().get_extra_results(trainer), "runs": runs}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Let the loggers of the main process follow the runs of rank 0."""
        super().update_main_process_results(trainer, extra)
        for logger, run_id in zip(mlflow_loggers(trainer), extra["runs"], strict=False):
            logger.follow(run_id)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        if isinstance(worker_output, _Ended):
            raise SystemExit
        if worker_output.weights_path is not None:
            _read_weights(self._strategy, worker_output.weights_path)
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)


@lru_cache(maxsize=4)
def _launcher_class(namespace: str, launcher: type[_CheckedLauncher]) -> type[_CheckedLauncher]:
    """Return ``launcher`` on top of Lightning's class in one of its namespaces."""
    names = lightning_names(namespace)
    base = names.MultiProcessingLauncher
    if launcher is _CheckedSubprocesses:
        base = names.SubprocessLauncher
    return type(launcher.__name__, (launcher, base), {"_names": names, "__module__": __name__})


def _bare_launcher(namespace: str, launcher: Any) -> Launcher:
    """Return a launcher without attributes, which pickle fills."""
    return object.__new__(_launcher_class(namespace, launcher))


# ---- Trained weights, returned to the process that started the ranks ---------------------------


def _write_weights(strategy: CheckpointHooks, path: str) -> None:
    """Write the whole model's state dictionary to ``path`` from local rank 0.

    Collective over the world."""
    space = strategy.model_space
    if space.engine is not None:
        space.engine.gradients.parameters_needed()
    is_divided = space.parallel is not None and not space.ranks_hold_all
    # Every rank calls state_dict(), because metrics may communicate in it.
    weights = space.state_dict() if is_divided else space.module.state_dict()
    if strategy.local_rank == 0:
        torch.save(weights, path)


def _read_weights(strategy: CheckpointHooks, path: str) -> None:
    """Build the module in the main process, and load the weights of ``_write_weights``."""
    module = strategy.lightning_module
    on_meta = strategy.config.meta_init and hasattr(module, "initial_weights")
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        module.configure_model()
    if on_meta:  # its values are neither read nor drawn
        cpu = torch.device("cpu")
        materialize = Materializer(
            module, seed=0, device=cpu, left={name for name, _ in module.named_parameters()}
        )
        for name, child in module.named_modules():
            materialize(child, name)
        make_room(module, device=cpu)
    weights = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    for child in module.modules():
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and overlaps(buffer):
                child._buffers[key] = buffer.clone()  # an expanded tensor cannot be written to
    # The ranks may have added or removed layers.
    module.load_state_dict(weights, strict=False)


# ---- Files in memory that a process shares with the processes that it starts ---------------------


@contextmanager
def shared_file() -> Iterator[str]:
    """Yield the path of an empty file in anonymous memory.

    Forked and spawned processes of the same user can open it. The file needs no space in
    ``/dev/shm`` or the temporary folder. It disappears with the context, or with this process."""
    descriptor = os.memfd_create("lightning-ptdp")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
