"""Names and positions of local model and optimizer tensors in the whole model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.parameters.materialize import Materializer, make_room
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.strategy.running_strategy import RunningStrategy

__all__ = ["MASTER", "MODEL", "Checkpoint", "ModelSpace", "PathLike", "checked_tensor"]

Checkpoint = dict[str, Any]
"""A complete or partial checkpoint, as Lightning and the hooks compose it."""
PathLike = str | os.PathLike[str]

MODEL = "model/"
MASTER = "master"  # name of the float32 copy among the optimizer's states


class ModelSpace(RunningStrategy):
    """Mixin of the strategy: local tensors with their names and positions in the uncut model."""

    # names of each optimizer's parameters, group by group, before they are sharded
    _named_groups: list[list[list[str]]]

    @property
    def ranks_hold_all(self) -> bool:
        """Return True if every rank holds all parameters of the model.

        This is the case if neither tensor nor pipeline parallelism cuts it."""
        return self.layout.size("shards") == 1

    @property
    def _is_cut_here(self) -> bool:
        """Return True if an earlier run has already cut the module to this rank's part.

        Such a run is a fit, validate, test or predict."""
        return self._parallel is not None and self._parallel.module is self.lightning_module

    @property
    def _steps_on_copies(self) -> bool:
        """Return True if the optimizer of the last fit does not step on the parameters."""
        parameters = {} if self._parallel is None else self._parallel.parameters
        return any(managed.steps_on_copy for managed in parameters.values())

    def _optimizer_records(self) -> tuple[dict[nn.Parameter, str], dict[str, Placement]]:
        """Return the names of the optimizer's tensors, and by name their placements."""
        every = self.parallel.parameters.values()
        names = {managed.parameter: managed.name for managed in every}
        names |= {each.stepped: each.name for each in every if each.stepped is not None}
        return names, {managed.name: managed.stepped_placement for managed in every}

    def _names_of_groups(self) -> list[list[list[str]]]:
        """Return the names of the parameters of each optimizer, group by group."""
        names, _ = self._optimizer_records()
        groups = [
            getattr(optimizer, "_optimizer", optimizer).param_groups
            for optimizer in self.optimizers
        ]
        return [
            [[names.get(parameter, "") for parameter in group["params"]] for group in own]
            for own in groups
        ]

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the whole, uncut model on the CPU of every rank.

        Collective over the world; the model must fit into a rank's memory."""
        with self.waiting_in("gathering the whole model"):
            local = {
                name: (tensor.cpu(), placement)
                for name, (tensor, placement) in self._model_tensors(to_write=True).items()
            }
            ranks = gather(local)
        whole: dict[str, Tensor] = {}
        for part in ranks:
            for name, (tensor, placement) in part.items():
                full = whole.setdefault(name, torch.empty(placement.full_shape, dtype=tensor.dtype))
                for piece in placement.pieces:
                    full[piece.in_full.slices] = tensor[piece.in_local.slices]
        return {
            **whole,
            **{
                alias: whole[name] for alias, name in self.parallel.aliases.items() if name in whole
            },
        }

    def write_weights(self, path: str) -> None:
        """Write the whole model's state dictionary to ``path`` from local rank 0.

        Collective over the world."""
        if self._engine is not None:
            self._engine.gradients.parameters_needed()
        is_divided = self._parallel is not None and self.layout.divides_model
        # Every rank calls state_dict(), because metrics may communicate in it.
        weights = self.gather_state_dict() if is_divided else self.lightning_module.state_dict()
        if self.local_rank == 0:
            torch.save(weights, path)

    def read_weights(self, path: str) -> None:
        """Build the module in the main process, and load the weights of ``write_weights``."""
        module = self.lightning_module
        self._build_unfilled(module)
        weights = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        # The ranks may have added or removed layers.
        module.load_state_dict(weights, strict=False)

    def _build_unfilled(self, module: LightningModule) -> None:
        """Build the module without its initial values.

        Values that its ``initial_weights()`` names are neither read nor drawn."""
        comes_filled = self.config.meta_init and hasattr(module, "initial_weights")
        with torch.device("meta") if comes_filled else contextlib.nullcontext():
            module.configure_model()
        if comes_filled:
            cpu = torch.device("cpu")
            materialize = Materializer(
                module, seed=0, device=cpu, left={name for name, _ in module.named_parameters()}
            )
            for name, child in module.named_modules():
                materialize(child, name)
            make_room(module, device=cpu)

    def _model_tensors(
        self, *, without: Collection[str] = (), to_write: bool = False
    ) -> dict[str, tuple[Tensor, Placement]]:
        """Return local parameters and persistent buffers under their global names.

        Tied tensors are returned once, under the first of their names. Before the module is cut,
        all of its tensors are returned.

        Args:
            without: Entries of the module's state to leave out.
            to_write: Whether to leave out the buffers that another rank writes.
        """
        parameters = self.parallel.parameters if self._is_cut_here else {}
        found: dict[str, tuple[Tensor, Placement]] = {}
        named: dict[int, str] = {}
        if self._engine is not None:
            self._engine.gradients.parameters_needed()
        for key, value in self.lightning_module.state_dict(keep_vars=True).items():
            if key in without:
                continue
            value = checked_tensor(key, value)
            managed = parameters.get(value) if isinstance(value, nn.Parameter) else None
            if managed is not None:
                found[managed.name] = (value.detach(), managed.placement)
            elif named.setdefault(id(value), key) == key and not (
                to_write and self._is_written_elsewhere(key)
            ):
                found[key] = (value.detach(), Placement.replicated(tuple(value.shape)))
        return found

    def _is_written_elsewhere(self, buffer: str) -> bool:
        """Return True if another rank saves its value of this buffer.

        Each replica computes its own value, and rank 0's is saved. If every stage keeps a module,
        the last stage's value is saved, because that stage sees the whole step."""
        if not self._is_cut_here:
            return False
        mesh, cut = self.mesh, self.parallel.cut
        if mesh.group("replica_sum").rank or mesh.group("tensor").rank:
            return True
        is_everywhere = (
            cut is not None
            and cut.module_stages.get(buffer.rpartition(".")[0], frozenset()) is None
        )
        return is_everywhere and mesh.group("pipeline").rank != self.layout.last_stage_rank


def checked_tensor(name: str, value: object) -> Tensor:
    """Return an entry of a ``state_dict`` if it is a tensor.

    Raises:
        ValueError: It is not a tensor.
    """
    if isinstance(value, Tensor):
        return value
    raise ValueError(
        f"the state_dict entry '{name}' is a {type(value).__name__}, but only tensors are "
        "saved by layout. Save it in on_save_checkpoint and on_load_checkpoint instead"
    )
