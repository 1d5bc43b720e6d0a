"""Replacement of ordinary modules by parallel versions with their local values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from torch import nn

from lightning_ptdp.parameters.placement import Placement
from lightning_ptdp.shims.torch import forward_hooks
from lightning_ptdp.shims.transformers import is_gradient_request
from lightning_ptdp.tensor_parallel.kinds import Kind, ModulePlace
from lightning_ptdp.tensor_parallel.named_modules import matches
from lightning_ptdp.tensor_parallel.parallel_plan import ParallelPlan
from lightning_ptdp.tensor_parallel.region import join_around, split_sequence_in_blocks
from lightning_ptdp.world.mesh import Group

Shared = dict[int, nn.Parameter]


def shard_module(
    module: nn.Module, kind: Kind, place: ModulePlace
) -> tuple[nn.Module, dict[str, Placement]]:
    """Return the parallel version of a module and the placements of its parameters.

    The parallel version keeps the dtype, device (meta included), ``requires_grad``, training mode
    and the parameters' own Python attributes. It keeps only the forward hooks that request a
    gradient.

    Some modules are returned unchanged: a ``Position`` module without sequence parallelism, a
    ``Partial`` or ``Alias`` module, and every module in a group of one. A ``Region`` module is
    returned with hooks added. Once all modules have been sharded, ``replace_aliases`` completes the
    aliases and ``split_sequence`` completes the ``Whole`` modules.

    Args:
        module: A module that ``plan.check`` has accepted.
        kind: How to shard it.
        place: Group and options.

    Returns:
        The replacement module, and a sharding for each parameter by its name in the module.
    """
    if place.group.size == place.tensor.size == 1:
        return module, {
            name: Placement.replicated(parameter.shape)
            for name, parameter in module.named_parameters()
        }
    sharded, placements = kind.shard(module, place)
    if sharded is not module:
        for hook in forward_hooks(module)[0].values():
            if is_gradient_request(hook):
                sharded.register_forward_hook(hook)
    return sharded, placements


def split_sequence(model: nn.Module, plan: ParallelPlan, *, group: Group) -> None:
    """Install the hooks that split and join the sequence under sequence parallelism.

    The sharded modules do their own splitting; these hooks cover the other modules.
    """
    for name, module in model.named_modules():
        if any(kind.keeps_sequence and matches(name, key) for key, kind in plan.kinds.items()):
            join_around(module, group=group)
    if plan.sequence == "blocks":
        blocks = list(model.get_submodule(plan.split_blocks).children())
        # A block on another pipeline stage has no children, and nothing is split there.
        first, last = (
            block if list(block.children()) else None for block in (blocks[0], blocks[-1])
        )
        split_sequence_in_blocks(first, last, group=group)


def replace_aliases(model: nn.Module, shared: Shared) -> None:
    """Replace every reference to an original parameter with its sharded version."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in shared:
                module._parameters[key] = shared[id(parameter)]


# ---- Outputs that a Hugging Face model records ---------------------------------------------------
#
# They are refused if a rank has only a part of them.


_BY_HEAD = ("attentions", "cross_attentions")
_BY_SEQUENCE = ("hidden_states", "router_logits", *_BY_HEAD)


def refuse_captured_parts(
    model: nn.Module, divided: Collection[str], *, sequence_parallel: bool
) -> None:
    """Make Hugging Face models raise a ValueError if a recorded output is only a part.

    A rank has the attention weights of its own heads only. Under sequence parallelism it has only
    its slice of every output with a sequence dimension. Applies to every Hugging Face model inside
    ``model`` that contains one of the ``divided`` modules. A vision tower usually has none.
    """
    for module in _recording(model, divided):
        module.register_forward_hook(partial(_check, sequence_parallel))


def check_captured(model: nn.Module, divided: Collection[str], *, sequence_parallel: bool) -> None:
    """Check the outputs requested in the configurations of the same Hugging Face models.

    Raises:
        ValueError: A rank would have only a part of a requested output.
    """
    for module in _recording(model, divided):
        _refuse_parts(getattr(module, "config", None), "output_", sequence_parallel)


def _recording(model: nn.Module, divided: Collection[str]) -> Iterator[nn.Module]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if hasattr(module, "_can_record_outputs") and any(
            inner.startswith(prefix) for inner in divided
        ):
            yield module


def _check(sequence_parallel: bool, _module: nn.Module, _args: object, output: object) -> None:
    _refuse_parts(output, "", sequence_parallel)


def _refuse_parts(source: object, prefix: str, sequence_parallel: bool) -> None:
    for kind in _BY_SEQUENCE if sequence_parallel else _BY_HEAD:
        if getattr(source, prefix + kind, None):
            field = (
                "sequence_parallel=True"
                if sequence_parallel and kind not in _BY_HEAD
                else "tensor_parallel_size > 1"
            )
            part = "slice of the sequence" if kind not in _BY_HEAD else "share of the heads"
            raise ValueError(
                f"output_{kind}=True cannot be combined with {field}, because a rank has the "
                f"{kind} of its {part} only. Use only one of them"
            )
