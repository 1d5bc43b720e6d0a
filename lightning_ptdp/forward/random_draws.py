"""Modules whose forward draws no random numbers, so that no generator need be saved for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_ptdp.shims.torch import forward_hooks, forward_pre_hooks

_KNOWN = ("torch", "transformers", "lightning_ptdp")
_WORDS = ("drop", "jitter", "noise")
_FUNCTIONS = {
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randperm",
    "bernoulli",
    "multinomial",
    "gumbel_softmax",
    "rrelu",
}


class RandomDraws:
    """Answers whether a module's forward may draw from torch's generators.

    A module of torch, transformers or this package draws only if an attribute of it or of its
    configuration is a nonzero probability, or if its code calls a random function of torch. All
    other modules may draw, and so may modules with a hook or a forward from elsewhere.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        classes = {type(part) for part in parts}
        self._always = any(map(_calls_random_function, classes)) or not all(
            _is_known(source) for part in parts for source in _sources(part)
        )
        owners: dict[int, Any] = {
            id(owner): owner
            for part in parts
            for owner in (part, getattr(part, "config", None))
            if hasattr(owner, "__dict__")
        }
        self._probabilities = [
            (owner, name)
            for owner in owners.values()
            for name in vars(owner)
            if name == "p" or any(word in name for word in _WORDS)
        ]

    def __call__(self) -> bool:
        """Return True if the module may draw with its current probabilities."""
        return self._always or any(getattr(owner, name, 0) for owner, name in self._probabilities)


def _sources(module: nn.Module) -> Iterator[object]:
    """Yield the class of a module, its hooks, and a forward in the place of that of the class."""
    yield type(module)
    yield from forward_hooks(module)[0].values()
    yield from forward_pre_hooks(module)[0].values()
    if "forward" in vars(module):
        yield module.forward


def _is_known(source: object) -> bool:
    source = getattr(source, "func", source)  # of a partial
    return str(getattr(source, "__module__", "")).partition(".")[0] in _KNOWN


def _calls_random_function(kind: type[nn.Module]) -> bool:
    functions = [
        value
        for base in kind.__mro__
        if issubclass(base, nn.Module) and base is not nn.Module
        for value in vars(base).values()
        if inspect.isfunction(value)
    ]
    return any(not _FUNCTIONS.isdisjoint(function.__code__.co_names) for function in functions)
