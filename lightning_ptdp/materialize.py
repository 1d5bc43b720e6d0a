"""The same initial weights in every layout.

A module built on the meta device is given values one leaf module at a time: its own initializer runs at full size under a generator
seeded by (seed, the module's global name), so that the values depend neither on the layout nor on which rank asks, and no rank ever
holds the whole model. A module built eagerly keeps its values, after a check that all ranks built the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.random import derive_seed, seeded

__all__ = ["Materializer", "agree_on_values", "initial_values", "is_meta"]


def is_meta(module: nn.Module) -> bool:
    """Whether any of the module's own parameters or buffers is on the meta device."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def initial_values(module: nn.Module, *, name: str, seed: int, initializer: Any = None) -> nn.Module:
    """A copy of ``module`` whose own parameters and buffers hold its initial values, at full size, on the CPU.

    Args:
        module: A module whose own (not its children's) parameters or buffers are on the meta device.
        name: Its global name; with ``seed`` it decides the values.
        seed: Seed of the run. Values are drawn on the CPU, so that they do not depend on the device.
        initializer: The model's ``_init_weights(module)`` (the Hugging Face convention), used where the module has no
            ``reset_parameters`` of its own.

    Raises:
        ValueError: Nothing is known that would initialize the module.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is None and initializer is None:
        raise ValueError(
            f"'{name}' ({type(module).__name__}) was built on the meta device but has no reset_parameters() method that gives it "
            "values; add one, build the model in __init__, or set PTDPStrategy(meta_init=False)"
        )
    scratch: Any = _own_tensors_only(module)
    with seeded(derive_seed(seed, "init", name), torch.device("cpu")), torch.no_grad():
        scratch.to_empty(device="cpu", recurse=False)
        if reset is not None:
            scratch.reset_parameters()
        else:
            initializer(scratch)
    return scratch


class Materializer:
    """Gives meta modules their values one at a time, keeping tied parameters tied.

    Args:
        model: The whole, uncut module; the owner of a tied parameter is the first module that registers it.
        seed: Seed of the run.
        device: Where values go.
    """

    def __init__(self, model: nn.Module, *, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._owners: dict[int, tuple[str, nn.Module, str]] = {}
        self._initializers: dict[int, Any] = {}
        self._made: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), (name, module, key))
        self._roots = [(n, m._init_weights) for n, m in model.named_modules() if callable(getattr(m, "_init_weights", None))]

    def __call__(self, module: nn.Module, name: str) -> None:
        """Replace the module's own meta tensors by their initial values, in place."""
        if not is_meta(module):
            return
        drawn: dict[str, nn.Module] = {}

        def values(owner_name: str, owner: nn.Module) -> nn.Module:
            if owner_name not in drawn:
                drawn[owner_name] = initial_values(
                    owner, name=owner_name, seed=self._seed, initializer=self._initializer(owner_name)
                )
            return drawn[owner_name]

        for key, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in self._made:
                owner_name, owner, owner_key = self._owners[id(parameter)]
                value = values(owner_name, owner)._parameters[owner_key]
                assert value is not None
                new = nn.Parameter(value.detach().to(self._device), requires_grad=parameter.requires_grad)
                # The old parameter is kept alive by the owner's record, so its id stays unique.
                self._made[id(parameter)] = new
            module._parameters[key] = self._made[id(parameter)]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                drawn_buffer = values(name, module)._buffers[key]
                assert drawn_buffer is not None
                module._buffers[key] = drawn_buffer.to(self._device)

    def _initializer(self, name: str) -> Any:
        """The ``_init_weights`` of the nearest module above ``name``."""
        above = [(n, f) for n, f in self._roots if not n or name == n or name.startswith(n + ".")]
        return max(above, key=lambda item: len(item[0]))[1] if above else None


def agree_on_values(tensors: Iterable[tuple[str, Tensor]], *, device: torch.device, group: Any = None) -> list[str]:
    """Make eagerly built tensors equal on all ranks of ``group`` (default: the world); rank 0's values win.

    Returns:
        Names of the tensors that differed.
    """
    named = list(tensors)
    if not named or not dist.is_initialized():
        return []
    sums = torch.stack([_checksum(tensor) for _, tensor in named]).to(device)
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    differing = [i for i, same in enumerate((low == high).all(dim=1).tolist()) if not same]
    for index in differing:
        value = named[index][1].detach().to(device)
        dist.broadcast(value, src=0, group=group)
        named[index][1].detach().copy_(value)
    return [named[i][0] for i in differing]


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor:
    """Three sums over the bits, of all elements and of two selections, which different values are very unlikely to share."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
    return torch.stack([bits[::step].sum(dtype=torch.int64) for step in (1, 2, 3)])


def _own_tensors_only(module: nn.Module) -> nn.Module:
    """A copy of the module without hooks whose tensors may be changed freely; children are shared, tensors are not."""
    scratch = copy.copy(module)
    scratch.__dict__["_parameters"] = {
        k: None if p is None else nn.Parameter(p.detach(), p.requires_grad) for k, p in _items(module)
    }
    scratch.__dict__["_buffers"] = dict(module._buffers)
    return scratch


def _items(module: nn.Module) -> Iterable[tuple[str, nn.Parameter | None]]:
    parameters: Mapping[str, nn.Parameter | None] = module._parameters
    return parameters.items()
