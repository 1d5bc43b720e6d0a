"""Suggested lines of a plan for an unknown model.

The message that asks for a plan contains them. Feed-forward parts are recognized by their shapes,
attentions by their class. Users must review a suggestion, because a forward may use a part in ways
that its form does not show.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["suggested_tensor"]


def suggested_tensor(model: nn.Module) -> dict[str, str]:
    """Return suggested kinds for the parts of repeated layers, by patterns of their names."""
    members = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        for key, child in module.named_children()
        if any(True for _ in child.children())
    }
    found: dict[str, str] = {}
    for name, kind in _parts(model):
        pattern = _pattern(name, members)
        if found.setdefault(pattern, kind) != kind:
            return {}  # one pattern has parts of different kinds
    return found


def _pattern(name: str, members: set[str]) -> str:
    parts = name.split(".")
    return ".".join(
        "*" if ".".join(parts[: at + 1]) in members else part for at, part in enumerate(parts)
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    done: set[nn.Module] = set()
    # Innermost first: a part is the smallest module that holds both projections.
    for name, module in sorted(model.named_modules(), key=lambda entry: -entry[0].count(".")):
        if isinstance(module, nn.MultiheadAttention):
            yield name, "attention"
            done.update(module.modules())
        elif not done & set(module.modules()):
            pair = _feed_forward(module)
            yield from ((f"{name}.{inner}", kind) for inner, kind in pair.items())
            done.update(module.modules() if pair else ())


def _feed_forward(module: nn.Module) -> dict[str, str]:
    """Return "column" for the projections up and "row" for the one down.

    The result is empty if the module is not a feed-forward part. Such a part has one or two
    projections up.
    """
    linear = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    if len(linear) not in (2, 3) or "" in linear:
        return {}
    *ups, down = linear.values()
    wide, narrow = down.in_features, down.out_features
    fits = wide > narrow and all((up.in_features, up.out_features) == (narrow, wide) for up in ups)
    others = [
        tuple(p.shape)
        for child in module.modules()
        if child not in linear.values()
        for p in child.parameters(recurse=False)
    ]
    if not fits or any(shape != (narrow,) for shape in others):
        return {}
    *first, last = linear
    return {**dict.fromkeys(first, "column"), last: "row"}
