"""Lookup of the plan for a class of module, and suggestions where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_ptdp.models.plans.block_parts import family_plan, joined
from lightning_ptdp.models.plans.declared import declared_plan, declares_plan
from lightning_ptdp.models.plans.families import (
    ENCODER_DECODERS,
    FAMILIES,
    TRANSFORMER,
    TRANSFORMER_ENCODER,
)
from lightning_ptdp.parameters.structure_copies import shallow_copy
from lightning_ptdp.shims.peft import replaced_by
from lightning_ptdp.shims.transformers import collects_by_itself
from lightning_ptdp.tensor_parallel import Experts, Kind, ParallelPlan


def plan_for(module: nn.Module, prefix: str = "") -> ParallelPlan | None:
    """Return the plan of a module without adapters, with the name ``prefix``.

    The class of the module must be known, or the module must declare a plan.

    Returns:
        None if the class is unknown. A subclass is known if it inherits the forward of a known
        class.
    """
    forward = getattr(type(module), "forward", None)  # classes of torch.jit have none
    for kind in type(module).__mro__:
        if forward is not vars(kind).get("forward"):
            continue
        if kind is nn.TransformerEncoder:
            return family_plan(TRANSFORMER_ENCODER, module, prefix)
        if (
            kind is nn.Transformer
            # A user may pass another encoder or decoder.
            and isinstance(module.encoder, nn.TransformerEncoder)
            and isinstance(module.decoder, nn.TransformerDecoder)
        ):
            return family_plan(TRANSFORMER, module, prefix)
        folder = (
            kind.__module__.split(".")[2]
            if kind.__module__.startswith("transformers.models.")
            else ""
        )
        family = FAMILIES.get(folder) or ENCODER_DECODERS.get(folder)
        if family is not None and kind.__name__ in family.classes:
            return family_plan(family, module, prefix)
    if _is_hugging_face(module) and declares_plan(module):
        return declared_plan(module, prefix)
    return None


def find_plan(model: nn.Module) -> ParallelPlan | None:
    """Return the plan of the known models inside ``model``; None if there are none.

    If a known model is part of a larger known one, such as a model with a head, the plan is that
    of the larger one. The plan of several models, such as a student and its teacher, says how each
    is split among tensor ranks. It names no blocks, because the order of their calls is unknown.
    """
    plans = list(_known(without_adapters(model), ""))
    if len(plans) < 2:
        return plans[0] if plans else None
    sequences = {plan.sequence for plan in plans}
    return ParallelPlan(
        tensor={name: kind for plan in plans for name, kind in plan.tensor.items()},
        numbers={name: numbers for plan in plans for name, numbers in plan.numbers.items()},
        selective=tuple(pattern for plan in plans for pattern in plan.selective),
        sequence=plans[0].sequence if len(sequences) == 1 else None,
        collects=any(plan.collects for plan in plans),
        why_not={reason: text for plan in plans for reason, text in plan.why_not.items()},
    )


def _known(module: nn.Module, prefix: str) -> Iterator[ParallelPlan]:
    plan = plan_for(module, prefix)
    if plan is not None:
        collects = plan.collects or collects_by_itself(module)
        yield replace(plan, tensor={**plan.tensor, **_experts(module, prefix)}, collects=collects)
        return
    for name, child in module.named_children():
        yield from _known(child, joined(prefix, name))


def _experts(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the modules that hold all experts of a layer.

    They are recognized by their form, which all mixtures of Hugging Face share.
    """
    kind = Experts()
    names = (joined(prefix, name) for name, child in module.named_modules() if kind.fits(child))
    return dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names), kind)


def _is_hugging_face(module: nn.Module) -> bool:
    """Return True if the module is a Hugging Face model.

    The class is recognized by name, so that transformers need not be imported. Remote code is
    defined elsewhere but extends classes of transformers.
    """
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def without_adapters(model: nn.Module) -> nn.Module:
    """Return a view of a model without peft's adapters, for an inspection of its structure.

    If the model has no adapters, it is returned itself.
    """
    if all(replaced_by(module) is None for module in model.modules()):
        return model
    views: dict[nn.Module, nn.Module] = {}

    def view(module: nn.Module) -> nn.Module:
        base = replaced_by(module)
        if base is not None:
            return view(module.get_submodule(base))
        if module not in views:
            views[module] = shallow_copy(module)
            children = {
                key: child if child is None else view(child)
                for key, child in module._modules.items()
            }
            views[module].__dict__["_modules"] = children
        return views[module]

    return view(model)


# ---- Suggested lines of a plan for an unknown model ----------------------------------------------
#
# The message that asks for a plan contains them. Feed-forward parts are recognized by their shapes,
# attentions by their class. Users must review a suggestion, because a forward may use a part in
# ways that its form does not show.


def suggested_tensor(model: nn.Module) -> dict[str, str]:
    """Return suggested kinds for the parts of repeated layers, by patterns of their names."""
    members = {
        joined(name, key)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        for key, child in module.named_children()
        if list(child.children())
    }
    kinds: dict[str, str] = {}
    for name, kind in _parts(model):
        pattern = _pattern(name, members)
        if kinds.setdefault(pattern, kind) != kind:
            return {}  # one pattern has parts of different kinds
    return kinds


def _pattern(name: str, members: set[str]) -> str:
    parts = name.split(".")
    return ".".join(
        "*" if ".".join(parts[: at + 1]) in members else part for at, part in enumerate(parts)
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    visited: set[nn.Module] = set()
    # Innermost first: a part is the smallest module that holds both projections.
    for name, module in sorted(model.named_modules(), key=lambda entry: -entry[0].count(".")):
        if isinstance(module, nn.MultiheadAttention):
            yield name, "attention"
            visited.update(module.modules())
        elif not visited & set(module.modules()):
            pair = _feed_forward(module)
            yield from ((f"{name}.{inner}", kind) for inner, kind in pair.items())
            visited.update(module.modules() if pair else ())


def _feed_forward(module: nn.Module) -> dict[str, str]:
    """Return "column" for the projections up and "row" for the one down.

    The result is empty if the module is not a feed-forward part. Such a part has one or two
    projections up.
    """
    linear = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    if len(linear) not in (2, 3) or "" in linear:
        return {}
    *ups, down = linear.values()
    wide = down.in_features
    narrow = down.out_features
    fits = wide > narrow and all((up.in_features, up.out_features) == (narrow, wide) for up in ups)
    shapes = [
        tuple(p.shape)
        for child in module.modules()
        if child not in linear.values()
        for p in child.parameters(recurse=False)
    ]
    if not fits or any(shape != (narrow,) for shape in shapes):
        return {}
    *first, last = linear
    return {**dict.fromkeys(first, "column"), last: "row"}
