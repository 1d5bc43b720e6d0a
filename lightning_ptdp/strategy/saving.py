"""Saving of checkpoints: writes Lightning's checkpoint in model space."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.errors import listed
from lightning_ptdp.base.signals import StoppedNow, breakable
from lightning_ptdp.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    SaveFolders,
    files,
    keeps_history,
    mark_latest,
    merge_groups,
    optimizer_groups,
    optimizer_history,
    optimizer_tensors,
    same_outcome,
    save_checkpoint,
)
from lightning_ptdp.checkpoint.latest import latest_leaves
from lightning_ptdp.checkpoint.optimizer import MASTER
from lightning_ptdp.checkpoint.save_agreement import from_rank_zero, gather, is_rank_zero
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.pipeline.p2p import PeerError
from lightning_ptdp.shims.lightning import StrategyBase
from lightning_ptdp.shims.torch_distributed import is_communication_error
from lightning_ptdp.strategy.model_space import (
    MODEL,
    Checkpoint,
    ModelSpace,
    NamedTensors,
    PathLike,
    checked_tensor,
)

_PATIENCE = timedelta(minutes=1)
# A save that still needs the lost rank cannot end, and any other has only its index left to write.
# The limit is short because one rank may wait for the end of another.
_AFTER_LOSS = timedelta(seconds=0.2)
_SHOWN = 3


def optimizer_state(space: ModelSpace, optimizer: Optimizer) -> Checkpoint:
    """Return hyperparameters of the groups, with the names of all ranks' parameters; collective.

    The tensors are saved as shards."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    with space.waiting_in("saving the optimizer's parameter groups"):
        with same_outcome("reading the optimizer's parameter groups"):
            groups = optimizer_groups(inner, space.optimizer_records()[0])
        history = {"history": optimizer_history(inner)} if keeps_history(inner) else {}
        return {"groups": merge_groups(gather(groups)), **history}


class FolderSaves:
    """Saves of one run: shards under global names, which any layout can read.

    Attributes:
        folders: Record of the checkpoint folders of this run.
        in_background: Whether saves may run during training. Without training, no later call would
            wait for them.
        group: gloo group of the ranks that write a checkpoint together in the background; None: all
            ranks.
    """

    def __init__(
        self, *, folders: SaveFolders | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.folders = folders or SaveFolders()
        self.group = group
        self.in_background = False
        self._saver: BackgroundSaver | None = None

    def save(
        self,
        strategy: StrategyBase,
        checkpoint: Checkpoint,
        path: str,
        *,
        done: Callable[[], object] | None = None,
    ) -> None:
        """Write a checkpoint folder; collective over all ranks.

        Args:
            strategy: The strategy, with the model and the facts about the run.
            checkpoint: Lightning's checkpoint, with this rank's weights.
            path: The folder; rank 0's counts.
            done: Called on the group's rank 0 when the checkpoint is complete; default: ``latest``
                leads to it.

        Raises:
            CheckpointError: It could not be written. An earlier checkpoint there is intact.
        """
        space: ModelSpace = strategy.model_space
        state = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        with same_outcome(f"saving the checkpoint {path}"):
            model, unchanged = _weights_to_save(space, checkpoint.get("state_dict", {}))
            optimizers = _optimizer_tensors(space) if "optimizer_states" in state else {}
        target = from_rank_zero(lambda: path)
        writes_rest = is_rank_zero(self.group)
        if space.ranks_hold_all:
            # The state dict that rank 0's hooks leave is saved, as in Lightning. The other ranks
            # help to write the entries that the hooks did not change.
            rank0_unchanged = from_rank_zero(lambda: unchanged)
            # buffers may differ between replicas
            equal = {managed.name for managed in space.part.parameters.values()}
            model = {
                name: model[name]
                for name in model
                if writes_rest or name in rank0_unchanged & unchanged & equal
            }
        tensors = {MODEL + name: entry for name, entry in model.items()} | optimizers
        aliases = space.part.aliases.items()
        metadata = {
            **strategy.run_facts,
            "layout": space.layout.describe(),
            "aliases": {alias: name for alias, name in aliases if alias not in model},
            **{
                key: state[key]
                for key in ("epoch", "global_step")
                if isinstance(state.get(key), int)
            },
        }
        done = done or (lambda: mark_latest(files.absolute(target)))
        if not writes_rest:
            done = _nothing
        if self.in_background:
            if self._saver is None:
                self._saver = BackgroundSaver(
                    limit=strategy.config.timeout, folders=self.folders, group=self.group
                )
            self._saver.save(target, tensors=tensors, state=state, metadata=metadata, then=done)
        else:
            save_checkpoint(
                target, tensors=tensors, state=state, metadata=metadata, folders=self.folders
            )
            done()

    def finish(self, waiting_in: Callable[[str], Context]) -> None:
        """Wait for a background save, if there is one, in the context that ``waiting_in`` returns.

        Raises:
            CheckpointError: It failed; the same on all ranks.
        """
        self.in_background = False
        if self._saver is not None:
            with waiting_in("the end of a background save"):
                self._saver.close()
            self._saver = None  # not earlier: after a Ctrl-C here, ``end`` needs it

    def end(self, exception: BaseException, limit: timedelta) -> None:
        """Wait for a background save after an exception, if it can end.

        After the loss of a rank it cannot, and the wait is limited. A second Ctrl-C abandons the
        save."""
        saver = self._saver
        self._saver = None
        self.in_background = False
        if saver is None:
            return
        patience = limit
        if isinstance(exception, PeerError) or is_communication_error(exception):
            patience = min(limit, _AFTER_LOSS)
        elif isinstance(exception, CheckpointError):
            patience = min(limit, _PATIENCE)
        try:
            if isinstance(exception, StoppedNow):
                raise StoppedNow
            with breakable():
                saver.wait(patience)
        except (CheckpointError, RuntimeError, KeyboardInterrupt) as error:
            reason = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else error
            warnings.warn(f"the background save did not end: {reason}", stacklevel=2)
        finally:
            saver.give_up()

    def remove(self, path: PathLike, *, remove_file: Callable[[PathLike], None]) -> None:
        """Remove a checkpoint that is no longer among the best.

        It is removed only after the checkpoint that is being written is complete. A ``latest`` that
        pointed to it moves to the newest remaining checkpoint. ``remove_file`` removes what is not
        a folder."""
        remove = partial(_remove, path, remove_file)
        if self._saver is not None:
            self._saver.after(remove)
        else:
            remove()


def _remove(path: PathLike, remove_file: Callable[[PathLike], None]) -> None:
    folder = files.absolute(path)
    if not folder.is_dir():
        remove_file(path)
    elif is_rank_zero():
        latest_leaves(folder)
        files.discard(folder)


def _optimizer_tensors(space: ModelSpace) -> NamedTensors:
    """Return the states of the optimizers, and the masters of rounded parameters among them."""
    names, placements = space.optimizer_records()
    masters = {}
    for managed in space.part.parameters.values():
        stepped = managed.stepped
        rounded = managed.rounded
        if stepped is not None and rounded is not None and stepped.dtype != rounded.dtype:
            masters[stepped] = {MASTER: stepped.detach()}
    tensors: NamedTensors = {}
    for index, optimizer in enumerate(space.optimizers):
        if not keeps_history(optimizer):
            tensors |= optimizer_tensors(
                optimizer, names=names, placements=placements, index=index, extra=masters
            )
    return tensors


def _weights_to_save(
    space: ModelSpace, state: Mapping[str, object]
) -> tuple[NamedTensors, set[str]]:
    """Return the model under its global names, and the names of unchanged entries.

    The hooks of ``on_save_checkpoint`` may have changed the other entries.

    Raises:
        CheckpointError: The hooks did more than leave out entries, but this rank holds only a part
            of the model.
    """
    changes = _changes(space.module.state_dict(), state)
    if not space.ranks_hold_all:
        removed = {name for name, change in changes.items() if change == "removed"}
        if unsupported := {name: change for name, change in changes.items() if name not in removed}:
            raise CheckpointError(_cannot_change(unsupported))
        return space.tensors(without=removed, to_write=True), set()
    weights = {name: checked_tensor(name, value) for name, value in state.items()}
    for alias, name in space.part.aliases.items():
        if alias in weights and name in weights and _same(weights[alias], weights[name]):
            del weights[alias]
    return {
        name: (v.detach(), Placement.replicated(tuple(v.shape))) for name, v in weights.items()
    }, weights.keys() - changes.keys()


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


def _same(before: object, after: object) -> bool:
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return before is after
    layouts = [
        (value.data_ptr(), value.dtype, value.shape, value.stride()) for value in (before, after)
    ]
    return layouts[0] == layouts[1] or (
        layouts[0][1:3] == layouts[1][1:3] and torch.equal(before, after.to(before.device))
    )


def _cannot_change(changes: Mapping[str, str]) -> str:
    described = [f"{name!r} was {change}" for name, change in sorted(changes.items())]
    return (
        'on_save_checkpoint of the module or of a callback changed checkpoint["state_dict"] '
        f"({listed(described, _SHOWN)}), but no rank has the whole model under tensor or pipeline "
        "parallelism. Save additional content under a separate key, such as "
        'checkpoint["my_state"] (that of rank 0 is written), or use tensor_parallel_size=1 '
        "and pipeline_parallel_size=1"
    )


def _nothing() -> None:
    """Do nothing. Ranks other than 0 call it when a checkpoint is complete."""
