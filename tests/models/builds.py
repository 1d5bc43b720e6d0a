"""Nested models and models on the meta device."""

from collections.abc import Callable

import torch
from torch import nn


def nested(model: nn.Module, prefix: str) -> nn.Module:
    """Wrap the model in modules that are named by the prefix."""
    for key in reversed(prefix.split(".") if prefix else []):
        model = nn.ModuleDict({key: model})
    return model


def reset_by_module(model: nn.Module, seed: int) -> None:
    """Initialize every module alone under its own seed and in reverse order.

    The strategy also seeds each module alone, in any order.
    """
    for index, module in reversed(list(enumerate(model.modules()))):
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(seed + index)
            module.reset_parameters()


def eager_and_lazy(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Build a model eagerly and on meta, and check that both get the same values."""
    eager = make()
    with torch.device("meta"):
        lazy = make()
    assert all(p.is_meta for p in lazy.parameters())
    lazy.to_empty(device="cpu")
    of_eager = dict(eager.named_parameters(remove_duplicate=False))
    for name, parameter in of_eager.items():  # to_empty separates tied parameters
        first = next(other for other in of_eager if of_eager[other] is parameter)
        owner, _, leaf = name.rpartition(".")
        setattr(lazy.get_submodule(owner), leaf, lazy.get_parameter(first))
    for model in (eager, lazy):
        reset_by_module(model, 11)
    for (name, expected), (_, value) in zip(
        eager.named_parameters(), lazy.named_parameters(), strict=True
    ):
        assert torch.equal(expected, value), name
    return eager, lazy
