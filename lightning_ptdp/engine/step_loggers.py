"""Code of a step that is for rank 0 only, such as ``self.logger.experiment.add_image(...)``.

Lightning gives rank 0 alone a logger's experiment. But under a pipeline only the last stage runs a
step to its end, and tensor ranks must read their parts of the logits together. Inside a step, the
last stage therefore acts as rank 0, and the Trainer has stand-ins for its loggers. Their arguments
are made whole; under a pipeline, rank 0 then repeats the calls of its last stage.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.nested import map_tensors
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.tensor_parallel import gather_full
from lightning_ptdp.world.mesh import ProcessMesh

_PLAIN = (bool, int, float, str, os.PathLike, dict, list, tuple)
Path = tuple[Any, ...]
"""Index of a logger, and names of attributes; a name in a tuple is the key of an item."""


class StepLoggers:
    """Stand-ins for the loggers of a module's Trainer.

    Args:
        module: The LightningModule.
        mesh: This rank's place and groups.
    """

    def __init__(self, module: LightningModule, mesh: ProcessMesh) -> None:
        pipeline = mesh.group("pipeline")
        self._module = module
        self._sends = pipeline.size > 1
        self._is_needed = self._sends or mesh.group("tensor").size > 1
        self._is_of_rank_zero = 0 in pipeline.ranks
        self._is_last = True
        self._calls: list[bytes] = []

    @contextlib.contextmanager
    def replaced(self, *, is_last: bool) -> Iterator[None]:
        """Let the step use the stand-ins. On stages before the last, they ignore calls."""
        if not self._is_needed:
            yield
            return
        self._is_last = is_last
        trainer = self._module.trainer
        own = trainer.loggers
        trainer.loggers = [_StandIn(self, logger, (index,)) for index, logger in enumerate(own)]
        rank = dist.get_rank()
        if self._sends:
            rank = 0 if is_last and self._is_of_rank_zero else max(rank, 1)
        try:
            with trainer.strategy.acting_as(rank):
                yield
        finally:
            trainer.loggers = own

    def taken(self) -> list[bytes]:
        """Return the recorded calls, for ``repeat``, and forget them."""
        calls = self._calls
        self._calls = []
        return calls

    def attribute(self, value: Any, path: Path) -> Any:
        """Return an attribute if it is plain data that this rank knows, else a stand-in for it."""
        if self._sends and len(path) > 2:
            return _StandIn(self, None, path)  # this rank does not have the experiment
        with self._module.trainer.strategy.acting_as(dist.get_rank()):
            found = _read(value, path[-1])
        is_known = isinstance(found, _PLAIN) or (found is None and not self._sends)
        return found if is_known else _StandIn(self, found, path)

    def call(self, value: Any, path: Path, args: Any, kwargs: Any) -> Any:
        """Call a function of a logger, or record the call.

        Raises:
            ValueError: The arguments cannot be sent to rank 0.
        """
        if not self._sends:
            args, kwargs = map_tensors((args, kwargs), gather_full)
            return value(*args, **kwargs)
        if not self._is_last:
            return None
        content = io.BytesIO()
        try:
            _Pickler(content).dump((path, args, kwargs))
        except Exception as error:
            names = (name for name in path[1:] if isinstance(name, str))
            call = ".".join(("self.logger", *names))
            raise ValueError(
                f"{call}(...) has an argument that cannot be sent from the last pipeline stage to "
                f"rank 0, which has the logger ({error}). Call it in a hook, such as "
                "on_validation_epoch_end"
            ) from error
        if self._is_of_rank_zero:
            self._calls.append(content.getvalue())
        return None


def repeat(calls: Sequence[bytes], loggers: Sequence[Any]) -> None:
    """Repeat recorded calls on the loggers themselves."""
    for call in calls:
        path, args, kwargs = _Unpickler(io.BytesIO(call), loggers).load()
        _follow(loggers, path)(*args, **kwargs)


def _follow(loggers: Sequence[Any], path: Path) -> Any:
    value = loggers[path[0]]
    for name in path[1:]:
        value = _read(value, name)
    return value


def _read(value: Any, name: Any) -> Any:
    return value[name[0]] if isinstance(name, tuple) else getattr(value, name)


class _StandIn:
    """An attribute of a logger, or a logger; ``isinstance`` sees the type of the original."""

    def __init__(self, loggers: StepLoggers, value: Any, path: Path) -> None:
        self._ptdp_loggers = loggers
        self._ptdp_value = value
        self._ptdp_path = path

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._ptdp_value)

    def __getattr__(self, name: str) -> Any:
        return self._ptdp_loggers.attribute(self._ptdp_value, (*self._ptdp_path, name))

    __iter__ = None  # items are unknown, so that a loop over them would not end

    def __getitem__(self, key: Any) -> Any:
        return self._ptdp_loggers.attribute(self._ptdp_value, (*self._ptdp_path, (key,)))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ptdp_loggers.call(self._ptdp_value, self._ptdp_path, args, kwargs)


class _Pickler(pickle.Pickler):
    """Stores tensors whole, and an attribute of a logger, such as a run's id, by its path."""

    def persistent_id(self, value: object) -> Path | None:
        return value._ptdp_path if type(value) is _StandIn else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return gather_full(value.detach()).cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, loggers: Sequence[Any]) -> None:
        super().__init__(file)
        self._loggers = loggers

    def persistent_load(self, path: Path) -> Any:
        return _follow(self._loggers, path)
