"""Lightning's launchers, with the checks in front and the weights brought home behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from lightning_ptdp._lightning import lightning_names
from lightning_ptdp.strategy.stopping import ending_children_on_sigterm

__all__ = ["make_launcher"]


def make_launcher(strategy: Any, namespace: str, start_method: str) -> Any:
    """The launcher that starts this node's processes with ``start_method``."""
    subprocesses, workers = _launcher_classes(namespace)
    if start_method == "popen":
        return subprocesses(strategy)
    return workers(strategy, start_method)


@lru_cache(maxsize=2)
def _launcher_classes(namespace: str) -> tuple[Any, Any]:
    names = lightning_names(namespace)
    subprocess_launcher: Any = names.SubprocessLauncher
    multiprocessing_launcher: Any = names.MultiProcessingLauncher

    def reduce(launcher: Any) -> tuple[Any, ...]:
        # Classes made in a function cannot be found by name: spawned processes get them from this one's arguments.
        return _bare_launcher, (namespace, _launcher_classes(namespace).index(type(launcher))), vars(launcher)

    class CheckedSubprocessLauncher(subprocess_launcher):
        """Re-runs the script once a process."""

        def __init__(self, strategy: Any) -> None:
            super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
            self._strategy = strategy

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._strategy.check_before_launch(trainer, args)
            with ending_children_on_sigterm(self):
                return super().launch(function, *args, trainer=trainer, **kwargs)

        __reduce__ = reduce

    class CheckedMultiProcessingLauncher(multiprocessing_launcher):
        """Forks or spawns the processes, and gives the main process the whole trained model."""

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._strategy.check_before_launch(trainer, args)
            return super().launch(function, *args, trainer=trainer, **kwargs)

        def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
            with self._strategy.whole_state_dict(trainer.lightning_module):
                return super()._collect_rank_zero_results(trainer, results)

        __reduce__ = reduce

    return CheckedSubprocessLauncher, CheckedMultiProcessingLauncher


def _bare_launcher(namespace: str, index: int) -> Any:
    """A launcher without attributes, for pickle to fill."""
    launcher_class = _launcher_classes(namespace)[index]
    return launcher_class.__new__(launcher_class)
