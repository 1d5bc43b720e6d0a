"""Finding the repeated container of a model and what stands before and after it.

The order of registration is only a guess at the order of the calls. It is never trusted silently: a module that turns out to be
called on the wrong side of the blocks raises at the first microbatch (``stage.py``), naming the list that it belongs to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn

from lightning_ptdp.pipeline.stage import ModelParts

__all__ = ["find_blocks", "find_parts", "num_blocks"]


def num_blocks(model: nn.Module, blocks: str) -> int:
    """Number of layers in the container."""
    return len(_container(model, blocks)._modules)


def find_blocks(model: nn.Module) -> str:
    """Dotted name of the repeated container: the list or sequence of modules that holds the most parameters.

    Raises:
        ValueError: There is none with at least two members that have parameters; says how to name it.
    """
    best, most = None, 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            counts = [sum(p.numel() for p in child.parameters()) for child in module.children()]
            if sum(c > 0 for c in counts) > 1 and sum(counts) > most:
                best, most = name, sum(counts)
    if best is None:
        raise ValueError(
            f"no repeated container found in {type(model).__name__}: looked for an nn.ModuleList or nn.Sequential with at least two "
            "members that have parameters. Name it with PTDPStrategy(plan=ParallelPlan(blocks='model.layers'))"
        )
    return best


def find_parts(
    model: nn.Module, *, blocks: str | None = None, before: Iterable[str] = (), after: Iterable[str] = ()
) -> ModelParts:
    """Where the modules with parameters stand relative to the container.

    Args:
        model: The whole, uncut module.
        blocks: Name of the container; found if None.
        before: Modules known to run before it, in spite of where they are registered.
        after: Modules known to run after it.

    Raises:
        ValueError: A named module does not exist (with the nearest names).
    """
    blocks = find_blocks(model) if blocks is None else blocks
    _container(model, blocks)
    for field, names in (("before", tuple(before)), ("after", tuple(after))):
        for name in names:
            _named(model, name, field)
    known = {*before, *after}
    first, last = list(before), list(after)
    path = blocks.split(".") if blocks else []
    for depth, step in enumerate(path):
        prefix = ".".join(path[:depth])
        passed = False
        for key, child in model.get_submodule(prefix).named_children():
            name = f"{prefix}.{key}" if prefix else key
            if key == step:
                passed = True
            elif name not in known and any(True for _ in child.parameters()):
                (last if passed else first).append(name)
    return ModelParts(blocks=blocks, before=tuple(first), after=tuple(last))


def _container(model: nn.Module, blocks: str) -> nn.Module:
    container = _named(model, blocks, "blocks")
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        raise ValueError(
            f"blocks='{blocks}' is a {type(container).__name__}; the repeated container must be an nn.ModuleList, nn.Sequential or "
            "nn.ModuleDict"
        )
    return container


def _named(model: nn.Module, name: str, field: str) -> nn.Module:
    names = [n for n, _ in model.named_modules()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3) or [n for n in names if n][:5]
        raise ValueError(f"{field}='{name}' names no module of {type(model).__name__}; nearest: {', '.join(near)}")
    return model.get_submodule(name)
