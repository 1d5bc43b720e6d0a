"""Names of peft, recognized as strings so that peft need not be imported.

tests/huggingface/test_lora.py checks them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_BASES = {"BaseTunerLayer": "base_layer", "AuxiliaryTrainingWrapper": "original_module"}


def replaced_by(module: nn.Module) -> str | None:
    """Return the name under which a peft module holds the module that it replaced.

    The result is None for other modules.
    """
    for kind in type(module).__mro__:
        if kind.__name__ in _BASES and kind.__module__.startswith("peft."):
            return _BASES[kind.__name__]
    return None


def copies_of(module: nn.Module) -> Iterator[str]:
    """Yield the names under which a module of ``modules_to_save`` holds the trained copies."""
    copies = module._modules.get("modules_to_save")
    for name in copies._modules if copies is not None else ():
        yield f"modules_to_save.{name}"


def adapters_of(module: nn.Module) -> list[str] | None:
    """Return the names of a LoRA layer's adapters; None for other modules."""
    if not any(
        kind.__name__ == "LoraLayer" and kind.__module__.startswith("peft.")
        for kind in type(module).__mro__
    ):
        return None
    return list(getattr(module, "scaling"))  # noqa: B009 - its type is peft's


def adds_penalty(module: nn.Module) -> bool:
    """Return True if a module adds a penalty on all its adapters to the loss."""
    return type(module).__name__ == "AdaLoraModel"


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute with its original weights inside the context.

    peft's own switch would also change which parameters are trained.
    """
    modules: list[Any] = [module for module in model.modules() if replaced_by(module) is not None]
    before = [module._disable_adapters for module in modules]
    try:
        for module in modules:
            module._disable_adapters = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module._disable_adapters = value


def seen_through(
    module: nn.Module, name: str = "", plain: str = ""
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (name, name without peft's parts, module) of everything in ``module``.

    Modules of peft are skipped, and their inner layers appear under the replaced modules' names.
    """
    base = replaced_by(module)
    if base is None:
        yield name, plain, module
    inner = (
        [(key, "") for key in (base, *copies_of(module))]
        if base is not None
        else [(key, key) for key, _ in module._modules.items()]  # torch.jit has no iterator
    )
    for key, plain_key in inner:
        child = module.get_submodule(key) if base is not None else module._modules[key]
        if child is not None:
            yield from seen_through(
                child, f"{name}.{key}".lstrip("."), f"{plain}.{plain_key}".strip(".")
            )


def plain_name(name: str) -> str:
    """Return the name that a parameter had before peft moved it."""
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


def original_name(name: str) -> str:
    """Return the original's name for a module in a copy of ``modules_to_save``.

    The copy has the original's initial values.
    """
    return re.sub(r"\.modules_to_save\.[^.]+", ".original_module", name)


def adapter_initializer(chain: Sequence[nn.Module]) -> Callable[[], object] | None:
    """Return peft's initializer of the last module of ``chain``; None outside of adapters.

    ``chain`` begins with the root module.
    """
    for index in reversed(range(len(chain) - 1)):
        layer: Any = chain[index]
        if adapters_of(layer) is not None and chain[index + 1] is not layer.base_layer:
            configs: Any = next(
                vars(ancestor)["peft_config"]
                for ancestor in reversed(chain[:index])
                if "peft_config" in vars(ancestor)
            )
            for init in (
                configs[adapter].init_lora_weights for adapter in adapters_of(layer) or ()
            ):
                if not isinstance(init, bool) and init != "gaussian":
                    raise ValueError(
                        f"init_lora_weights={init!r} reads weights that have no values yet. "
                        "Use True or 'gaussian', build the model in __init__, or set "
                        "PTDPStrategy(meta_init=False)"
                    )
            return lambda: _initialize(layer, chain[-1], configs)
    return None


@torch.no_grad()
def _initialize(layer: Any, part: nn.Module, configs: Any) -> None:
    for adapter in adapters_of(layer) or ():
        part_ids = {
            id(held[adapter]) for held in layer.children() if adapter in dict(held.named_children())
        }
        if id(part) not in part_ids and adapter not in part._parameters:
            continue
        for parameter in part.parameters():
            # Default for parameters that are not set below. Magnitudes depend on the weights: see
            # set_magnitudes.
            nn.init.normal_(parameter)
        if isinstance(part, nn.Linear):
            part.reset_parameters()
        layer.reset_lora_parameters(adapter, configs[adapter].init_lora_weights)


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of DoRA to those of the current weights, in place.

    peft does so when it creates an adapter.
    """
    for module in model.modules():
        for adapter in adapters_of(module) or ():
            layer: Any = module
            if adapter in layer.lora_magnitude_vector:
                dora = layer.lora_magnitude_vector[adapter]
                linear = adapter in layer.lora_A
                delta = (
                    layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight if linear else 0.0
                )
                dora.weight.copy_(
                    dora.get_weight_norm(
                        layer.get_base_layer().weight, delta, layer.scaling[adapter]
                    )
                )
