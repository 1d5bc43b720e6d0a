"""Checks of the uncut module and of its initial weights against the layout."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_ptdp.blocks.fp8 import check_fp8
from lightning_ptdp.blocks.recompute import check_recomputation
from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.exchange import HuggingFaceWeights, names_in
from lightning_ptdp.models.plans import find_plan, suggested_tensor
from lightning_ptdp.models.pretrained_folder import InitialWeights, local_folder
from lightning_ptdp.parallel_model import checked_kinds
from lightning_ptdp.parameters.materialize import awaits_values
from lightning_ptdp.pipeline.containers import Blocks, layer_ranges
from lightning_ptdp.pipeline.discover import KnownParts, find_blocks
from lightning_ptdp.pipeline.dry_run import Rehearsal
from lightning_ptdp.shims.lightning import NAMESPACES, LightningModule
from lightning_ptdp.strategy.checks.module_content import (
    check_accumulation_hooks,
    check_adapter_loss,
    check_compiled,
    check_gradient_hooks,
    check_hooks,
    check_late,
    check_libraries,
    check_max_norm,
    check_quantized,
    check_shared_values,
    check_skipped_layers,
    check_whole_dropout,
    hooks_by_name,
)
from lightning_ptdp.strategy.forward_contexts import check_surroundings
from lightning_ptdp.tensor_parallel import ParallelPlan, check_captured
from lightning_ptdp.world.layout import ParallelLayout

CUT_MARK = "_ptdp_layout"
_LIGHTNING = tuple(name.partition(".")[0] for name in NAMESPACES)


def check_model(
    module: nn.Module,
    config: PTDPConfig,
    layout: ParallelLayout,
    *,
    convert: Callable[[nn.Module], nn.Module] | None = None,
    full: nn.Module | None = None,
) -> KnownParts | None:
    """Check the sizes of the model against the layout.

    A copy is checked if ``configure_model`` builds the model or ``convert`` changes it.

    Args:
        module: The LightningModule, not cut yet.
        config: The strategy's options.
        layout: The degrees of parallelism.
        convert: The precision plugin's ``convert_module`` if it replaces modules or parameters.
        full: Result of ``full_model`` for the module, if available.

    Returns:
        Places of the modules, if a pipeline cuts the model.

    Raises:
        ValueError: Names the field, the value and what would work.
    """
    check_quantized(module, config, layout)
    check_accumulation_hooks(hooks_by_name(module), config)
    check_max_norm(module, layout)
    check_shared_values(module, config, layout)
    blocks_stay = config.recompute == "none" and config.compile != "blocks" and config.fp8 is None
    if not layout.divides_model and blocks_stay and config.sharded_state(layout) != "parameters":
        return None
    if CUT_MARK in vars(module):
        raise ValueError(
            f"this {type(module).__name__} was already cut for the layout "
            f"{vars(module)[CUT_MARK]!r}. Create a new module (and load the checkpoint) to run "
            "it under another Trainer"
        )
    full = full_model(module, config) if full is None else full
    check_skipped_layers(full, config, layout)
    if not layout.divides_model and blocks_stay:
        return None
    check_libraries(full)
    check_quantized(full, config, layout)
    hooked = [*hooks_by_name(module), *hooks_by_name(full)]
    if convert is not None:
        late = config.meta_init and full is not module
        full = converted_copy(full, convert, config, late=late)
    check_compiled(full, layout)
    if config.meta_init:
        tensors = (*module.named_parameters(), *module.named_buffers())
        check_late(full, built={name for name, tensor in tensors if not tensor.is_meta})
    plan = plan_of(full, config)
    check = getattr(full, "check_parallel", None)
    if check is not None:
        check(layout)
    kinds = checked_kinds(full, plan, layout, converted=convert is not None)
    ep_axis = next((axis for axis in ("expert", "expert_tensor") if layout.size(axis) > 1), None)
    if ep_axis is not None and not any(kind.axis == "expert" for kind in kinds.values()):
        raise ValueError(
            f"{ep_axis}_parallel_size={layout.size(ep_axis)} distributes the experts of a mixture, but "
            f"no experts were found in {type(full).__name__}. Name their modules in a plan, "
            'ParallelPlan(tensor={"model.layers.*.mlp.experts": "experts"}), or use '
            f"{ep_axis}_parallel_size=1"
        )
    check_gradient_hooks(hooked, kinds)
    if layout.tensor_parallel_size > 1:
        check_hooks(full, kinds, layout)
        if layout.sequence_parallel and not config.keyed_dropout:
            check_whole_dropout(full, plan, kinds)
        check_captured(full, kinds, sequence_parallel=layout.sequence_parallel)
    check_surroundings(full, config)
    blocks: Blocks | None = plan.blocks
    ranges: Sequence[tuple[int, int]] = ()
    known_parts: KnownParts | None = None
    if layout.pipeline_parallel_size > 1:
        plan.check_pipeline()
        check_adapter_loss(full)
        known_parts = KnownParts.of(full, plan)
        blocks = known_parts.parts.blocks
        rehearsal = rehearsal_of(full, known_parts, config, layout)
        ranges = rehearsal.ranges
        rehearsal.on_examples()
    if config.compile == "blocks" and blocks is None:
        find_blocks(full)
    if config.fp8 is not None:
        check_fp8(
            full, blocks=blocks, kinds=kinds, tensor_parallel_size=layout.tensor_parallel_size
        )
    check_recomputation(
        full,
        policy=config.recompute,
        layers=config.recompute_layers,
        blocks=blocks,
        ranges=ranges,
        selective=plan.selective,
    )
    return known_parts


def rehearsal_of(
    model: nn.Module, known: KnownParts, config: PTDPConfig, layout: ParallelLayout
) -> Rehearsal:
    """Return a rehearsal of all pipeline stages of an uncut model."""
    ranges = layer_ranges(model, parts=known.parts, layout=layout, partition=config.partition)
    return Rehearsal(
        model=model,
        parts=known.parts,
        ranges=ranges,
        collects=known.plan.collects,
        pipeline_parallel_size=layout.pipeline_parallel_size,
    )


# ---- The uncut module: its plan, and a copy of it before launch ----------------------------------


def plan_of(module: LightningModule, config: PTDPConfig) -> ParallelPlan:
    """Return the parallel plan of a module.

    The strategy's own plan comes first, then the module's ``configure_parallel()``, then the plan
    of a known model inside the module, then an empty plan.

    Raises:
        ValueError: ``configure_parallel`` returned no ParallelPlan, or tensor parallelism has
            nothing to shard.
    """
    plan = config.plan
    if plan is None and hasattr(module, "configure_parallel"):
        plan = module.configure_parallel()
        if not isinstance(plan, ParallelPlan):
            raise ValueError(
                f"configure_parallel() returned {type(plan).__name__}, but must return a "
                "ParallelPlan"
            )
    if plan is None and isinstance(module, nn.Module):
        plan = find_plan(module)
    plan = plan if plan is not None else ParallelPlan()
    if config.tensor_parallel_size > 1 and not plan.tensor:
        tensor = suggested_tensor(module) if isinstance(module, nn.Module) else {}
        lines = "".join(f'    "{name}": "{kind}",\n' for name, kind in tensor.items())
        example = f"{{\n{lines}}}" if lines else '{"model.blocks.*.mlp.up": "column", ...}'
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size}, but no plan says which "
            f"modules to shard. Use PTDPStrategy(plan=ParallelPlan(tensor={example})), define "
            "configure_parallel() on the LightningModule, or use "
            f"tensor_parallel_size=1{'. The modules suggest these lines: check them against the forward' if lines else ''}"
        )
    return plan


def full_model(module: nn.Module, config: PTDPConfig) -> nn.Module:
    """Return the uncut module.

    If ``configure_model`` builds any part of it, return a copy, built without allocating memory if
    possible."""
    written_by = getattr(module, "configure_model", full_model).__module__
    if written_by.partition(".")[0] in _LIGHTNING or not isinstance(module, nn.Module):
        return module
    clone: Any = _copy_without_tensors(module)
    with torch.random.fork_rng(devices=[]):  # do not change the random numbers of the training
        try:
            with on_meta():
                clone.configure_model()
        except Exception:
            if config.meta_init:
                raise
            clone = _copy_without_tensors(module)
            clone.configure_model()
    return clone


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Return the context in which ``configure_model`` builds on the meta device.

    Raises:
        ValueError: ``configure_model`` loads weights there.
    """
    try:
        with torch.device("meta"):
            yield
    except RuntimeError as error:
        if "from_pretrained" not in str(error):
            raise
        raise ValueError(
            "configure_model calls from_pretrained, which would load all weights on every "
            "rank, although meta_init=True lets each rank load only its own part. Build the "
            "model from its configuration "
            "(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))) and load "
            "the weights with the callback InitFrom(path), where path is the folder with "
            "config.json and safetensors. Otherwise, use PTDPStrategy(meta_init=False), which "
            "loads the whole model on every rank"
        ) from error


def converted_copy(
    full: nn.Module, convert: Callable[[nn.Module], nn.Module], config: PTDPConfig, *, late: bool
) -> nn.Module:
    """Return a copy of the uncut module after ``convert``.

    Args:
        full: The uncut module.
        convert: The precision plugin's ``convert_module``.
        config: The strategy's options.
        late: Whether ``configure_model`` has built the module on the meta device.

    Raises:
        ValueError: The plugin needs values, which are not there yet.
    """
    try:
        return convert(_copy_without_tensors(full))
    except RuntimeError as error:
        name = getattr(convert, "__qualname__", "convert_module")
        if late:
            hint = (
                "the model that configure_model built. Build it in __init__, or use "
                "PTDPStrategy(meta_init=False)"
            )
        elif config.tensor_parallel_size > 1:
            hint = "the copy that is checked before launch. Use tensor_parallel_size=1"
        else:
            # the ranks have values, and replaced modules matter to tensor parallelism alone
            return full
        raise ValueError(
            f"the plugin's {name} needs values ({error}), which do not exist yet in {hint}"
        ) from error


def _copy_without_tensors(module: nn.Module) -> nn.Module:
    """Return a copy with its tensors on the meta device.

    The copy shares nothing with the module and may be changed."""
    tensors = (*module.parameters(), *module.buffers())
    empty = {
        id(t): nn.Parameter(t.detach().to("meta"), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.to("meta")
        for t in tensors
    }
    return copy.deepcopy(module, {**empty, id(getattr(module, "_trainer", None)): None})


# ---- Checks of the initial weights that a module names, against the module -----------------------


def check_initial_weights(module: LightningModule, config: PTDPConfig) -> None:
    """Check that the files named by the module's ``initial_weights()`` exist and fit.

    Only their headers are read.

    Raises:
        ValueError: They do not; lists the names and shapes that differ.
    """
    if hasattr(module, "initial_weights") and config.meta_init:
        open_initial_weights(full_model(module, config))


def open_initial_weights(module: nn.Module) -> HuggingFaceWeights | None:
    """Open the weights that the module's ``initial_weights()`` names.

    The result is None if it names none, or if the module has values already.

    Raises:
        CheckpointError: The files are missing or do not fit.
    """
    give: Callable[[], InitialWeights | None] | None = getattr(module, "initial_weights", None)
    source = give() if give is not None else None
    if source is None or not awaits_values(module):
        return None
    first = {parameter: name for name, parameter in module.named_parameters()}
    parameters = module.named_parameters(remove_duplicate=False)
    aliases = {name: first[parameter] for name, parameter in parameters if first[parameter] != name}
    weights = HuggingFaceWeights.open(
        local_folder(source.path), names_in(module, aliases, ignored=source.ignores)
    )
    try:
        weights.check(module, may_lack=source.may_lack)
    except CheckpointError as error:
        raise CheckpointError(f"path={source.path!r}: {error}") from None
    return weights
