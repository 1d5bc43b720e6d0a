"""Saving of checkpoints: writes Lightning's checkpoint in model space."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.signals import StoppedNow, breakable
from lightning_ptdp.checkpoint import (
    PARAMETER_NAMES,
    BackgroundSaver,
    CheckpointError,
    files,
    keeps_history,
    local_path,
    mark_latest,
    merge_groups,
    optimizer_groups,
    optimizer_history,
    optimizer_tensors,
    same_outcome,
    save_checkpoint,
    write_file,
)
from lightning_ptdp.checkpoint.latest import latest_leaves
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.torch_distributed import is_communication_error
from lightning_ptdp.strategy.model_space import (
    MASTER,
    MODEL,
    Checkpoint,
    ModelSpace,
    PathLike,
    checked_tensor,
)

__all__ = ["ModelSpaceSaving"]

_PATIENCE = timedelta(minutes=1)
_SHOWN = 3


class ModelSpaceSaving(ModelSpace):
    """Mixin of the strategy: saves shards under global names, which any layout can read.

    Before ``setup`` the module is an ordinary one, and Lightning's single file is written.

    Attributes:
        ranks_failed: Whether the ranks that this process last forked or spawned ended with an
            exception.
        returns_weights: Whether the process that forks or spawns the ranks gets the trained
            weights.
        folder_callback: Class of a callback that needs checkpoint folders; "" if there is none.
        run_facts: Facts about the run for the metadata of its checkpoints, in JSON types.
    """

    _saver: BackgroundSaver | None = None
    _is_training: bool = False  # without training, no later call would wait for a background save
    ranks_failed = False
    returns_weights = True
    folder_callback = ""
    run_facts: Mapping[str, object] = MappingProxyType({})

    def lightning_module_state_dict(self) -> Checkpoint:
        """Return this rank's part of the model, for the hooks of ``on_save_checkpoint``.

        The other ranks hold the rest."""
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> Checkpoint:
        """Return hyperparameters of the groups, with the names of all ranks' parameters.

        The tensors are saved as shards."""
        if self._parallel is None or self.writes_file:
            return super().optimizer_state(optimizer)
        if self._alone("saving"):
            return {}
        inner = getattr(optimizer, "_optimizer", optimizer)
        with self.waiting_in("saving the optimizer's parameter groups"):
            with same_outcome("reading the optimizer's parameter groups"):
                groups = optimizer_groups(inner, self._optimizer_records()[0])
            history = {"history": optimizer_history(inner)} if keeps_history(inner) else {}
            return {"groups": merge_groups(gather(groups)), **history}

    def save_checkpoint(
        self, checkpoint: Checkpoint, filepath: PathLike, storage_options: object = None
    ) -> None:
        """Write a checkpoint; entered by all ranks.

        If saving is impossible after an exception, a warning is given instead.

        Raises:
            CheckpointError: It could not be written. An earlier checkpoint there is intact.
            TypeError: ``storage_options`` is given, which only Lightning's plugin accepts, for a
                URL.
        """
        if why := self._why_impossible():
            warnings.warn(f"the checkpoint {filepath} is not saved: {why}", stacklevel=2)
            return
        if self._parallel is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        elsewhere = self.writes_file and self._names.writes_elsewhere(self.checkpoint_io, filepath)
        if storage_options is not None and not elsewhere:
            raise TypeError(
                "storage_options is not supported, because every rank writes its part of a "
                "checkpoint to a folder of the shared file system"
            )
        doing = f"saving the checkpoint {filepath}"
        with self.waiting_in(doing):
            if not self.writes_file:
                self._save(checkpoint, filepath, doing)
                return
            alone = self._alone("saving")  # then the other ranks do not join, and are not needed
            with contextlib.nullcontext() if alone else same_outcome(doing):
                if elsewhere:
                    super().save_checkpoint(self._with_names(checkpoint), filepath, storage_options)
                elif self.global_rank == 0:
                    write_file(
                        self._with_names(checkpoint), Path(os.path.abspath(local_path(filepath)))
                    )

    @property
    def writes_file(self) -> bool:
        """Return True if checkpoints are Lightning's single files."""
        if self.config.checkpoint_format != "auto":
            return self.config.checkpoint_format == "file"
        return not (self.run_facts or self.folder_callback or self.why_no_file())

    def note_callbacks(self, callbacks: Iterable[object]) -> None:
        """Look for a callback whose attribute ``needs_checkpoint_folders`` is true."""
        found = (
            type(one).__name__
            for one in callbacks
            if getattr(one, "needs_checkpoint_folders", False)
        )
        self.folder_callback = next(found, "")

    def why_no_file(self) -> str:
        """Return the option that rules out a single file; "" if there is none.

        With such an option no rank holds everything that is saved, or saving does not wait."""
        if self.layout.divides_model:
            return f"{self.layout.describe()} cuts the model"
        if self.config.async_save:
            return "async_save=True writes folders"
        if self.config.shard_optimizer and self.layout.size("replica_sum") > 1:
            return "shard_optimizer=True cuts the optimizer's states"
        return (
            "master_weights=True keeps float32 copies of the parameters"
            if self._steps_on_copies
            else ""
        )

    def _with_names(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the names of the optimizers' parameters.

        Other layouts find their parameters by these names."""
        if "optimizer_states" not in checkpoint:
            return checkpoint
        return {**checkpoint, PARAMETER_NAMES: self._names_of_groups()}

    def _why_impossible(self) -> str:
        if not self.writes_file and self._alone("saving"):
            return (
                "the exception did not end all ranks at the same step, and each rank has only "
                "a part of the checkpoint"
            )
        if self.ranks_failed:
            return (
                "the ranks ended with an exception, and this process does not have their "
                "trained state"
            )
        return ""

    def _save(self, checkpoint: Checkpoint, filepath: PathLike, doing: str) -> None:
        state = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        with same_outcome(doing):
            model, unchanged = self._weights_to_save(checkpoint.get("state_dict", {}))
            names, placements = self._optimizer_records()
            masters = {
                managed.stepped: {MASTER: managed.stepped.detach()}
                for managed in self.parallel.parameters.values()
                if managed.stepped is not None and managed.rounded is not None
            }
            optimizers: dict[str, tuple[Tensor, Placement]] = {}
            for index, optimizer in enumerate(
                self.optimizers if "optimizer_states" in state else ()
            ):
                if keeps_history(optimizer):
                    continue
                optimizers |= optimizer_tensors(
                    optimizer, names=names, placements=placements, index=index, extra=masters
                )
        if self.ranks_hold_all:
            # The result of rank 0's hooks is saved, as in Lightning. Other ranks help to write
            # unchanged entries.
            agreed = from_rank_zero(lambda: unchanged)
            # buffers may differ between replicas
            equal = {managed.name for managed in self.parallel.parameters.values()}
            model = {
                name: model[name]
                for name in model
                if is_rank_zero() or name in agreed & unchanged & equal
            }
        tensors = {MODEL + name: entry for name, entry in model.items()} | optimizers
        metadata = {
            **self.run_facts,
            "layout": self.layout.describe(),
            "aliases": {
                alias: name for alias, name in self.parallel.aliases.items() if alias not in model
            },
            **{
                key: state[key]
                for key in ("epoch", "global_step")
                if isinstance(state.get(key), int)
            },
        }
        path = self.broadcast(local_path(filepath))
        target = Path(os.path.abspath(path))
        done = partial(mark_latest, target) if self.global_rank == 0 else _nothing
        if self.config.async_save and self._is_training:
            if self._saver is None:
                self._saver = BackgroundSaver(limit=self.config.timeout, keeper=self._keeper)
            self._saver.save(path, tensors=tensors, state=state, metadata=metadata, then=done)
        else:
            save_checkpoint(
                path, tensors=tensors, state=state, metadata=metadata, keeper=self._keeper
            )
            done()

    def _weights_to_save(
        self, state: Mapping[str, object]
    ) -> tuple[dict[str, tuple[Tensor, Placement]], set[str]]:
        """Return the model under its global names, and the names of unchanged entries.

        The hooks of ``on_save_checkpoint`` may have changed the other entries.

        Raises:
            CheckpointError: The hooks did more than leave out entries, but this rank holds only a
                part of the model.
        """
        changes = _changes(self.lightning_module.state_dict(), state)
        if not self.ranks_hold_all:
            removed = {name for name, what in changes.items() if what == "removed"}
            if others := {name: what for name, what in changes.items() if name not in removed}:
                raise CheckpointError(_cannot_change(others))
            return {**self._model_tensors(without=removed, to_write=True)}, set()
        kept = {name: checked_tensor(name, value) for name, value in state.items()}
        for alias, name in self.parallel.aliases.items():
            if (
                alias in kept
                and name in kept
                and (kept[alias] is kept[name] or torch.equal(kept[alias], kept[name]))
            ):
                del kept[alias]
        return {
            name: (v.detach(), Placement.replicated(tuple(v.shape))) for name, v in kept.items()
        }, kept.keys() - changes.keys()

    def finish_saving(self) -> None:
        """Wait for a background save.

        Raises:
            CheckpointError: It failed; the same on all ranks.
        """
        self._is_training = False
        if self._saver is not None:
            with self.waiting_in("the end of a background save"):
                self._saver.close()
            self._saver = None  # not earlier: after a Ctrl-C here, on_exception needs it

    def on_exception(self, exception: BaseException) -> None:
        """Wait for a background save, if it can end.

        After the loss of a rank it cannot, and the wait is limited. A second Ctrl-C abandons the
        save. An error of torch's communication from outside the strategy's own waits gets a note
        with the last action of each rank."""
        super().on_exception(exception)
        if self._run is not None:
            self._run.watchdog.annotate(exception)
        told_to_end = isinstance(exception, (KeyboardInterrupt, SystemExit)) and not isinstance(
            exception, StoppedNow
        )
        if told_to_end and self._run is not None:
            # ask now, because the answer is known at the end of the run
            self._run.interruption.is_of_this_rank_alone()
        saver, self._saver, self._is_training = self._saver, None, False
        if saver is None:
            return
        lost = isinstance(exception, (PeerError, CheckpointError)) or is_communication_error(
            exception
        )
        try:
            if isinstance(exception, StoppedNow):
                raise StoppedNow
            with breakable():
                saver.wait(min(self.config.timeout, _PATIENCE) if lost else self.config.timeout)
        except (CheckpointError, RuntimeError, KeyboardInterrupt) as error:
            why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else error
            warnings.warn(f"the background save did not end: {why}", stacklevel=2)
        finally:
            saver.give_up()

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove a checkpoint that is no longer among the best.

        It is removed only after the checkpoint that is being written is complete. A ``latest`` that
        pointed to it moves to the newest remaining checkpoint."""
        if self._saver is not None:
            self._saver.after(partial(self._remove_now, filepath))
        else:
            self._remove_now(filepath)

    def _remove_now(self, filepath: PathLike) -> None:
        if not os.path.isdir(os.fspath(filepath).removeprefix("file://")):
            super().remove_checkpoint(filepath)
            return
        path = Path(os.path.abspath(local_path(filepath)))
        if self.global_rank == 0:
            latest_leaves(path)
            files.discard(path)


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, str]:
    """Return the changes by entry name: "removed", "added" or "replaced".

    Some entries are created anew for every ``state_dict``. They are unchanged if their values are
    equal."""
    changes = {name: "removed" for name in before if name not in after}
    changes |= {name: "added" for name in after if name not in before}
    return changes | {
        name: "replaced"
        for name in before
        if name in after and not _same(before[name], after[name])
    }


def _same(one: object, other: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    layouts = [
        (value.data_ptr(), value.dtype, value.shape, value.stride()) for value in (one, other)
    ]
    return layouts[0] == layouts[1] or (
        layouts[0][1:3] == layouts[1][1:3] and torch.equal(one, other.to(one.device))
    )


def _cannot_change(changes: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name!r} was {what}" for name, what in sorted(changes.items())[:_SHOWN])
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return (
        'on_save_checkpoint of the module or of a callback changed checkpoint["state_dict"] '
        f"({shown}{more}), but no rank has the whole model under tensor or pipeline "
        "parallelism. Save additional content under a separate key, such as "
        'checkpoint["my_state"] (that of rank 0 is written), or use tensor_parallel_size=1 '
        "and pipeline_parallel_size=1"
    )


def _nothing() -> None:
    """Do nothing. Ranks other than 0 call it when a checkpoint is complete."""
