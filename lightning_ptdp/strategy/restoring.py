"""Loading of checkpoints: reads model space, fills this rank's part."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.checkpoint import (
    PARAMETER_NAMES,
    CheckpointError,
    InMemory,
    Stored,
    StoredOptimizers,
    StoredWeights,
    TensorReader,
    choose_checkpoint,
    files,
    keeps_history,
    load_history,
    load_indexed_optimizer,
    load_optimizer,
    load_tensors,
    local_path,
    read_state,
    same_outcome,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.latest import is_folder_of_checkpoints
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.checkpoint.torch_file import load_saved
from lightning_ptdp.exchange import (
    HuggingFaceNames,
    HuggingFaceWeights,
    reads_as_huggingface,
    weights_opener,
)
from lightning_ptdp.models.pretrained_folder import ADAPTER_NAMES
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.shims.lightning import fits
from lightning_ptdp.shims.peft import set_magnitudes
from lightning_ptdp.strategy.model_space import MASTER, MODEL, Checkpoint, ModelSpace, PathLike

__all__ = ["ModelSpaceRestoring"]


class ModelSpaceRestoring(ModelSpace):
    """Mixin of the strategy: loads checkpoints of any layout, and Lightning's single files.

    If every rank holds the whole model, loading happens before ``setup``, as in Lightning's own
    strategies. Otherwise it happens after ``setup``, when this rank's part of the model exists."""

    _awaiting_values: tuple[Checkpoint, bool] | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True if Lightning restores the checkpoint after ``setup``.

        The model and the callbacks are then restored after this rank's part of the model has been
        cut out."""
        return not self.ranks_hold_all

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> Checkpoint:
        """Read the parts of a checkpoint that are not tensors.

        ``"state_dict"`` is the whole model's; its tensors are read on access. Training does not
        resume from a damaged checkpoint. With ``on_damage="previous"`` it resumes from the newest
        earlier checkpoint that is complete, with a warning. Evaluation of a damaged checkpoint is
        refused, because earlier checkpoints have other weights.

        Raises:
            CheckpointError: It is damaged; the same on all ranks. A MissingCheckpointError, also a
                FileNotFoundError: There is none.
        """
        if self._names.writes_elsewhere(self.checkpoint_io, checkpoint_path) and not os.path.isdir(
            checkpoint_path
        ):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        path = Path(self.broadcast(local_path(checkpoint_path)))
        trainer = getattr(self.lightning_module, "_trainer", None)
        resuming = (
            trainer is not None and fits(trainer) and str(trainer.ckpt_path) == str(checkpoint_path)
        )
        if path.is_file():
            found = super().load_checkpoint(path, weights_only=weights_only)
            _check_trained(found, path, resuming)
            return found
        if resuming:
            path = self._settled(path)
        with self.waiting_in(f"verifying the checkpoint {path}"):
            path = choose_checkpoint(
                path, on_damage=self.config.on_damage if resuming else "refuse", verify=self._verify
            )
        if resuming and self.global_rank == 0:
            self._keeper.go_on_from(path)
        state = read_state(path)
        _check_trained(state, path, resuming)
        if "optimizer_states" in state:
            state["optimizer_states"] = StoredOptimizers(state["optimizer_states"], path)
        return {**state, "state_dict": StoredWeights(path)}

    def _settled(self, path: Path) -> Path:
        """Finish or remove incomplete saves beside the checkpoint, and return its new name."""
        doing = f"completing interrupted saves beside {path}"
        with self.waiting_in(doing), same_outcome(doing):
            if self.global_rank == 0:
                self._keeper.tidy(path if is_folder_of_checkpoints(path) else path.parent)
        return files.settled(path)

    def _verify(self, path: Path) -> None:
        """Verify a checkpoint, of which every rank reads a share."""
        with same_outcome(f"verifying the checkpoint {path}"):
            verify_checkpoint(path, part=self.global_rank, parts=self.layout.world_size)

    def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
        """Fill this rank's part from the whole model's state.

        The hooks of ``on_load_checkpoint`` may have changed that state."""
        if not self._is_cut_here and awaits_values(self.lightning_module):
            self._awaiting_values = (checkpoint, strict)
            return
        state = checkpoint["state_dict"]
        if self.ranks_hold_all:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif self._names.is_overridden("load_state_dict", self.lightning_module):
            raise CheckpointError(
                f"{type(self.lightning_module).__name__}.load_state_dict is overridden, but no "
                "rank has the whole model, which it would receive. Change "
                "checkpoint['state_dict'] in on_load_checkpoint instead"
            )
        else:
            stored = isinstance(state, StoredWeights)
            with self.waiting_in(
                f"loading the model from {state.path}" if stored else "loading the model"
            ):
                # If the hooks of any rank have accessed whole tensors, cut this rank's part out of
                # these.
                if any(gather(not stored or state.touched)):
                    self._load_whole(state, strict=strict)
                else:
                    self._fill(state.path, strict=strict)
        self._parameters_set()

    def _set_extra_states(self, loaded: Mapping[str, Tensor]) -> None:
        """Pass the loaded extra states to ``set_extra_state`` of their modules.

        Filling the tensors that ``get_extra_state`` returned is not enough, because they may be
        copies."""
        for name, module in self.lightning_module.named_modules():
            key = f"{name}." * bool(name) + "_extra_state"
            if key in loaded:
                module.set_extra_state(loaded[key])

    def load_awaited_values(self) -> None:
        """Load the checkpoint that was restored before a meta-device module had values."""
        awaited, self._awaiting_values = self._awaiting_values, None
        # Otherwise it remains from a run that failed.
        if awaited is not None and self.lightning_module.trainer.ckpt_path is not None:
            self.load_model_state_dict(*awaited)

    def _load_whole(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Cut this rank's part out of whole tensors; collective."""
        with same_outcome("loading the model"):
            local = self._model_tensors()
            missing = [name for name in local if name not in state]
            if missing and strict:
                raise CheckpointError(
                    f"the checkpoint has no {missing[:3]}; it has {len(state)} tensors such as "
                    f"{list(state)[:3]}"
                )
            for name, (tensor, placement) in local.items():
                if name not in state:
                    continue
                if tuple(state[name].shape) != placement.full_shape:
                    raise CheckpointError(
                        f"'{name}' has shape {tuple(state[name].shape)} in the checkpoint, but "
                        f"{placement.full_shape} in the model"
                    )
                tensor.copy_(slice_full(state[name], placement))
            self._set_extra_states({name: tensor for name, (tensor, _) in local.items()})
        known = set().union(*gather(set(local))) | self.parallel.aliases.keys()
        if strict and (unexpected := sorted(state.keys() - known)):
            raise CheckpointError(
                f"the checkpoint has {unexpected[:3]}, which the model does not have"
            )

    def load_weights(
        self, path: PathLike, *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> list[str]:
        """Fill this rank's part of the model from a checkpoint of any layout.

        Nothing else is loaded. Collective, after ``setup``.

        Args:
            path: A checkpoint folder, or a Hugging Face folder (config.json and safetensors) for a
                module that wraps the model.
            strict: Whether names that only one side has are an error; otherwise parameters that the
                checkpoint lacks keep their values.
            rename: Maps names of the model to names in the checkpoint (``{"model.": "net."}``); a
                key that ends with a dot applies to all names that begin with it.

        Returns:
            This rank's names that the checkpoint lacks.

        Raises:
            CheckpointError: On all ranks: the checkpoint is damaged or does not fit. Names the
                entries and shapes.
        """
        path = self.broadcast(local_path(path))
        with self.waiting_in(f"loading weights from {path}"):
            missing = self._fill(path, strict=strict, rename=rename)
        if reads_as_huggingface(path):
            set_magnitudes(self.lightning_module)
        self._parameters_set()
        return missing

    def load_initial_weights(self, weights: HuggingFaceWeights) -> None:
        """Load the values of ``initial_weights()`` into a module that was built without values.

        Nothing is loaded if a checkpoint has all of the values."""
        module = self.lightning_module
        if module.trainer.ckpt_path is None or not module.strict_loading:
            with self.waiting_in("loading the initial weights"):
                tensors = {MODEL + name: entry for name, entry in self._model_tensors().items()}
                load_tensors(
                    "the initial weights", tensors, strict=False, open_stored=lambda _: weights
                )

    def _fill(
        self, path: PathLike, *, strict: bool, rename: Mapping[str, str] | None = None
    ) -> list[str]:
        """Load weights like ``load_weights``, without updating the optimizer's masters."""
        tensors = {MODEL + name: entry for name, entry in self._model_tensors().items()}
        if reads_as_huggingface(path) and not rename:  # a Hugging Face folder contains no adapters
            tensors = {
                name: entry
                for name, entry in tensors.items()
                if not any(fnmatchcase(name, one) for one in ADAPTER_NAMES)
            }
        found = {MODEL + ours: MODEL + theirs for ours, theirs in (rename or {}).items()}
        only = MODEL if strict and not rename else None
        missing = load_tensors(
            path,
            tensors,
            strict=strict,
            prefix=only,
            rename=found,
            open_stored=self._opener(path, rename),
        )
        self._set_extra_states(
            {
                name.removeprefix(MODEL): tensor
                for name, (tensor, _) in tensors.items()
                if name not in missing
            }
        )
        return [name.removeprefix(MODEL) for name in missing]

    def _opener(self, path: PathLike, rename: Mapping[str, str] | None) -> Callable[..., Stored]:
        if Path(path).is_file():
            return partial(_open_file, tied=() if rename else self.parallel.aliases)
        if not reads_as_huggingface(path):
            return TensorReader
        if rename:
            return partial(HuggingFaceWeights.open, names=HuggingFaceNames(aliases={}))
        return weights_opener(self.lightning_module, self.parallel.aliases, self.parallel.names)

    def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
        """Fill this rank's part of the optimizer, by parameter name.

        Raises:
            ValueError: The checkpoint is a single file of another strategy, whose parameters are
                not named.
        """
        states = checkpoint["optimizer_states"]
        if not isinstance(states, StoredOptimizers):
            self._load_indexed_optimizers(states, checkpoint.get(PARAMETER_NAMES))
            return
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"{states.path} has {len(states)} optimizers, but the module has "
                f"{len(self.optimizers)}"
            )
        names, placements = self._optimizer_records()
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, states, strict=True)):
            with self.waiting_in(f"loading optimizer {index} from {states.path}"):
                load_optimizer(
                    states.path,
                    optimizer,
                    names=names,
                    placements=placements,
                    groups=saved.get("groups", []),
                    index=index,
                )
                load_history(optimizer, saved)
                self._take_masters(optimizer)

    def _take_masters(self, optimizer: Optimizer) -> None:
        """Copy masters that were loaded as states to the values that the optimizer steps on.

        These values may be a parameter in float32."""
        with torch.no_grad():
            for value, state in list(optimizer.state.items()):
                if MASTER in state:
                    value.copy_(state.pop(MASTER))
                    if not state:
                        del optimizer.state[value]
        if self._engine is not None and self._engine.gradients.stepped is not None:
            self._engine.gradients.stepped.publish()

    def _parameters_set(self) -> None:
        """Update the masters after the parameters have new values."""
        if self._engine is not None and self._engine.gradients.stepped is not None:
            self._engine.gradients.stepped.reload()

    def _load_indexed_optimizers(
        self, states: list[Checkpoint], of_groups: list[list[list[str]]] | None
    ) -> None:
        """Fill the optimizers from Lightning's single file, whose states are keyed by position."""
        if of_groups is None and self.layout.divides_model:
            raise ValueError(
                "this checkpoint was written by a strategy that stores optimizer states by index, "
                "which tensor and pipeline parallel ranks cannot assign to their parameters. Load "
                "only its weights (module.load_state_dict(torch.load(path)['state_dict']) before "
                "fit), or resume it once under PTDPStrategy() without model parallelism and save"
            )
        names, placements = self._optimizer_records()
        for index, (optimizer, state) in enumerate(
            zip(self.optimizers, states, strict=bool(states))
        ):
            if not self.layout.divides_model and not self._steps_on_copies:
                optimizer.load_state_dict(state)
                continue
            if keeps_history(optimizer):
                raise CheckpointError(
                    f"the states of {type(optimizer).__name__} are in one file, which cannot "
                    "be resumed with parameters that are cut"
                )
            of_groups = self._named_groups if of_groups is None else of_groups
            with self.waiting_in(f"loading optimizer {index}"):
                load_indexed_optimizer(
                    state, optimizer, names=names, placements=placements, of_groups=of_groups[index]
                )
                self._take_masters(optimizer)


def _check_trained(state: Mapping[str, object], path: Path, resuming: bool) -> None:
    if resuming and "optimizer_states" not in state:
        raise CheckpointError(
            f"{path} has weights but no training state, so it cannot be resumed. Start a new "
            "training from it with InitFrom(path) among the Trainer's callbacks (ptdp fit "
            "--init_from)"
        )


def _open_file(path: PathLike, *, tied: Collection[str]) -> InMemory:
    """Read the weights of Lightning's single file, without the names ``tied``.

    Each tied name is a further name of a parameter.

    Raises:
        CheckpointError: The file has no weights, or holds objects that cannot be read without
            trusting it.
    """
    content = load_saved(Path(path))
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} cannot be read: it has no 'state_dict'")
    values = {
        name: value
        for name, value in content["state_dict"].items()
        if isinstance(value, Tensor) and name not in tied
    }
    return InMemory.whole({MODEL + name: value for name, value in values.items()})
