"""Finding the repeated container of a model and what stands before and after it.

What a plan does not say is seen by running the forward without data, where there is an example of its input (``call_order.py``). Else the
order of registration is taken for the order of the calls, but never trusted silently: a module that turns out to be called on the
wrong side of the blocks raises at the first microbatch (``stage.py``), naming the list that it belongs to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from lightning_ptdp.pipeline.call_order import call_order
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
        ValueError: A named module does not exist (with the nearest names); the forward does not call the layers one after the other,
            or calls a module on both sides of them.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    _container(model, blocks)
    for field, names in (("before", tuple(before)), ("after", tuple(after))):
        for name in names:
            _named(model, name, field)
    first, last = list(before), list(after)
    guessed = _by_registration(model, blocks, known={*before, *after})
    order = call_order(model) if guessed else None
    for name, passed in guessed.items():
        if order is not None:
            passed = _is_called_after(name, order, model=model, blocks=blocks, otherwise=passed)
        (last if passed else first).append(name)
    return ModelParts(blocks=blocks, before=tuple(first), after=tuple(last))


def _by_registration(model: nn.Module, blocks: str, *, known: set[str]) -> dict[str, bool]:
    """The modules with parameters beside the container, and whether each is registered behind it."""
    found: dict[str, bool] = {}
    path = blocks.split(".") if blocks else []
    for depth, step in enumerate(path):
        prefix = ".".join(path[:depth])
        passed = False
        for key, child in model.get_submodule(prefix).named_children():
            name = f"{prefix}.{key}" if prefix else key
            if key == step:
                passed = True
            elif name not in known and any(True for _ in child.parameters()):
                found[name] = passed
    return found


def _is_called_after(name: str, order: Sequence[str], *, model: nn.Module, blocks: str, otherwise: bool) -> bool:
    """Whether the forward calls ``name``, or what is in it, behind the layers; ``otherwise`` if it does not call it at all.

    Raises:
        ValueError: The layers are not called one after the other, or ``name`` is called before and behind them.
    """
    keys = list(_container(model, blocks)._modules)
    layers = [f"{blocks}.{key}" if blocks else key for key in keys]
    called = [call for call in order if call in set(layers)]
    if not called:  # the example is that of another part of the model
        return otherwise
    if called != layers:
        raise ValueError(
            f"'{blocks}' looks like the repeated container of {type(model).__name__}, but its forward does not call its {len(keys)} "
            "members once each and in order; name the container with PTDPStrategy(plan=ParallelPlan(blocks='model.layers'))"
        )
    start, stop = order.index(layers[0]), order.index(layers[-1])
    places = [place for place, call in enumerate(order) if call == name or call.startswith(f"{name}.")]
    sides = {place > stop for place in places if not start <= place <= stop}
    if len(sides) > 1 or any(start <= place <= stop for place in places):
        raise ValueError(
            f"'{name}' is called more than once, before, between or behind the layers of '{blocks}'; a pipeline keeps it at one end. "
            "Use two modules with a tied weight, or pipeline_parallel_size=1"
        )
    return sides.pop() if sides else otherwise


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
