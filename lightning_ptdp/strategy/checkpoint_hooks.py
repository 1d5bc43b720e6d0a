"""Hooks of the strategy through which Lightning saves and loads checkpoints."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.signals import StoppedNow
from lightning_ptdp.checkpoint import (
    PARAMETER_NAMES,
    CheckpointError,
    StoredWeights,
    local_path,
    same_outcome,
    write_file,
)
from lightning_ptdp.checkpoint.files import absolute
from lightning_ptdp.checkpoint.local_copies import readable
from lightning_ptdp.checkpoint.remote_path import located
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.exchange import SHARD_BYTES, reads_as_huggingface
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.shims.lightning import fits, set_restored_path
from lightning_ptdp.shims.peft import set_magnitudes
from lightning_ptdp.shims.quantization import quantized_parameters
from lightning_ptdp.strategy.exporting import export_model
from lightning_ptdp.strategy.model_space import Checkpoint, GroupNames, ModelSpace, PathLike
from lightning_ptdp.strategy.precision import replacing
from lightning_ptdp.strategy.restoring import (
    check_trained,
    fill_from_state,
    fill_part,
    load_optimizers,
    needs_initial_values,
    read_checkpoint,
)
from lightning_ptdp.strategy.saving import FolderSaves, optimizer_state
from lightning_ptdp.strategy.snapshots import Snapshots
from lightning_ptdp.strategy.world import World


class CheckpointHooks(World):
    """Layer of the strategy: checkpoints, which any layout can read, and exports.

    Before ``setup`` the module is an ordinary one, and Lightning's single file is written. If every
    rank holds the whole model, loading happens before ``setup``, as in Lightning's own strategies.
    Otherwise it happens after ``setup``, when this rank's part of the model exists.

    Attributes:
        ranks_failed: Whether the ranks that this process last forked or spawned ended with an
            exception.
        returns_weights: Whether the process that forks or spawns the ranks gets the trained
            weights.
        folder_callback: Class of a callback that needs checkpoint folders; "" if there is none.
        run_facts: Facts about the run for the metadata of its checkpoints, in JSON types.
        snapshots: Snapshots of the training in memory.
    """

    ranks_failed = False
    returns_weights = True
    folder_callback = ""
    run_facts: Mapping[str, object] = MappingProxyType({})
    snapshots: Snapshots
    _saves: FolderSaves
    _named_groups: GroupNames
    _awaiting_values: tuple[Checkpoint, bool] | None = None

    @property
    def model_space(self) -> ModelSpace:
        """Return the local tensors of the model and the optimizers, with their global names."""
        return ModelSpace(
            module=self.lightning_module,
            layout=self.layout,
            mesh=None if self._run is None else self._run.mesh,
            parallel=self._parallel,
            engine=self._engine,
            optimizers=self.optimizers,
            named_groups=self._named_groups,
            shards_parameters=self.config.sharded_state(self.layout) == "parameters",
            waiting_in=self.waiting_in,
        )

    # ---- saving ----------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> Checkpoint:
        """Return hyperparameters of the groups, with the names of all ranks' parameters."""
        if self._engine is not None:
            self._engine.gradients.parameters_needed()  # the states are those of the last step
        if self._parallel is None or self.writes_file:
            return super().optimizer_state(optimizer)
        return {} if self._alone("saving") else optimizer_state(self.model_space, optimizer)

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
        if reason := self._why_impossible():
            warnings.warn(f"the checkpoint {filepath} is not saved: {reason}", stacklevel=2)
            return
        if self._parallel is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        by_plugin = self.writes_file and self._names.writes_elsewhere(self.checkpoint_io, filepath)
        if storage_options is not None and not by_plugin:
            raise TypeError(
                "storage_options is not supported, because every rank writes its part of a "
                "checkpoint to a folder of the shared file system"
            )
        action = f"saving the checkpoint {filepath}"
        with self.waiting_in(action):
            if not self.writes_file:
                self._saves.save(self, checkpoint, os.fspath(filepath))
                return
            is_alone = self._alone("saving")  # then the other ranks do not join, and are not needed
            with contextlib.nullcontext() if is_alone else same_outcome(action):
                if "optimizer_states" in checkpoint:  # other layouts find parameters by their names
                    names = self.model_space.names_of_groups()
                    checkpoint = {**checkpoint, PARAMETER_NAMES: names}
                if by_plugin:
                    super().save_checkpoint(checkpoint, filepath, storage_options)
                elif self.global_rank == 0:
                    write_file(checkpoint, local_path(filepath))

    @property
    def writes_file(self) -> bool:
        """Return True if checkpoints are Lightning's single files."""
        if self.config.checkpoint_format != "auto":
            return self.config.checkpoint_format == "file"
        return not (self.run_facts or self.folder_callback or self.why_no_file())

    def note_callbacks(self, callbacks: Iterable[object]) -> None:
        """Look for a callback whose attribute ``needs_checkpoint_folders`` is true."""
        names = (
            type(callback).__name__
            for callback in callbacks
            if getattr(callback, "needs_checkpoint_folders", False)
        )
        self.folder_callback = next(names, "")

    def why_no_file(self) -> str:
        """Return the option that rules out a single file; "" if there is none.

        With such an option no rank holds everything that is saved, or saving does not wait."""
        if self.layout.divides_model:
            return f"{self.layout.describe()} cuts the model"
        if quantized_parameters(self.lightning_module):
            return "only folders leave out quantized weights"
        if self.config.async_save:
            return "async_save=True writes folders"
        if self.config.snapshot_every_n_steps:
            return f"snapshot_every_n_steps={self.config.snapshot_every_n_steps} writes folders"
        if self.config.sharded_state(self.layout) != "none":
            return f"shard={self.config.shard!r} cuts the optimizer's states"
        return self.config.reason_for_copies if self.model_space.steps_on_copies else ""

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

    def finish_saving(self) -> None:
        """Wait for a background save.

        Raises:
            CheckpointError: It failed; the same on all ranks.
        """
        self._saves.finish(self.waiting_in)

    def on_exception(self, exception: BaseException) -> None:
        """Wait for a background save, and for a snapshot, if they can end.

        An error of torch's communication from outside the strategy's own waits gets a note with the
        last action of each rank."""
        super().on_exception(exception)
        if self._run is not None:
            self._run.watchdog.annotate(exception)
            stop_requested = isinstance(exception, (KeyboardInterrupt, SystemExit))
            if stop_requested and not isinstance(exception, StoppedNow):
                # ask now, because the answer is known at the end of the run
                self._run.interruption.is_of_this_rank_alone()
        self._saves.end(exception, self.config.timeout)
        self.snapshots.keep(exception)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        """Remove a checkpoint that is no longer among the best."""
        self._saves.remove(filepath, remove_file=super().remove_checkpoint)

    # ---- loading ---------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True if Lightning restores the checkpoint after ``setup``.

        The model and the callbacks are then restored after this rank's part of the model has been
        cut out, and after ``on_fit_start``."""
        return not self.model_space.ranks_hold_all or needs_initial_values(self.lightning_module)

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
        by_plugin = self._names.writes_elsewhere(self.checkpoint_io, "")
        from_web = os.fspath(checkpoint_path).startswith("http")
        if from_web or (by_plugin and not os.path.isdir(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        path = located(self.broadcast(os.fspath(checkpoint_path)))
        trainer = getattr(self.lightning_module, "_trainer", None)
        resuming = (
            trainer is not None and fits(trainer) and str(trainer.ckpt_path) == str(checkpoint_path)
        )
        if isinstance(path, Path):
            path = self.snapshots.located(path, resuming=resuming)
        if not path.is_file():
            checkpoint = read_checkpoint(path, self, resuming=resuming)
            restored = checkpoint["state_dict"].path
            if resuming and restored != path:
                set_restored_path(trainer, str(restored))
            return checkpoint
        checkpoint = super().load_checkpoint(os.fspath(path), weights_only=weights_only)
        if resuming:
            check_trained(checkpoint, path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Checkpoint, strict: bool = True) -> None:
        """Fill this rank's part from the whole model's state.

        The hooks of ``on_load_checkpoint`` may have changed that state."""
        space = self.model_space
        state = checkpoint["state_dict"]
        if not space.is_cut and awaits_values(self.lightning_module):
            self._awaiting_values = (checkpoint, strict)
            return
        if space.ranks_hold_all:
            if replacing(self) is None:  # float32 parameters would round values of "64-true"
                self.precision_plugin.convert_module(self.lightning_module)
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
                # If the hooks of any rank have accessed whole tensors, they may have changed them.
                # Take this rank's part from those tensors.
                if any(gather(not stored or state.touched)):
                    fill_from_state(space, state, strict=strict)
                else:
                    fill_part(space, state.path, strict=strict)
        self._parameters_set()

    def load_awaited_values(self) -> None:
        """Load the checkpoint that was restored before a meta-device module had values."""
        arguments = self._awaiting_values
        self._awaiting_values = None
        # Otherwise it remains from a run that failed.
        if arguments is not None and self.lightning_module.trainer.ckpt_path is not None:
            self.load_model_state_dict(*arguments)

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
        path = self.broadcast(os.fspath(path))
        with self.waiting_in(f"loading weights from {path}"):
            with same_outcome(f"fetching {path}"):
                path = readable(path)
            missing = fill_part(self.model_space, path, strict=strict, rename=rename)
        if reads_as_huggingface(path):
            set_magnitudes(self.lightning_module)
        self._parameters_set()
        return missing

    def load_optimizer_state_dict(self, checkpoint: Checkpoint) -> None:
        """Fill this rank's part of the optimizer, by parameter name.

        Raises:
            ValueError: The checkpoint is a single file of another strategy, whose parameters are
                not named.
        """
        states = checkpoint["optimizer_states"]
        load_optimizers(self.model_space, states, checkpoint.get(PARAMETER_NAMES))

    def _parameters_set(self) -> None:
        """Update the masters after the parameters have new values."""
        if self._engine is not None and self._engine.gradients.stepped is not None:
            self._engine.gradients.stepped.reload()

    # ---- the full model --------------------------------------------------------------------------

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the uncut model on the CPU of every rank.

        Collective over the world; the model must fit into a rank's memory."""
        return self.model_space.state_dict()

    def export_huggingface(
        self,
        folder: PathLike,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        prefix: str | None = None,
        check_only: bool = False,
    ) -> None:
        """Write the current model as a Hugging Face folder.

        The folder contains ``config.json``, ``generation_config.json``, safetensors with their
        index, and the tokenizer files in the folder of the configuration from which the model was
        built. The module must wrap a Hugging Face model or be a model of this package. LoRA
        adapters are merged into a Hugging Face model. All ranks must call this method after
        ``setup``; they write together.

        Args:
            folder: Target on a file system that all ranks share. An earlier export there is
                replaced when the new one is complete.
            dtype: Type to which floating-point tensors are converted; default: unchanged.
            shard_bytes: Largest number of tensor bytes in one file.
            prefix: Attribute of the model to export, with a trailing dot, if the module holds
                several Hugging Face models.
            check_only: Only check whether the export would be possible now.

        Raises:
            CheckpointError: The export failed on some rank; raised on all ranks. An earlier export
                is left unchanged, and no other files remain.
        """
        export_model(
            self.model_space,
            absolute(self.broadcast(os.fspath(folder))),
            dtype=dtype,
            shard_bytes=shard_bytes,
            prefix=prefix,
            check_only=check_only,
            several_nodes=self.num_nodes > 1,
        )
