"""Observation of the user's step: random numbers, parameters that are read, shifted slices, and state that is written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.nested import Nested, iterate_tensors

__all__ = ["Seen", "StepWatch", "digest"]

_RANDOM = (
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson uniform_ normal_ bernoulli_ "
    "random_ exponential_ geometric_ cauchy_ log_normal_"
)
_DROPOUT = "dropout alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout rrelu"
_SKIPPED = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_LARGEST = 2**22
"""Elements of an attribute that is compared before and after a step."""


@dataclass
class Seen:
    """Observations of the steps of one rank.

    Attributes:
        random: Lines that draw random numbers with torch, or other generators that were used.
        parameters: Lines of the step that read parameters of modules that are not being called.
        shifts: Lines that leave out the first or the last element along a dimension.
        written: Attributes and buffers that a step changed.
        draws: (microbatch, generator) -> its state when the step began, for steps that draw outside of modules.
    """

    random: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    shifts: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    draws: dict[tuple[str, str], str] = field(default_factory=dict)


class StepWatch(TorchFunctionMode):
    """Watches one module's ``training_step``.

    Args:
        module: The LightningModule, whose step is replaced.
        frozen: Whether random numbers are replaced by constants, equal for all samples.
    """

    def __init__(self, module: Any, *, frozen: bool) -> None:
        super().__init__()
        self.seen = Seen()
        self._module, self._frozen = module, frozen
        self._step: Callable[..., Nested] = module.training_step
        self._draws_itself = False

        @functools.wraps(self._step)
        def training_step(*args: Any, **kwargs: Any) -> Nested:
            return self._watched(*args, **kwargs)

        vars(module)["training_step"] = training_step

    def _watched(self, *args: Any, **kwargs: Any) -> Nested:
        batch, before, written = digest(args[0] if args else kwargs), _generators(), _state_of(self._module)
        self._draws_itself = False
        if self._frozen:
            random.seed(0)
            np.random.seed(0)
        entered = _generators()
        try:
            with self:
                return self._step(*args, **kwargs)
        finally:
            used = {name for name, state in _generators().items() if name != "torch" and state != entered[name]}
            self.seen.random |= {f"the generator of {name}" for name in used}
            for name in used | ({"torch"} if self._draws_itself else set()):
                self.seen.draws[batch, name] = before[name]
            after = _state_of(self._module)
            self.seen.written |= {name for name, value in after.items() if written.get(name) != value}

    def __torch_function__(
        self, function: Callable, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        draws = name in _RANDOM.split()
        if self._frozen and name in _DROPOUT.split() and kwargs.get("training", True):
            return args[0]
        if draws or _is_shift(name, args) or (name != "__get__" and any(isinstance(each, nn.Parameter) for each in args)):
            place, inside = _caller(self._watched.__code__)
            if draws:
                self.seen.random.add(place)
                self._draws_itself |= not inside
            elif _is_shift(name, args):
                self.seen.shifts.add(place)
            elif not inside:
                self.seen.parameters.add(place)
        return _constant(function, name, args, kwargs) if draws and self._frozen else function(*args, **kwargs)


def digest(value: Nested) -> str:
    """Return a checksum of the tensors of a batch."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in iterate_tensors(value):
        found.update(
            str(tensor.shape).encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def _caller(end: object) -> tuple[str, bool]:
    """Return the user's line that called torch, and whether a module is being called."""
    frame: FrameType | None = sys._getframe(2)
    place, inside = "", False
    while frame is not None and frame.f_code is not end:
        file = frame.f_code.co_filename
        if not place and (not file.startswith(_SKIPPED) or "/models/" in file):
            place = f"{Path(file).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        inside |= frame.f_code.co_name == "_call_impl"
        frame = frame.f_back
    return place, inside


def _is_shift(name: str, args: Sequence[Any]) -> bool:
    index = args[1] if name == "__getitem__" else ()
    slices = [one for one in (index if isinstance(index, tuple) else (index,)) if isinstance(one, slice)]
    return name == "roll" or any(one.step is None and (one.start == 1 or one.stop == -1) for one in slices)


def _constant(function: Callable, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a random function; its result becomes one row, repeated for all samples, that depends on the row's size only."""
    kwargs.pop("generator", None)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        drawn = function(*args, **kwargs)
    if not isinstance(drawn, Tensor) or not drawn.dim():
        return drawn
    row = torch.linspace(-1, 1, drawn[0].numel()).view_as(drawn[0]) if "randn" in name or "normal" in name else drawn[0].clone()
    with torch.no_grad():
        return drawn.copy_(torch.arange(len(drawn)) if name == "randperm" else row.to(drawn).expand_as(drawn))


def _generators() -> dict[str, str]:
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate(), "numpy": np.random.get_state()}
    return {name: hashlib.blake2b(pickle.dumps(state), digest_size=8).hexdigest() for name, state in states.items()}


def _state_of(module: nn.Module) -> dict[str, object]:
    """Return checksums of the public attributes of all modules, and the versions of buffers."""
    found: dict[str, object] = {f"the buffer '{name}'": buffer._version for name, buffer in module.named_buffers()}
    for name, child in module.named_modules():
        if hasattr(child, "_update_count"):  # a metric of torchmetrics
            continue
        for key, value in vars(child).items():
            if key.startswith("_") or key in ("training", "trainer", "training_step") or isinstance(value, nn.Module):
                continue
            if callable(value) or (isinstance(value, Tensor) and value.numel() > _LARGEST):
                continue
            with contextlib.suppress(Exception):  # what cannot be pickled is not compared
                state = value.get_state() if isinstance(value, torch.Generator) else value
                found[f"the attribute '{name}.{key}'".replace("'.", "'")] = hash(pickle.dumps(state))
    return found
