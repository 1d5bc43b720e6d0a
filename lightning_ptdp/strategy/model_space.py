"""Names and positions of local model and optimizer tensors in the uncut model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.data_files import assign
from lightning_ptdp.checkpoint.local_rectangles import rectangles_of
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.checkpoint.stored_tensor import as_bytes
from lightning_ptdp.engine import Engine
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.shims.quantization import quantized_parameters
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh

Checkpoint = dict[str, Any]
"""A complete or partial checkpoint, as Lightning and the hooks compose it."""
PathLike = str | os.PathLike[str]
NamedTensors = dict[str, tuple[Tensor, Placement]]
"""Local tensors by their global names, each with its placement in the full tensor."""
GroupNames = list[list[list[str]]]
"""Names of each optimizer's parameters, group by group."""

MODEL = "model/"


@dataclass(frozen=True, kw_only=True)
class ModelSpace:
    """Local tensors of the model and its optimizers, with their places in the uncut model.

    Attributes:
        module: The module of the Trainer.
        layout: Degrees of parallelism.
        mesh: The process groups of this rank; None before they exist.
        parallel: This rank's part of the module that was cut last; None before the first ``setup``.
        engine: Runs the batches; None before ``setup``.
        optimizers: The optimizers of the fit.
        named_groups: Names of the optimizers' parameters before they are sharded.
        shards_parameters: Whether the parameters are sharded over the replicas.
        waiting_in: Returns a context for waits on other ranks; its argument names the wait.
    """

    module: LightningModule
    layout: ParallelLayout
    mesh: ProcessMesh | None
    parallel: ParallelModel | None
    engine: Engine | None
    optimizers: Sequence[Optimizer]
    named_groups: GroupNames
    shards_parameters: bool
    waiting_in: Callable[[str], Context]

    @property
    def ranks_hold_all(self) -> bool:
        """Return True if every rank holds all that a checkpoint has of the model.

        This is the case if neither a layout nor sharding divides it. A checkpoint has less than the
        module if weights are quantized."""
        divided = self.layout.size("shards") > 1 or self.shards_parameters
        return not (divided or quantized_parameters(self.module))

    @property
    def is_cut(self) -> bool:
        """Return True if an earlier run has already cut the module to this rank's part.

        Such a run is a fit, validate, test or predict."""
        return self.parallel is not None and self.parallel.module is self.module

    @property
    def part(self) -> ParallelModel:
        """Return this rank's part of the model, after ``setup``."""
        assert self.parallel is not None
        return self.parallel

    @property
    def steps_on_copies(self) -> bool:
        """Return True if the optimizer of the last fit does not step on the parameters."""
        parameters = {} if self.parallel is None else self.parallel.parameters
        return any(managed.steps_on_copy for managed in parameters.values())

    def optimizer_records(self) -> tuple[dict[nn.Parameter, str], dict[str, Placement]]:
        """Return the names of the optimizer's tensors, and by name their placements."""
        parameters = self.part.parameters.values()
        names = {managed.parameter: managed.name for managed in parameters}
        names |= {item.stepped: item.name for item in parameters if item.stepped is not None}
        return names, {managed.name: managed.stepped_placement for managed in parameters}

    def names_of_groups(self) -> GroupNames:
        """Return the names of the parameters of each optimizer, group by group."""
        names, _ = self.optimizer_records()
        groups = [
            getattr(optimizer, "_optimizer", optimizer).param_groups
            for optimizer in self.optimizers
        ]
        return [
            [[names.get(parameter, "") for parameter in group["params"]] for group in param_groups]
            for param_groups in groups
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the uncut model on the CPU of every rank.

        Collective over the world; the model must fit into a rank's memory."""
        with self.waiting_in("gathering the whole model"):
            own = assign(rectangles_of(self.tensors(to_write=True)), doing="gathering the model")
            ranks = gather([(one.name, one.place, _to_bytes(one.values)) for one in own.rectangles])
        state = {
            name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in own.tensors.items()
        }
        for name, place, data in chain.from_iterable(ranks):
            values = torch.empty(place.shape, dtype=state[name].dtype)
            np.asarray(as_bytes(values))[:] = data
            state[name][place.slices] = values
        aliases = self.part.aliases.items()
        return {**state, **{alias: state[name] for alias, name in aliases if name in state}}

    def tensors(self, *, without: Collection[str] = (), to_write: bool = False) -> NamedTensors:
        """Return local parameters and persistent buffers under their global names.

        Tied parameters, and buffers of shared modules, are returned once, under the first of their
        names. Before the module is cut, all of its tensors are returned. Quantized weights are left
        out: they are frozen, and bitsandbytes converts them to other formats while it uses them.

        Args:
            without: Entries of the module's state to leave out.
            to_write: Whether to leave out the buffers that another rank writes.
        """
        parameters = self.part.parameters if self.is_cut else {}
        aliases = self.part.aliases if self.is_cut else {}
        tensors: NamedTensors = {}
        first_of: dict[nn.Parameter, str] = {}
        if self.engine is not None:
            self.engine.gradients.parameters_needed()
        quantized = tuple(f"{name}." for name in quantized_parameters(self.module))
        for key, value in self.module.state_dict(keep_vars=True).items():
            if key in without or f"{key}.".startswith(quantized):
                continue
            value = checked_tensor(key, value)
            managed = parameters.get(value) if isinstance(value, nn.Parameter) else None
            if managed is not None and managed.held is not None:
                tensors[managed.name] = (managed.held.detach(), managed.held_placement)
            elif (
                managed is None
                and (not isinstance(value, nn.Parameter) or first_of.setdefault(value, key) == key)
                and not (to_write and self._is_written_elsewhere(key))
            ):
                name = aliases.get(key, key)
                tensors[name] = (value.detach(), Placement.replicated(tuple(value.shape)))
        return tensors

    def _is_written_elsewhere(self, buffer: str) -> bool:
        """Return True if another rank saves its value of this buffer.

        Each replica computes its own value, and rank 0's is saved. If every stage keeps a module,
        the last stage's value is saved, because that stage sees the whole step. If blocks of
        several stages share a module, the value of the first of them is saved."""
        if not self.is_cut:
            return False
        if buffer in self.part.aliases:
            return True
        mesh = self.mesh
        cut = self.part.cut
        assert mesh is not None
        if mesh.group("replica_sum").rank or mesh.group("tensor").rank:
            return True
        is_everywhere = (
            cut is not None
            and cut.module_stages.get(buffer.rpartition(".")[0], frozenset()) is None
        )
        return is_everywhere and mesh.group("pipeline").rank != self.layout.last_stage_rank


def _to_bytes(values: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor, in the type that is pickled fastest and has all dtypes."""
    return np.asarray(as_bytes(values.cpu().resolve_conj().resolve_neg().contiguous()))


def checked_tensor(name: str, value: object) -> Tensor:
    """Return an entry of a ``state_dict`` if it is a tensor.

    Raises:
        ValueError: It is not a tensor.
    """
    if isinstance(value, Tensor):
        return value
    raise ValueError(
        f"the state_dict entry '{name}' is a {type(value).__name__}, but only tensors are saved "
        "by layout. Return a tensor from get_extra_state, save the value in on_save_checkpoint and "
        "on_load_checkpoint, or use Trainer(enable_checkpointing=False)"
    )
