"""Activation recomputation: a forward's saved tensors are dropped and computed again.

``full`` recomputes whole blocks and keeps only a block's input. ``selective`` recomputes only the
modules that the plan names: for a GPT the attention core, which keeps much and costs little (arXiv
2205.05198, section 5). The recomputation belongs to the backward of its microbatch and therefore
fits any schedule. The backward takes longer, and a stage holds fewer bytes for each microbatch in
flight::

    kept for the backward of a block       none           selective                  full
                                           everything     all but the core's inside  the input (1/t of it: ``shard_input``)

``offload`` recomputes nothing: a block's saved tensors stay in host memory until its backward
(``offload.py``).

The forward of the module is replaced (``own_forward.py``). The module's own hooks run once. Hooks
of modules inside it run in the recomputation too. Random numbers are replayed,
so that dropout drops the same elements. Two things do not work when a forward runs twice: state
that the forward changes (running statistics; a Hugging Face model's cache, so build it with
``use_cache=False``), and control flow that depends on such state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.blocks.local_blocks import LocalBlock, local_blocks
from lightning_ptdp.blocks.offload import Offload, Offloaded
from lightning_ptdp.forward.own_forward import OwnForward, replace_forward
from lightning_ptdp.forward.random_draws import RandomDraws
from lightning_ptdp.forward.surroundings import Surroundings
from lightning_ptdp.pipeline.containers import Blocks, as_names, layers_of
from lightning_ptdp.pipeline.discover import find_blocks
from lightning_ptdp.shims.torch import untraced
from lightning_ptdp.tensor_parallel.collectives import start_all_gather
from lightning_ptdp.tensor_parallel.named_modules import matches, nearest_names
from lightning_ptdp.world.mesh import Group

RecomputePolicy = Literal["none", "full", "selective", "offload"]

Layers = int | Sequence[int] | None
Ranges = Sequence[tuple[int, int]]


def check_recompute_options(policy: str, layers: Layers = None, *, num_stages: int) -> None:
    """Check the options as far as possible without a model.

    Args:
        policy: The option ``recompute``.
        layers: The option ``recompute_layers``.
        num_stages: p * v.

    Raises:
        ValueError: ``layers`` has no effect, or is neither one number nor one for each stage.
    """
    if layers is None:
        return
    if policy == "none":
        raise ValueError(
            f"recompute_layers={_shown(layers)} has no effect with recompute='none'. Use "
            "recompute='full', 'selective' or 'offload', or leave recompute_layers out"
        )
    if isinstance(layers, Sequence) and len(layers) != num_stages:
        raise ValueError(
            f"recompute_layers={_shown(layers)} has {len(layers)} entries, but pipeline_parallel_size "
            f"* virtual_pipeline_size = {num_stages}. Give one number per stage, or one number "
            "for all stages"
        )


def check_recomputation(
    module: nn.Module,
    *,
    policy: str,
    blocks: Blocks | None,
    ranges: Ranges = (),
    layers: Layers = None,
    selective: Sequence[str] = (),
) -> None:
    """Check the options of ``apply_recomputation`` against the whole, uncut module.

    The module may be on the meta device.

    Raises:
        ValueError: A stage has fewer layers than must be recomputed; there is no container; the
            plan does not define "selective"; or its patterns match nothing inside the blocks.
    """
    if policy == "none":
        return
    names = find_blocks(module) if blocks is None else as_names(blocks)
    _chosen_numbers(module, names, ranges, layers)
    if policy != "selective":
        return
    if not selective:
        raise ValueError(
            "recompute='selective', but the plan does not name the modules to recompute. Add "
            "patterns of your module names, such as "
            f"ParallelPlan(selective=(\"{names[0]}.*.attention.core\",)), or use recompute='full'"
        )
    modules = {
        name: child
        for layer in layers_of(module, names)
        for name, child in module.get_submodule(layer.name).named_modules(
            prefix=layer.name, remove_duplicate=False
        )
    }
    for pattern in selective:
        if not any(matches(name, pattern) for name in modules):
            shown = " and ".join(f"'{name}'" for name in names)
            raise ValueError(
                f"the pattern {pattern!r} in the plan's selective matches no module inside "
                f"{shown}; {nearest_names(pattern, modules)}"
            )


def apply_recomputation(
    module: nn.Module,
    *,
    policy: str,
    blocks: Blocks | None,
    ranges: Ranges = (),
    layers: Layers = None,
    selective: Sequence[str] = (),
    shard_input: Group | None = None,
    surroundings: Surroundings | None = None,
) -> None:
    """Make this rank's part of a module recompute, in place.

    Args:
        module: The module after ``parallelize``. Blocks of other stages are skipped.
        policy: "none" (nothing changes), "full", "selective" or "offload".
        blocks: Dotted names of the repeated containers; found if None.
        ranges: Half-open layer ranges, one per stage; empty: one stage of all layers.
        layers: Number of layers of each stage, counted from its first, that are recomputed or
            offloaded: one number for all stages (in a stage with fewer layers, all of them) or one
            per stage. None: all layers.
        selective: Glob patterns of the modules inside the blocks that "selective" recomputes
            (``ParallelPlan.selective``).
        shard_input: The tensor group, if its members hold the same input of a block (no sequence
            parallelism): "full" then keeps 1/t of the input and gathers it for the recomputation
            (arXiv 2205.05198, section 4). An input that t does not divide is kept whole.
        surroundings: Contexts around a forward.

    Raises:
        ValueError: A stage has fewer layers than must be recomputed.
    """
    if policy == "none":
        return
    blocks = find_blocks(module) if blocks is None else blocks
    numbers = _chosen_numbers(module, blocks, ranges, layers)
    stage_blocks = list(local_blocks(module, blocks))
    surroundings = surroundings if surroundings is not None and surroundings.recompute else None
    if policy == "offload":
        offload = Offload()
        for block in stage_blocks:
            replace_forward(
                block.module,
                Offloaded,
                surroundings=surroundings,
                offload=offload,
                layer=block.number,
                sends=block.number in numbers,
            )
        return
    is_shared = policy == "full" and shard_input is not None and shard_input.size > 1
    group = shard_input if is_shared else None
    for block in stage_blocks:
        if block.number not in numbers:
            continue
        targets = _outermost(block, selective) if policy == "selective" else [block.module]
        for target in targets:
            draws = RandomDraws(target)
            replace_forward(
                target, Recomputed, surroundings=surroundings, shard_input=group, draws=draws
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Recomputed(OwnForward):
    """Forward of a module that is recomputed.

    Attributes:
        shard_input: Group over which the first input is kept in parts.
        draws: Returns True if random numbers must be replayed.
    """

    shard_input: Group | None
    draws: RandomDraws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        # Pass all arguments by position: torch searches these for tensors to save and for devices
        # whose random state it replays.
        inputs = (*args, *kwargs.values())
        run = partial(self._run, tuple(kwargs))
        group = self.shard_input
        if (
            group is not None
            and inputs
            # The joined parts are the same tensor, strides included.
            and isinstance(inputs[0], Tensor)
            and inputs[0].is_contiguous()
            and inputs[0].numel() % group.size == 0
        ):
            part = inputs[0].detach().view(group.size, -1)[group.rank].clone()
            run = partial(_InParts(inputs[0], group), run)
            inputs = (part, *inputs[1:])
        if self.surroundings is None:
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=self.draws())
        return _checkpoint_in(self.surroundings, run, inputs, self.draws())

    def _run(self, keys: tuple[str, ...], *inputs: Any) -> Any:
        count = len(inputs) - len(keys)
        return self.original(*inputs[:count], **dict(zip(keys, inputs[count:], strict=True)))


@untraced
def _checkpoint_in(
    surroundings: Surroundings, run: Callable[..., Any], inputs: tuple[Any, ...], draws: bool
) -> Any:
    """Run ``checkpoint`` with its contexts, untraced.

    A compiler supports recomputation, but not its contexts.
    """
    return checkpoint(
        run,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=draws,
        context_fn=surroundings.recomputation,
    )


class _InParts:
    """Function that runs on the whole input first, and on gathered parts when recomputed."""

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self._full: Tensor | None = tensor
        self._group = group
        self._shape = tensor.shape
        self._requires_grad = tensor.requires_grad

    def __call__(self, run: Callable[..., Any], part: Tensor, *inputs: Any) -> Any:
        tensor = self._full
        self._full = None
        if tensor is None:
            tensor = start_all_gather(part, dim=0, group=self._group).wait().view(self._shape)
            tensor.requires_grad_(self._requires_grad)
        return run(tensor, *inputs)


def _chosen_numbers(module: nn.Module, blocks: Blocks, ranges: Ranges, layers: Layers) -> set[int]:
    """Return the numbers of the layers that are recomputed: the first ones of each stage.

    Raises:
        ValueError: A stage has fewer layers than must be recomputed.
    """
    ranges = ranges or ((0, len(layers_of(module, blocks))),)
    counts = _layers_a_stage(layers, [stop - start for start, stop in ranges])
    return {
        number
        for (start, _), count in zip(ranges, counts, strict=True)
        for number in range(start, start + count)
    }


def _outermost(block: LocalBlock, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside ``block`` that match a pattern.

    Matches inside of these are left out, because they would be recomputed twice.
    """
    outer = ""
    for inner, module in block.module.named_modules(prefix=block.name, remove_duplicate=False):
        if not (outer and inner.startswith(f"{outer}.")) and any(
            matches(inner, pattern) for pattern in patterns
        ):
            outer = inner
            yield module


def _layers_a_stage(layers: Layers, sizes: list[int]) -> list[int]:
    if layers is None:
        return sizes
    if isinstance(layers, int):
        if layers > max(sizes):
            shown = ", ".join(map(str, sizes))
            raise ValueError(
                f"recompute_layers={layers}, but the stages have {shown} layers. Use at most "
                f"{max(sizes)}, or None for all layers"
            )
        return [min(layers, size) for size in sizes]
    for stage, (count, size) in enumerate(zip(layers, sizes, strict=True)):
        if count > size:
            fits = [min(count, size) for count, size in zip(layers, sizes, strict=True)]
            raise ValueError(
                f"recompute_layers={_shown(layers)} recomputes {count} layers of stage "
                f"{stage}, which has {size}. Use at most {fits}"
            )
    return list(layers)


def _shown(layers: Layers) -> str:
    return repr(list(layers) if isinstance(layers, tuple) else layers)
