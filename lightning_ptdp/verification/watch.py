"""Observation of the user's training step.

It records random numbers, parameters that the step reads, and state that it writes.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_ptdp.base.nested import Nested
from lightning_ptdp.base.torch_calls import CallMode, TorchCall, outer_frames
from lightning_ptdp.engine.step_state import StepState, find_owners
from lightning_ptdp.shims.lightning import replace_once
from lightning_ptdp.verification.record import Record, digest

_RANDOM = (
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial "
    "poisson uniform_ normal_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_"
)
_SKIPPED = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


class StepWatch(CallMode):
    """Observer of one module's ``training_step``.

    Args:
        module: The LightningModule, whose step is replaced.
        record: The record to fill.
        frozen: True to replace random numbers by constants that are equal for all samples, and to
            switch off the dropout of modules.
    """

    def __init__(self, module: Any, record: Record, *, frozen: bool) -> None:
        super().__init__()
        self._module = module
        self._record = record
        self._frozen = frozen
        # Metrics change in every step, so their modules are not watched.
        self._owners = [
            replace(find_owners(child)[0], name=name)
            for name, child in module.named_modules()
            if not hasattr(child, "_update_count")
        ]

        replace_once(module, "training_step", self._watched)

    def _watched(self, step: Callable[..., Nested], *args: Any, **kwargs: Any) -> Nested:
        state = StepState(self._owners)
        self._record.exact["random numbers", digest((args, kwargs))] = str(_generators())
        if self._frozen:
            random.seed(0)
            np.random.seed(0)
            _switch_dropout_off(self._module)
        self._record.random |= {
            f"dropout inside of {name}"
            for name, child in self._module.named_modules()
            if isinstance(child, nn.RNNBase) and child.dropout
        }
        before = _generators()
        try:
            with self:
                return step(*args, **kwargs)
        finally:
            after = _generators()
            self._record.random |= {
                f"the generator of {name}"
                for name in ("random", "numpy")
                if after[name] != before[name]
            }
            self._record.written |= {change.name for change in state.changes()}

    def observe_call(self, call: TorchCall) -> Any:
        """Record random numbers and reads of parameters."""
        draws = call.name in _RANDOM.split()
        reads = any(isinstance(arg, nn.Parameter) for arg in call.args)
        if draws or (reads and call.name != "__get__"):
            place, inside = _caller(self._watched.__code__)
            if draws:
                self._record.random.add(place)
            elif not inside:
                self._record.parameters.add(place)
        if draws and self._frozen:
            return _constant(call)
        return call.run()


def _switch_dropout_off(module: nn.Module) -> None:
    for child in module.modules():
        for name, value in vars(child).items():
            if (name == "p" or "drop" in name) and isinstance(value, float):
                setattr(child, name, 0.0)


def _caller(end: object) -> tuple[str, bool]:
    """Return the user's line that called torch, and True if a module is being called."""
    place = ""
    inside = False
    for frame in outer_frames():
        if frame.f_code is end:
            break
        file = frame.f_code.co_filename
        if not place and not file.startswith(_SKIPPED):
            place = f"{Path(file).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        inside |= frame.f_code.co_name == "_call_impl"
    return place, inside


def _constant(call: TorchCall) -> Any:
    """Call a random function, and replace its result by one row, repeated for all samples.

    The row depends on its size only.
    """
    options = {name: value for name, value in call.kwargs.items() if name != "generator"}
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        drawn = call.function(*call.args, **options)
    if not drawn.dim():
        return drawn
    row = drawn[0].clone()
    # torch draws different numbers for a different size.
    if "randn" in call.name or "normal" in call.name:
        row = torch.linspace(-1, 1, row.numel()).view_as(row)
    with torch.no_grad():
        return drawn.copy_(
            torch.arange(len(drawn)) if call.name == "randperm" else row.to(drawn).expand_as(drawn)
        )


def _generators() -> dict[str, int]:
    """Return the hash values of the states, which are equal in all forked processes."""
    numpy = pickle.dumps(np.random.get_state())
    torch_ = torch.get_rng_state().numpy().tobytes()
    return {"torch": hash(torch_), "random": hash(random.getstate()), "numpy": hash(numpy)}
