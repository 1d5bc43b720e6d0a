"""Contexts around the forwards of a rank, and a guard of its part of the parameters in a step.

``make_surroundings`` builds the list; ``check_surroundings`` refuses impossible combinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_ptdp.attention import ATTENTIONS
from lightning_ptdp.base.function_replacement import PartialModelError
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.context_parallel import ContextParallel, why_not
from lightning_ptdp.engine.step_random import StepRandomness
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from lightning_ptdp.forward.surroundings import Surrounding, Surroundings
from lightning_ptdp.keyed_dropout import KeyedDropout
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.parameters.managed_parameter import ManagedParameters
from lightning_ptdp.pipeline.containers import layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.placeholders import Placeholder
from lightning_ptdp.schedule.generators import may_split_backward
from lightning_ptdp.tensor_parallel import SplitRandomness
from lightning_ptdp.tensor_parallel.kinds.sharded_experts import ReadOnce
from lightning_ptdp.tensor_parallel.randomness import PlacedDropout
from lightning_ptdp.tensor_parallel.region import is_whole
from lightning_ptdp.world.mesh import ProcessMesh

_HEADS = ("num_heads", "num_attention_heads", "n_head")


def make_surroundings(
    *,
    config: PTDPConfig,
    mesh: ProcessMesh,
    parallel: ParallelModel,
    seed: int,
    device: torch.device,
) -> Surroundings:
    """Return the contexts around the forwards of this rank, the outermost first.

    Among torch's function modes, the one entered last sees a call first. Calls that it makes itself
    go to the modes around it. This determines the order:

    - Random numbers of the step are first, because their hooks must be the outermost of a block.
    - Keyed dropout is last, because it must see attention with dropout before context parallelism
      splits that attention over slices of the sequence.
    - Deferred weight gradients are before both of these modes, because any product with which they
      replace a call must be deferrable."""
    context = mesh.group("context")
    tensor = mesh.group("tensor")
    shards = [] if parallel.shards is None else [parallel.shards]
    entries: list[Surrounding] = [*shards, _step_randomness(config, mesh, parallel, device)]
    if may_split_backward(config.schedule):
        entries.append(WeightGradients(parallel.casts))
    if config.recompute in ("full", "selective") and mesh.group("expert").size > 1:
        entries.append(ReadOnce())
    if context.size > 1:
        sliced = ContextParallel(
            group=context,
            attention=config.context_parallel_attention,
            sequence_dims=config.sequence_dims or {},
            needs_positions=config.context_parallel_positions,
            sequence_parallel_size=config.tensor_parallel_size if config.sequence_parallel else 1,
            attending=[
                stage
                for stage, (start, stop) in enumerate(parallel.ranges or [(0, 1)])
                if start < stop
            ],
        )
        entries.append(sliced)
    if config.keyed_dropout:
        entries.append(
            KeyedDropout(
                tensor=tensor,
                context=context,
                sequence_parallel=config.sequence_parallel,
                seed=seed,
            )
        )
    elif tensor.size > 1 and (parallel.split_blocks is not None or not config.sequence_parallel):
        returns = any(
            is_whole(m) or (isinstance(m, PlacedDropout) and not m.split)
            for m in parallel.module.modules()
        )
        entries.append(
            SplitRandomness(
                rank=tensor.rank, device=device, blocks=parallel.split_blocks, returns=returns
            )
        )
    return Surroundings(entries)


def _step_randomness(
    config: PTDPConfig, mesh: ProcessMesh, parallel: ParallelModel, device: torch.device
) -> StepRandomness:
    module = parallel.module
    names = parallel.blocks
    draws = mesh.layout.world_size > 1 or config.runs_backward
    try:
        layers = [
            layer.name
            for layer in layers_of(module, find_blocks(module) if names is None else names)
            if draws
        ]
    except ValueError:  # nothing is repeated, and nothing is cut
        layers = []
    blocks = {
        number: name
        for number, name in enumerate(layers)
        if not isinstance(module.get_submodule(name), Placeholder)
    }
    splits_ends = config.sequence_parallel and parallel.split_blocks is None
    if splits_ends:
        # The sequence is already split after the embedding.
        around = tuple(f"{name}." for name in layers)
        drops = [
            name
            for name, child in module.named_modules()
            if isinstance(child, nn.Dropout) and not f"{name}.".startswith(around)
        ]
        blocks |= {len(layers) + index: name for index, name in enumerate(drops)}
    place = (mesh.group("tensor").rank if splits_ends else 0, mesh.group("context").rank)
    absent = parallel.cut.earlier_blocks if parallel.cut is not None else []
    return StepRandomness(module=module, blocks=blocks, absent=absent, place=place, device=device)


def check_surroundings(model: nn.Module, config: PTDPConfig) -> None:
    """Check the attention of a whole, uncut model.

    Raises:
        ValueError: Its attention cannot be intercepted, or context parallelism does not divide its
            heads (all-to-all attention).
    """
    if config.context_parallel_size == 1:
        return
    reason = why_not(model)
    if reason is not None:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size} cannot run this model: "
            f"{reason}. Or use context_parallel_size=1"
        )
    for module in model.modules():
        model_config: Any = getattr(module, "config", None)
        heads = next(
            (n for key in _HEADS if isinstance(n := getattr(model_config, key, None), int)), None
        )
        if heads is not None:
            ATTENTIONS[config.context_parallel_attention].check_heads(
                max(1, heads // config.tensor_parallel_size), config.context_parallel_size
            )


# ---- Guard against loops over a part of the parameters in a user's step --------------------------
#
# A sum over ``self.parameters()`` in ``training_step`` would be the sum of one pipeline stage, or of
# parts of matrices. While a step runs, such a loop is therefore refused when it reaches the end of
# the local parameters. ``next(self.parameters()).device`` is allowed. So is any loop outside the
# steps, where optimizers and Lightning need the local parameters. This package's own forwards call
# ``nn.Module.named_parameters(module)``.


class ParameterGuard:
    """Guard of the modules of which this rank holds a part.

    Args:
        module: The LightningModule, cut.
        parameters: Its parameters.
        options: Options that divide it, for the message.

    Attributes:
        hook: The user's step that runs, if any.
        options: Options that divide the module, for the message.
    """

    def __init__(self, module: nn.Module, parameters: ManagedParameters, options: str) -> None:
        self.hook: str | None = None
        self.options = options
        split = {p for p, managed in parameters.items() if not managed.placement.is_whole}
        for name, child in module.named_modules():
            has_placeholder = any(isinstance(part, Placeholder) for part in child.modules())
            if has_placeholder or any(parameter in split for parameter in child.parameters()):
                # torch's compiler requires a method.
                vars(child)["named_parameters"] = MethodType(_GuardedParameters(name, self), child)

    def __deepcopy__(self, memo: object) -> ParameterGuard:
        """Return itself, because a copy made during a step would stay in that step."""
        return self


@dataclass(frozen=True, eq=False)
class _GuardedParameters:
    """Replacement of a module's ``named_parameters``, which ``parameters`` calls too."""

    name: str
    guard: ParameterGuard
    __name__ = "named_parameters"  # pickle finds the method by it

    def __call__(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from type(module).named_parameters(module, *args, **kwargs)
        if self.guard.hook is not None and kwargs.get("recurse", True):
            call = ".".join(filter(None, ["self", self.name, "parameters()"]))
            raise PartialModelError(
                f"{self.guard.hook} loops over {call}, but this rank has only a part of them "
                f"({self.guard.options}), so a penalty or a norm would be wrong. Use the "
                "optimizer's weight_decay, change the gradients of optimizer.param_groups in "
                "on_before_optimizer_step (p.grad.add_(p.detach(), alpha=...)), or use "
                "tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
