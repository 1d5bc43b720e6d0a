"""Search for a model's repeated containers and the modules before, between and after them.

Missing entries of a plan are found by running the forward without data, if the model has an example
input (``dry_run.py``). Otherwise the order of registration is taken for the call order. That
order is not trusted silently: a module that is called on the wrong side of the blocks raises an
error at the first microbatch (``stage.py``), which names the list that the module belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_ptdp.pipeline.containers import ModelParts, as_names, layers_of
from lightning_ptdp.pipeline.dry_run import call_order, trace_uses
from lightning_ptdp.shims.transformers import image_token_of
from lightning_ptdp.tensor_parallel import ParallelPlan
from lightning_ptdp.tensor_parallel.named_modules import nearest_names


def find_blocks(model: nn.Module, everywhere: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the dotted names of the repeated containers outside of the modules ``everywhere``.

    The list or sequence of modules with the most parameters is always a container. Other lists,
    such as that of an encoder next to that of a decoder, count if all of their members have the
    same class and if they hold a large enough fraction of the parameters.

    Raises:
        ValueError: No list has at least two members with parameters. The message says how to name a
            container.
    """
    containers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and not any(f"{name}.".startswith(f"{other}.") for other in everywhere)
    }
    counts = {
        name: [sum(p.numel() for p in child.parameters()) for child in module.children()]
        for name, module in containers.items()
    }
    sizes = {name: sum(count) for name, count in counts.items() if sum(c > 0 for c in count) > 1}
    if not sizes:
        raise ValueError(
            f"no repeated container found in {type(model).__name__}: it has no nn.ModuleList "
            "or nn.Sequential with at least two members that have parameters. Name the "
            "container with PTDPStrategy(plan=ParallelPlan(blocks='model.layers')), or use "
            "pipeline_parallel_size=1"
        )
    best = max(sizes, key=lambda name: sizes[name])
    if _is_detail(model, best, sizes[best]):
        raise ValueError(
            f"no repeated container found in {type(model).__name__}: its largest list of "
            f"modules, '{best}', is a small part of the model. Name the container with "
            "PTDPStrategy(plan=ParallelPlan(blocks='model.layers')), or use "
            "pipeline_parallel_size=1"
        )
    candidates = [
        name
        for name in sizes
        if sizes[name] >= _SHARE * sizes[best]
        # Neither is the other, or inside it.
        and not f"{name}.".startswith(f"{best}.")
        and not f"{best}.".startswith(f"{name}.")
        and not {*containers[name].children()} & {*containers[best].children()}
        and len({type(child) for child in containers[name].children()}) == 1
    ]
    outermost = [
        name for name in candidates if not any(name.startswith(f"{other}.") for other in candidates)
    ]
    return _in_order(
        [name for name in sizes if name == best or name in outermost],
        best,
        call_order(model) if candidates else None,
    )


_SHARE = 1 / 8
"""Smallest share of the largest container's parameters for another container to count.

A smaller one may be a head.
"""


def _is_detail(model: nn.Module, name: str, size: int) -> bool:
    """Return True for a list of single layers in a model with much larger modules.

    The projections of an attention's heads are such a list.
    """
    container = model.get_submodule(name)
    if not isinstance(container, nn.ModuleList) or any(
        list(child.children()) for child in container
    ):
        return False
    parent = model
    other_size = 0
    for step in name.split("."):
        composite = [
            child
            for key, child in parent.named_children()
            if key != step and list(child.children())
        ]
        parts = [
            part
            for child in composite
            for part in child.modules()
            if not isinstance(part, nn.Embedding)
        ]
        other_size += sum(p.numel() for part in parts for p in part.parameters(recurse=False))
        parent = parent.get_submodule(step)
    return size < _SHARE * other_size


_EMPTY = ParallelPlan()


def find_parts(model: nn.Module, plan: ParallelPlan = _EMPTY) -> ModelParts:
    """Return the positions of the modules with parameters relative to the containers.

    With several containers, a module that runs before the first one is assumed to be needed before
    the other containers too, unless it is named in ``before``: a target's embedding may be looked
    up before the encoder runs.

    Args:
        model: The whole, uncut module.
        plan: Its ``blocks`` are found if None. Modules in ``before``, ``between`` and ``after`` are
            known to run there, regardless of their order of registration. Those in ``everywhere``
            are known to be used without being called; uses that an example shows are added.

    Raises:
        ValueError: A named module does not exist (the message lists the nearest names); or the
            forward does not call the layers one after the other; or it calls a module on both sides
            of them.
    """
    names = find_blocks(model, plan.everywhere) if plan.blocks is None else as_names(plan.blocks)
    for name in names:
        _check_container(model, name)
    parts = {name: list(getattr(plan, name)) for name in ("before", "between", "after")}
    for field, members in {**parts, "everywhere": plan.everywhere}.items():
        for name in members:
            _named(model, name, field)
    guessed = _by_registration(
        model, names, named={name for members in parts.values() for name in members}
    )
    order, used = trace_uses(model)
    for name, place in guessed.items():
        places = (
            {place}
            if order is None
            else _called_at(name, order, model=model, blocks=names, default=place)
        )
        if 0 in places:
            parts["before"].append(name)
        if len(names) > 1 and min(places) < len(names):
            parts["between"].append(name)
        if len(names) in places:
            parts["after"].append(name)
    outside = {top for members in parts.values() for top in members}
    uncalled = {name for name in used if any(f"{name}.".startswith(f"{top}.") for top in outside)}
    return ModelParts(
        blocks=names,
        everywhere=tuple(sorted({*plan.everywhere, *uncalled})),
        **{field: tuple(items) for field, items in parts.items()},
    )


def _by_registration(model: nn.Module, blocks: Sequence[str], *, named: set[str]) -> dict[str, int]:
    """Return the modules with parameters outside the containers, by name.

    The value is the number of containers registered before the module, or before the first
    registration of a module with several names.
    """
    positions: dict[str, int] = {}
    first: dict[nn.Module, int] = {}
    passed = 0

    def walk(module: nn.Module, prefix: str) -> None:
        nonlocal passed
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if name in blocks:
                passed += 1
            elif any(block.startswith(f"{name}.") for block in blocks):
                walk(child, f"{name}.")
            elif list(child.parameters()):
                for inner in child.modules():
                    first.setdefault(inner, passed)
                if name not in named:
                    positions[name] = first[child]

    if "" not in blocks:
        walk(model, "")
    return positions


def _called_at(
    name: str, order: Sequence[str], *, model: nn.Module, blocks: Sequence[str], default: int
) -> set[int]:
    """Return how many containers the forward calls before each call of ``name``.

    Calls of submodules of ``name`` count as well. The result is ``{default}`` if the forward calls
    none of them.

    Raises:
        ValueError: The layers are not called one after the other, or ``name`` is called on both
            sides of them.
    """
    spans = []
    for container in blocks:
        layers = [layer.name for layer in layers_of(model, container)]
        called = [call for call in order if call in set(layers)]
        if not called:  # the example belongs to another part of the model
            return {default}
        if called != layers:
            raise ValueError(
                f"'{container}' looks like the repeated container of {type(model).__name__}, but "
                f"its forward does not call its {len(layers)} members once each and in order. Name "
                "the container with PTDPStrategy(plan=ParallelPlan(blocks='model.layers')), or use "
                "pipeline_parallel_size=1"
            )
        spans.append((order.index(layers[0]), order.index(layers[-1])))
    for (first, (_, stop)), (second, (start, _)) in pairwise(zip(blocks, spans, strict=True)):
        if stop > start:
            raise ValueError(
                f"blocks={tuple(blocks)!r}, but the forward of {type(model).__name__} does not "
                f"call all of '{first}' before '{second}'. Name the containers in the order of "
                "their calls, or only one of them"
            )
    named = model.get_submodule(name)
    name = next(other for other, module in model.named_modules() if module is named)
    if any(f"{name}.".startswith(f"{container}.") for container in blocks):
        return {default}  # a second name of a block
    calls = [
        place for place, call in enumerate(order) if call == name or call.startswith(f"{name}.")
    ]
    sides = {sum(start < place for start, _ in spans) for place in calls}
    is_inside = any(start <= place <= stop for place in calls for start, stop in spans)
    if is_inside or (len(blocks) in sides and len(sides) > 1):
        containers = " and ".join(f"'{container}'" for container in blocks)
        raise ValueError(
            f"'{name}' is called more than once, before, between or after the layers of "
            f"{containers}, but a pipeline holds it on one stage only. Use two modules with a "
            "tied weight, or pipeline_parallel_size=1"
        )
    return sides or {default}


def _in_order(names: Sequence[str], best: str, order: Sequence[str] | None) -> tuple[str, ...]:
    """Return the containers in call order.

    Only the largest container is returned if calls of containers are interleaved. ``order`` begins
    with the called model. If a container is not in it, the order of registration is taken.
    """
    if order is None or (order[0] and any(not n.startswith(f"{order[0]}.") for n in names)):
        return tuple(names)
    spans = {}
    for name in names:
        calls = [place for place, call in enumerate(order) if call.startswith(f"{name}.")]
        if calls:
            spans[name] = (calls[0], calls[-1])
    ordered = sorted(spans, key=lambda name: spans[name])
    if best not in ordered or any(
        spans[first][1] > spans[second][0] for first, second in pairwise(ordered)
    ):
        return (best,)
    return tuple(ordered)


def _check_container(model: nn.Module, blocks: str) -> None:
    container = _named(model, blocks, "blocks")
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        raise ValueError(
            f"blocks='{blocks}' is a {type(container).__name__}, but the repeated container "
            "must be an nn.ModuleList, nn.Sequential or nn.ModuleDict"
        )
    unpacked = [
        key
        for key, child in container.named_children()
        if isinstance(child, (nn.ModuleList, nn.ModuleDict))
    ]
    if unpacked:
        raise ValueError(
            f"blocks='{blocks}' has lists of modules as members, such as '{blocks}.{unpacked[0]}'. "
            "The model unpacks them instead of calling them, so no stage can begin at one. Put the "
            "modules of each list into a module with a forward, or use pipeline_parallel_size=1"
        )


def _named(model: nn.Module, name: str, field: str) -> nn.Module:
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    if name not in names:
        raise ValueError(
            f"{field}='{name}' is not a module of {type(model).__name__}; "
            f"{nearest_names(name, names)}"
        )
    return model.get_submodule(name)


@dataclass(frozen=True)
class KnownParts:
    """Places of a whole model's modules.

    They are kept, because finding them takes several runs without data.

    Attributes:
        parts: The places.
        plan: The plan by which they were found.
        image_token: Id of the tokens that stand for images, if the model takes images.
        found_for: Names and classes of the modules, and the plan's fields about places.
    """

    parts: ModelParts
    plan: ParallelPlan
    image_token: int | None
    found_for: tuple[object, ...]

    @classmethod
    def of(
        cls, module: nn.Module, plan: ParallelPlan, known: KnownParts | None = None
    ) -> KnownParts:
        """Return the places by the plan and the model, or ``known`` if it still applies.

        Hooks may have changed the model since ``known`` was found.

        Raises:
            ValueError: See ``find_parts``.
        """
        modules = (
            f"{name}: {type(child).__qualname__}"
            for name, child in module.named_modules(remove_duplicate=False)
        )
        fields = (plan.blocks, plan.before, plan.between, plan.after, plan.everywhere)
        found_for = (*fields, *modules)
        if known is not None and known.found_for == found_for:
            return known
        return cls(find_parts(module, plan), plan, image_token_of(module), found_for)
