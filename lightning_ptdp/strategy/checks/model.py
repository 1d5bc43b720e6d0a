"""Checks of the module against the layout: its plan, its sizes, and how it was built."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_ptdp.base.requirements import check_installed
from lightning_ptdp.blocks.fp8 import check_fp8
from lightning_ptdp.blocks.recompute import check_recomputation
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.plans import find_plan, suggested_tensor
from lightning_ptdp.parameters.initializers import Initializers, why_without_values
from lightning_ptdp.pipeline.balance import layer_ranges
from lightning_ptdp.pipeline.containers import Blocks
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.pipeline.known_parts import KnownParts
from lightning_ptdp.pipeline.rehearsal import rehearse
from lightning_ptdp.shims.lightning import NAMESPACES, LightningModule
from lightning_ptdp.shims.torch import forward_hooks, has_gradient_hooks
from lightning_ptdp.shims.transformers import is_capture
from lightning_ptdp.strategy.forward_contexts import check_surroundings
from lightning_ptdp.tensor_parallel import (
    SPLIT_AXES,
    Alias,
    Kind,
    ParallelPlan,
    Partial,
    Region,
    Whole,
    check_captured,
)
from lightning_ptdp.world.layout import ParallelLayout

__all__ = [
    "CUT_MARK",
    "check_model",
    "check_quantized",
    "on_meta",
    "plan_of",
    "warn_of_balance_losses",
    "warn_of_batch_norm",
    "whole_model",
]

CUT_MARK = "_ptdp_layout"
_LIGHTNING = tuple(name.partition(".")[0] for name in NAMESPACES)


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
                f"configure_parallel() returned {type(plan).__name__}; return a ParallelPlan"
            )
    if plan is None and isinstance(module, nn.Module):
        plan = find_plan(module)
    plan = plan if plan is not None else ParallelPlan()
    if config.tensor_parallel_size > 1 and not plan.tensor:
        tensor = suggested_tensor(module) if isinstance(module, nn.Module) else {}
        lines = "".join(f'    "{name}": "{kind}",\n' for name, kind in tensor.items())
        example = f"{{\n{lines}}}" if lines else '{"model.blocks.*.mlp.up": "column", ...}'
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size}, but nothing says which modules "
            "to shard: give "
            f"PTDPStrategy(plan=ParallelPlan(tensor={example})), define configure_parallel() on "
            "the LightningModule, or use "
            f"tensor_parallel_size=1{'. The form of the modules suggests these lines: check them against the forward' if lines else ''}"
        )
    return plan


def check_model(
    module: nn.Module,
    config: PTDPConfig,
    layout: ParallelLayout,
    *,
    convert: Callable[[nn.Module], nn.Module] | None = None,
    whole: nn.Module | None = None,
) -> KnownParts | None:
    """Check the sizes of the model against the layout.

    A copy is checked if ``configure_model`` builds the model or ``convert`` changes it.

    Args:
        module: The LightningModule, not cut yet.
        config: The strategy's options.
        layout: The degrees of parallelism.
        convert: The precision plugin's ``convert_module`` if it replaces modules or parameters.
        whole: Result of ``whole_model`` for the module, if available.

    Returns:
        Places of the modules, if a pipeline cuts the model.

    Raises:
        ValueError: Names the field, the value and what would work.
    """
    check_quantized(module)
    blocks_stay = config.recompute == "none" and config.compile != "blocks" and config.fp8 is None
    if not layout.divides_model and blocks_stay:
        return None
    if CUT_MARK in vars(module):
        raise ValueError(
            f"this {type(module).__name__} was already cut for the layout "
            f"{vars(module)[CUT_MARK]!r}; make a new module (and load the "
            "checkpoint) to run it under another Trainer"
        )
    whole = whole_model(module, config) if whole is None else whole
    _check_libraries(whole)
    check_quantized(whole)
    hooked = [
        name
        for one in (module, whole)
        for name, p in one.named_parameters()
        if has_gradient_hooks(p)
    ]
    if convert is not None:
        late = config.meta_init and whole is not module
        whole = _converted(whole, convert, config, late=late)
    _check_compiled(whole)
    if config.meta_init:
        named = (*module.named_parameters(), *module.named_buffers())
        _check_late(whole, built={name for name, tensor in named if not tensor.is_meta})
    plan = plan_of(whole, config)
    check = getattr(whole, "check_parallel", None)
    if check is not None:
        check(layout)
    degrees = {axis: layout.size(axis) for axis in SPLIT_AXES}
    plan.check(
        whole, degrees["tensor"], layout.sequence_parallel, converted=convert is not None, **degrees
    )
    kinds = plan.divided(whole, **degrees)
    asked = next((axis for axis in ("expert", "expert_tensor") if degrees[axis] > 1), None)
    if asked is not None and not any(kind.axis == "expert" for kind in kinds.values()):
        raise ValueError(
            f"{asked}_parallel_size={degrees[asked]} shares out the experts of a mixture, and "
            f"{type(whole).__name__} has none that are "
            "known: name their modules in a plan, "
            'ParallelPlan(tensor={"model.layers.*.mlp.experts": "experts"}), or use '
            f"{asked}_parallel_size=1"
        )
    _check_gradient_hooks(hooked, kinds)
    if layout.tensor_parallel_size > 1:
        _check_hooks(whole, kinds)
        check_captured(whole, sequence_parallel=layout.sequence_parallel)
    check_surroundings(whole, config)
    blocks: Blocks | None = plan.blocks
    ranges: tuple[tuple[int, int], ...] = ()
    known: KnownParts | None = None
    if layout.pipeline_parallel_size > 1:
        plan.check_pipeline()
        _check_skipped_layers(whole)
        known = KnownParts.of(whole, plan)
        parts = known.parts
        blocks, ranges = (
            parts.blocks,
            layer_ranges(whole, parts=parts, layout=layout, partition=config.partition),
        )
        degree = layout.pipeline_parallel_size
        rehearse(
            whole, parts=parts, ranges=ranges, collects=plan.collects, pipeline_parallel_size=degree
        )
    if config.compile == "blocks" and blocks is None:
        find_blocks(whole)
    if config.fp8 is not None:
        check_fp8(
            whole, blocks=blocks, kinds=kinds, tensor_parallel_size=layout.tensor_parallel_size
        )
    check_recomputation(
        whole,
        policy=config.recompute,
        layers=config.recompute_layers,
        blocks=blocks,
        ranges=ranges,
        selective=plan.selective,
    )
    return known


def warn_of_batch_norm(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn of modules whose result depends on the number of microbatches or replicas."""
    local = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    kinds = (*local, nn.SyncBatchNorm) if config.has_microbatches else local
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if not names:
        return
    if config.has_microbatches:
        part, mend = "one microbatch", "num_microbatches=1 where nothing is cut into stages"
    elif layout.size("replica_sum") > 1:
        part, mend = "the part of one replica", "Trainer(sync_batchnorm=True) on GPUs"
    else:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"{', '.join(names[:3])}{more} normalize over the batch, which here is {part}: the model "
        "is not quite that of one device. Use "
        f"{mend}, or a normalization that does not look at other samples",
        stacklevel=2,
    )


def warn_of_balance_losses(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn if a Hugging Face mixture computes its load-balancing loss over fewer tokens.

    In one process that loss is computed over all tokens of the batch."""
    asked = any(
        getattr(getattr(module, "config", None), "output_router_logits", False)
        for module in model.modules()
    )
    replicas = layout.data_parallel_size * layout.context_parallel_size
    if asked and (config.has_microbatches or replicas > 1):
        warnings.warn(
            "output_router_logits=True: the model's load-balancing loss is a product of means "
            "over the tokens of one forward, here of a "
            f"microbatch on one of {replicas} replicas; the mean of these is trained, as under "
            "DDP, and not quite the loss of one process. "
            "It is with num_microbatches=1 and one replica; a GPTConfig with num_experts has a "
            "loss that is the same in every layout",
            stacklevel=2,
        )


def _converted(
    whole: nn.Module, convert: Callable[[nn.Module], nn.Module], config: PTDPConfig, *, late: bool
) -> nn.Module:
    try:
        return convert(_copy_without_tensors(whole))
    except RuntimeError as error:
        name = getattr(convert, "__qualname__", "convert_module")
        if late:
            way = (
                "what configure_model built. Build it in __init__, or use "
                "PTDPStrategy(meta_init=False)"
            )
        elif config.tensor_parallel_size > 1:
            way = "the copy that is checked before launch. Use tensor_parallel_size=1"
        else:
            # the ranks have values, and replaced modules matter to tensor parallelism alone
            return whole
        raise ValueError(
            f"the plugin's {name} needs values ({error}), which are not there yet in {way}"
        ) from error


def _check_late(model: nn.Module, *, built: Collection[str]) -> None:
    """Check that tensors built on the meta device can be given values.

    These are all tensors whose names are not in ``built``."""
    initialize: Initializers | None = None
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if is_parametrized(module) and any(
            prefix + key not in built for key, _ in module.named_parameters()
        ):
            raise ValueError(
                f"'{name}' is parametrized (weight norm, or the like) and was built in "
                "configure_model on the meta device, where its parts "
                "have no initial values: build the model in __init__, or set "
                "PTDPStrategy(meta_init=False)"
            )
        own = (*module._parameters.items(), *module._buffers.items())
        if any(
            tensor is not None and tensor.is_meta and prefix + key not in built
            for key, tensor in own
        ):
            initialize = initialize or Initializers(model)
            if not initialize.knows(name):
                raise ValueError(why_without_values(name, module))


def check_quantized(model: nn.Module) -> None:
    """Check that existing parameters have plain elements.

    Raises:
        ValueError: A parameter belongs to a library that quantizes.
    """
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        package = type(parameter).__module__.partition(".")[0]
        if package in ("bitsandbytes", "torchao"):
            raise ValueError(
                f"'{name}' is a {type(parameter).__name__} of {package}: quantized weights have "
                "no plain elements that ranks could compare "
                "and share; load them in bfloat16, which adapters beside them leave frozen and "
                "without optimizer states"
            )


def _check_libraries(model: nn.Module) -> None:
    """Check the versions of the libraries that define the modules in ``model``.

    Raises:
        RequirementError: A version is outside the declared range, where a split model may silently
            differ.
    """
    check_installed(*{type(module).__module__.partition(".")[0] for module in model.modules()})


def _check_compiled(model: nn.Module) -> None:
    for name, _ in model.named_modules():
        if name.rpartition(".")[2] == "_orig_mod":
            raise ValueError(
                f"{name.removesuffix('._orig_mod')} is wrapped by torch.compile(), which gives "
                "all modules inside other names and would "
                "compile across the stages: compile each block in place instead "
                "(PTDPStrategy(compile='blocks'))"
            )


def _check_skipped_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "config", None)):
            value = getattr(holder, "layerdrop", 0.0)
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"'{name or type(module).__name__}' skips layers at random "
                    f"(layerdrop={value}), but the stages of a pipeline wait for "
                    "each other's: build it with layerdrop=0.0 (encoder_layerdrop, "
                    "decoder_layerdrop), or use pipeline_parallel_size=1"
                )


def _check_gradient_hooks(hooked: Collection[str], kinds: Mapping[str, Kind]) -> None:
    for name, kind in kinds.items():
        parameter = next((one for one in hooked if one.startswith(f"{name}.")), None)
        if parameter is not None and not isinstance(kind, Alias | Partial | Region | Whole):
            raise ValueError(
                f"'{parameter}' has a hook on its gradient (register_hook), but "
                f"{kind.axis}_parallel_size splits it: the hook would "
                "see the gradient of a part. Change gradients in on_before_optimizer_step, which "
                "sees those of all parameters, or use "
                f"{kind.axis}_parallel_size=1"
            )


def _check_hooks(model: nn.Module, kinds: Mapping[str, Kind]) -> None:
    for name, kind in kinds.items():
        hooks, _ = forward_hooks(model.get_submodule(name))
        if not isinstance(kind, Alias | Partial | Region) and not all(
            map(is_capture, hooks.values())
        ):
            raise ValueError(
                f"'{name}' has a forward hook, but tensor parallelism puts another module in its "
                "place, which returns a part of the "
                "output: put the hook on the module around it, or use tensor_parallel_size=1"
            )


def whole_model(module: nn.Module, config: PTDPConfig) -> nn.Module:
    """Return the uncut module.

    If ``configure_model`` builds any part of it, return a copy, built without allocating memory if
    possible."""
    written_by = getattr(module, "configure_model", whole_model).__module__
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
            "configure_model calls from_pretrained, which would load all weights on every rank, "
            "where meta_init=True lets each rank hold "
            "its own part: build the model from its configuration "
            "(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))) and "
            "load the weights with the callback InitFrom(path), of the folder with config.json "
            "and safetensors; or "
            "PTDPStrategy(meta_init=False), where every rank loads the whole model and keeps its "
            "part"
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
