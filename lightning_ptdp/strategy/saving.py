"""The strategy's part in Lightning's checkpoints: model space in, model space out."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp._lightning import LightningNames
from lightning_ptdp.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    Placed,
    choose_checkpoint,
    load_optimizer,
    load_tensors,
    mark_latest,
    merge_groups,
    optimizer_groups,
    optimizer_tensors,
    read_state,
    same_outcome,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.agreement import gather
from lightning_ptdp.checkpoint.latest import latest_leaves
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data_parallel import Stepped
from lightning_ptdp.engine import Engine
from lightning_ptdp.engine.gradients import sharding_of
from lightning_ptdp.parallelize import ParallelModel
from lightning_ptdp.strategy.collectives import WorldCollectives
from lightning_ptdp.tensor_parallel import Sharding, iterate_pieces, slice_full

__all__ = ["ModelSpaceSaving"]

_MODEL = "model/"
_MASTER = "master"  # the name of a float32 copy among the optimizer's states
_PATIENCE = timedelta(minutes=1)


class ModelSpaceSaving(WorldCollectives):
    """Mixin of the strategy: saves and loads shards under global names, so that any layout reads what any other wrote.

    Before ``setup`` there is nothing but an ordinary module, and Lightning's single file is written and read.
    """

    _names: LightningNames
    config: PTDPConfig
    parallel: ParallelModel | None
    _engine: Engine | None
    _loading: Path | None = None
    _saver: BackgroundSaver | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model; the rest is on the other ranks."""
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Hyperparameters of the groups with the names of all ranks' parameters; the tensors are saved as shards."""
        if self.parallel is None:
            return super().optimizer_state(optimizer)
        inner = getattr(optimizer, "_optimizer", optimizer)
        with self.waiting_in("saving the optimizer's parameter groups"):
            with same_outcome("reading the optimizer's parameter groups"):
                groups = optimizer_groups(inner, self._optimizer_records()[0])
            return {"groups": merge_groups(gather(groups))}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint folder; entered by all ranks.

        Raises:
            CheckpointError: It could not be written; what was there before is whole.
            TypeError: ``storage_options`` is given, which DCP does not take.
        """
        if self.parallel is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options is not supported: checkpoints are written by torch.distributed.checkpoint")
        doing = f"saving the checkpoint {filepath}"
        with self.waiting_in(doing):
            self._save(checkpoint, filepath, doing)

    def _save(self, checkpoint: dict[str, Any], filepath: Any, doing: str) -> None:
        assert self.parallel is not None
        state = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        with same_outcome(doing):
            tensors: dict[str, tuple[Tensor, Placed]] = {_MODEL + name: entry for name, entry in self._model_tensors().items()}
            names, shardings = self._optimizer_records()
            for index, optimizer in enumerate(self.optimizers if "optimizer_states" in state else ()):
                masters = {entry.value: {_MASTER: entry.value.detach()} for entry in self._stepped() if entry.target is not None}
                tensors |= optimizer_tensors(optimizer, names=names, shardings=shardings, index=index, extra=masters)
        metadata = {
            "layout": self.layout.describe(),
            "aliases": dict(self.parallel.aliases),
            **{key: state[key] for key in ("epoch", "global_step") if isinstance(state.get(key), int)},
        }
        path = self.broadcast(str(filepath))
        target = Path(os.path.abspath(path))
        done = partial(mark_latest, target) if self.global_rank == 0 else _nothing
        if self.config.async_save:
            if self._saver is None:
                self._saver = BackgroundSaver(limit=self.config.timeout)
            self._saver.save(path, tensors=tensors, state=state, metadata=metadata, then=done)
        else:
            save_checkpoint(path, tensors=tensors, state=state, metadata=metadata)
            done()

    def finish_saving(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed; the same on all ranks.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            with self.waiting_in("the end of a save in the background"):
                saver.close()

    def on_exception(self, exception: BaseException) -> None:
        """Let a save in the background end, if it can: a dead rank would never let it. An error of torch's communication from outside
        the strategy's own waits gets a note of what each rank did last."""
        super().on_exception(exception)
        if self._watchdog is not None:
            self._watchdog.annotate(exception)
        saver, self._saver = self._saver, None
        if saver is not None:
            try:
                saver.wait(min(self.config.timeout, _PATIENCE))
            except (CheckpointError, RuntimeError) as error:
                warnings.warn(f"the save in the background did not end: {error}", stacklevel=2)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint that is no longer among the best, but not before the one that is being written is complete; a ``latest``
        that pointed to it moves to the newest that is left."""
        if self._saver is not None:
            self._saver.after(partial(self._remove_now, filepath))
        else:
            self._remove_now(filepath)

    def _remove_now(self, filepath: Any) -> None:
        if self.global_rank == 0:
            latest_leaves(Path(os.path.abspath(filepath)))
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what is not a tensor; the model and the optimizer follow in their own calls.

        A damaged checkpoint is not continued from: with ``on_damage="previous"`` the newest whole one before it is, with a warning.
        Evaluation is refused, since it would be that of other weights.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged; the same on all ranks.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        if path.is_file():
            self._loading = None
            return super().load_checkpoint(path, weights_only=weights_only)
        fitting = self.lightning_module.trainer.state.fn == self._names.TrainerFn.FITTING
        with self.waiting_in(f"verifying the checkpoint {path}"):
            path = choose_checkpoint(path, on_damage=self.config.on_damage if fitting else "refuse", verify=self._verify)
        state = read_state(path)
        if fitting and "optimizer_states" not in state:
            raise CheckpointError(
                f"{path} holds weights and no state of training, which cannot be continued: start a new training from it with "
                "InitFrom(path) among the Trainer's callbacks (ptdp fit --init_from)"
            )
        self._loading = path
        return {**state, "state_dict": {}}

    def _verify(self, path: Path) -> None:
        """Every rank reads a share."""
        with same_outcome(f"verifying the checkpoint {path}"):
            verify_checkpoint(path, part=self.global_rank, parts=self.layout.world_size)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill this rank's part, from a checkpoint folder or from the whole state of a single file."""
        if self.parallel is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif self._loading is not None:
            tensors = {_MODEL + name: entry for name, entry in self._model_tensors().items()}
            with self.waiting_in(f"loading the model from {self._loading}"):
                load_tensors(self._loading, tensors, strict=strict, prefix=_MODEL if strict else None)
        else:
            self._load_whole(checkpoint["state_dict"], strict=strict)
        self._parameters_set()

    def load_weights(self, path: Any, *, strict: bool = True, rename: Mapping[str, str] | None = None) -> list[str]:
        """Fill this rank's part of the model from a checkpoint of any layout, and nothing else; collective, after ``setup``.

        Args:
            path: A checkpoint folder.
            strict: Whether names that only one side has are an error; otherwise what the checkpoint lacks keeps its values.
            rename: What names of the model are called in the checkpoint (``{"model.": "net."}``); a key that ends with a dot stands for
                all names that begin with it.

        Returns:
            This rank's names that the checkpoint lacks.

        Raises:
            CheckpointError: On all ranks: it is damaged or does not fit; names and shapes are told.
        """
        tensors = {_MODEL + name: entry for name, entry in self._model_tensors().items()}
        found = {_MODEL + ours: _MODEL + theirs for ours, theirs in (rename or {}).items()}
        path = self.broadcast(str(path))
        with self.waiting_in(f"loading weights from {path}"):
            missing = load_tensors(path, tensors, strict=strict, prefix=_MODEL if strict and not rename else None, rename=found)
        self._parameters_set()
        return [name.removeprefix(_MODEL) for name in missing]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill this rank's part of the optimizer, by parameter name.

        Raises:
            ValueError: The checkpoint is a single file of another strategy, whose optimizer states have no names.
        """
        if self.parallel is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        if self._loading is None:
            self._load_indexed_optimizer(checkpoint)
            return
        names, shardings = self._optimizer_records()
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            with self.waiting_in(f"loading optimizer {index} from {self._loading}"):
                load_optimizer(self._loading, optimizer, names=names, shardings=shardings, groups=saved["groups"], index=index)
                self._take_masters(optimizer)

    def _optimizer_records(self) -> tuple[dict[nn.Parameter, str], dict[str, Placed]]:
        """Names of the optimizer's tensors, and by name how they sit in the full parameters."""
        assert self.parallel is not None
        names, shardings = dict(self.parallel.names), dict[str, Placed](self.parallel.shardings)
        for stepped in self._stepped():
            name = names[stepped.value] = self.parallel.records[stepped.parameter].name
            shardings[name] = sharding_of(stepped, self.parallel)
        return names, shardings

    def _take_masters(self, optimizer: Any) -> None:
        """Give masters that were loaded as states to what the optimizer steps on here, a parameter in float32 included."""
        with torch.no_grad():
            for value, state in list(optimizer.state.items()):
                if _MASTER in state:
                    value.copy_(state.pop(_MASTER))
                    if not state:
                        del optimizer.state[value]
        if self._engine is not None and self._engine.gradients.stepped is not None:
            self._engine.gradients.stepped.publish()

    def _parameters_set(self) -> None:
        """The parameters have new values, which masters have to take."""
        if self._engine is not None and self._engine.gradients.stepped is not None:
            self._engine.gradients.stepped.reload()

    def _stepped(self) -> list[Stepped]:
        stepped = self._engine.gradients.stepped if self._engine is not None else None
        return stepped.entries if stepped is not None else []

    def gather_state_dict(self) -> dict[str, Tensor]:
        """The whole, uncut model's state on the CPU of every rank; collective over the world, for models that fit."""
        with self.waiting_in("gathering the whole model"):
            local = {name: (tensor.cpu(), sharding) for name, (tensor, sharding) in self._model_tensors().items()}
            ranks = gather(local)
        whole: dict[str, Tensor] = {}
        for part in ranks:
            for name, (tensor, sharding) in part.items():
                full = whole.setdefault(name, torch.empty(sharding.full_shape, dtype=tensor.dtype))
                for here, there in iterate_pieces(sharding):
                    full[there] = tensor[here]
        assert self.parallel is not None
        return {**whole, **{alias: whole[name] for alias, name in self.parallel.aliases.items()}}

    @contextlib.contextmanager
    def whole_state_dict(self, module: Any) -> Iterator[None]:
        """While in the context, ``module.state_dict()`` is the whole, uncut model's (collective; used to bring the trained weights
        back to the process that started the ranks)."""
        if self._engine is not None:
            self._engine.gradients.parameters_needed()
        if self.parallel is None or self.layout.model_parallel_size == 1:
            yield
            return
        whole = self.gather_state_dict()
        module.__dict__["state_dict"] = lambda *_, **__: whole
        try:
            yield
        finally:
            module.__dict__.pop("state_dict", None)

    def _model_tensors(self) -> dict[str, tuple[Tensor, Sharding]]:
        """Local parameters and persistent buffers under their global names."""
        assert self.parallel is not None
        found: dict[str, tuple[Tensor, Sharding]] = {}
        if self._engine is not None:
            self._engine.gradients.parameters_needed()
        for key, value in self.lightning_module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the state_dict entry '{key}' is a {type(value).__name__}; only tensors are saved by layout. Keep it in "
                    "on_save_checkpoint and on_load_checkpoint instead"
                )
            record = self.parallel.records.get(value) if isinstance(value, nn.Parameter) else None
            if record is not None:
                found[record.name] = (value.detach(), record.sharding)
            else:
                found[key] = (value, Sharding.replicated(tuple(value.shape)))
        return found

    def _load_whole(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        assert self.parallel is not None
        local = self._model_tensors()
        missing = [name for name in local if name not in state]
        if missing and strict:
            raise ValueError(f"the checkpoint has no {missing[:3]}; it holds {len(state)} tensors such as {list(state)[:3]}")
        with torch.no_grad():
            for name, (tensor, sharding) in local.items():
                if name in state:
                    if tuple(state[name].shape) != sharding.full_shape:
                        raise ValueError(
                            f"'{name}' has shape {tuple(state[name].shape)} in the checkpoint, {sharding.full_shape} here"
                        )
                    tensor.copy_(slice_full(state[name], sharding))

    def _load_indexed_optimizer(self, checkpoint: Mapping[str, Any]) -> None:
        if self.layout.model_parallel_size > 1:
            raise ValueError(
                "this checkpoint was written by a strategy that stores optimizer states by index, which tensor and pipeline parallel "
                "ranks cannot place. Load only its weights (module.load_state_dict(torch.load(path)['state_dict']) before fit), or "
                "resume it under PTDPStrategy() without model parallelism and save it once"
            )
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def _nothing() -> None:
    """What the other ranks do when a checkpoint is complete."""
