"""Lookup of the plan for a class of module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_ptdp.models.plans.declared import declared_plan, declares_plan
from lightning_ptdp.models.plans.encoder_decoder import ENCODER_DECODERS, encoder_decoder_plan
from lightning_ptdp.models.plans.families import FAMILIES, family_plan
from lightning_ptdp.models.plans.module_names import joined
from lightning_ptdp.models.plans.transformer import transformer_encoder_plan, transformer_plan
from lightning_ptdp.parameters.shadow import shallow_copy
from lightning_ptdp.shims.peft import replaced_by
from lightning_ptdp.shims.transformers import collects_by_itself
from lightning_ptdp.tensor_parallel import Experts, Kind, ParallelPlan

__all__ = ["find_plan", "plan_for"]


def plan_for(module: nn.Module, prefix: str = "") -> ParallelPlan | None:
    """Return the plan of a module with the name ``prefix``.

    The class of the module must be known, or the module must declare a plan.

    Returns:
        None if the class is unknown. A subclass is known if it inherits the forward of a known
        class.
    """
    return _plan_for(without_adapters(module), prefix)


def _plan_for(module: nn.Module, prefix: str) -> ParallelPlan | None:
    for kind in type(module).__mro__:
        if type(module).forward is not vars(kind).get("forward"):
            continue
        if (
            kind.__name__ == "TransformerEncoder"
            and kind.__module__ == "torch.nn.modules.transformer"
        ):
            return transformer_encoder_plan(module, prefix)
        if (
            kind.__name__ == "Transformer"
            and kind.__module__ == "torch.nn.modules.transformer"
            and _is_torchs(module)
        ):
            return transformer_plan(module, prefix)
        folder = (
            kind.__module__.split(".")[2]
            if kind.__module__.startswith("transformers.models.")
            else ""
        )
        family = FAMILIES.get(folder)
        if family is not None and kind.__name__ in family.classes:
            return family_plan(family, module, prefix)
        pair = ENCODER_DECODERS.get(folder)
        if pair is not None and kind.__name__ in pair.classes:
            return encoder_decoder_plan(pair, module, prefix)
    return (
        declared_plan(module, prefix)
        if _is_hugging_face(module) and declares_plan(module)
        else None
    )


def find_plan(model: nn.Module) -> ParallelPlan | None:
    """Return the plan of the one known model inside ``model``.

    If the known model is part of a larger known one, such as a model with a head, the plan is that
    of the larger one.

    Returns:
        None if there is no known model, or if there are several, whose order of execution is
        unknown.
    """
    found = list(_known(without_adapters(model), ""))
    return found[0] if len(found) == 1 else None


def _known(module: nn.Module, prefix: str) -> Iterator[ParallelPlan]:
    plan = _plan_for(module, prefix)
    if plan is not None:
        collects = plan.collects or collects_by_itself(module)
        yield replace(plan, tensor={**plan.tensor, **_experts(module, prefix)}, collects=collects)
        return
    for name, child in module.named_children():
        yield from _known(child, f"{prefix}.{name}" if prefix else name)


def _experts(module: nn.Module, prefix: str) -> dict[str, Kind]:
    """Return the modules that hold all experts of a layer.

    They are recognized by their form, which all mixtures of Hugging Face share.
    """
    kind = Experts()
    names = (joined(prefix, name) for name, child in module.named_modules() if kind.fits(child))
    return dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names), kind)


def _is_torchs(module: nn.Module) -> bool:
    """Return True if encoder and decoder are those that ``nn.Transformer`` builds.

    A user may pass custom ones instead.
    """
    return isinstance(module.encoder, nn.TransformerEncoder) and isinstance(
        module.decoder, nn.TransformerDecoder
    )


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
