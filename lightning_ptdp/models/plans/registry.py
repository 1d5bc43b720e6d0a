"""Which plan belongs to which class of module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_ptdp.models.plans.bert import bert_plan
from lightning_ptdp.models.plans.declared import declared_plan, declares_plan
from lightning_ptdp.models.plans.gpt2 import gpt2_plan
from lightning_ptdp.models.plans.transformer_encoder import transformer_encoder_plan
from lightning_ptdp.tensor_parallel import ParallelPlan

__all__ = ["find_plan", "plan_for"]

# Where a class is defined -> (classes, plan). The classes are those that the plan was written for and tested with.
_PLANS = MappingProxyType(
    {
        "transformers.models.gpt2.modeling_gpt2": (("GPT2LMHeadModel", "GPT2Model"), gpt2_plan),
        "transformers.models.bert.modeling_bert": (
            ("BertForMaskedLM", "BertForNextSentencePrediction", "BertForPreTraining", "BertLMHeadModel", "BertModel"),
            bert_plan,
        ),
        "torch.nn.modules.transformer": (("TransformerEncoder",), transformer_encoder_plan),
    }
)


def plan_for(module: nn.Module, prefix: str = "") -> ParallelPlan | None:
    """The plan of a module of a known class, or of one that declares a plan of its own, found under the name ``prefix``.

    Returns:
        None if nothing is known of the class. A subclass is known if it has the forward of the class that it extends.
    """
    for kind in type(module).__mro__:
        names, make = _PLANS.get(kind.__module__, ((), None))
        if kind.__name__ in names and type(module).forward is vars(kind).get("forward"):
            return _make(make, module, prefix)
    return declared_plan(module, prefix) if _is_hugging_face(module) and declares_plan(module) else None


def find_plan(model: nn.Module) -> ParallelPlan | None:
    """The plan of the one known model inside ``model``, or of the larger ones' heads around it.

    Returns:
        None if there is none, or if there are several, which may or may not be one after the other.
    """
    found = list(_known(model, ""))
    return found[0] if len(found) == 1 else None


def _known(module: nn.Module, prefix: str) -> Iterator[ParallelPlan]:
    plan = plan_for(module, prefix)
    if plan is not None:
        yield plan
        return
    for name, child in module.named_children():
        yield from _known(child, f"{prefix}.{name}" if prefix else name)


def _is_hugging_face(module: nn.Module) -> bool:
    """Told by name, so that transformers need not be imported; remote code is defined elsewhere but extends its classes."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__
    )


def _make(make: Callable[..., ParallelPlan] | None, module: Any, prefix: str) -> ParallelPlan:
    assert make is not None
    return make(module, prefix)
