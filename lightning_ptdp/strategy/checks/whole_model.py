"""The uncut module: its plan, and a copy of it before launch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.models.plans import find_plan, suggested_tensor
from lightning_ptdp.shims.lightning import NAMESPACES, LightningModule
from lightning_ptdp.tensor_parallel import ParallelPlan

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
            "configure_model calls from_pretrained, which would load all weights on every "
            "rank, although meta_init=True lets each rank load only its own part. Build the "
            "model from its configuration "
            "(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))) and load "
            "the weights with the callback InitFrom(path), where path is the folder with "
            "config.json and safetensors. Otherwise, use PTDPStrategy(meta_init=False), which "
            "loads the whole model on every rank"
        ) from error


def converted_copy(
    whole: nn.Module, convert: Callable[[nn.Module], nn.Module], config: PTDPConfig, *, late: bool
) -> nn.Module:
    """Return a copy of the uncut module after ``convert``.

    Args:
        whole: The uncut module.
        convert: The precision plugin's ``convert_module``.
        config: The strategy's options.
        late: Whether ``configure_model`` has built the module on the meta device.

    Raises:
        ValueError: The plugin needs values, which are not there yet.
    """
    try:
        return convert(_copy_without_tensors(whole))
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
            return whole
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
