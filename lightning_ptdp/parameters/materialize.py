"""The same initial weights in every layout.

A module built on the meta device gets its values one leaf module at a time. Its initializers run at
full size under a generator seeded by (seed, the module's global name). The values therefore depend
neither on the layout nor on the rank, and no rank ever holds the whole model. A module built
eagerly keeps its values, after a check that all ranks built the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.base.random import derive_seed, seeded
from lightning_ptdp.parameters.initializers import Initializers, why_without_values
from lightning_ptdp.shims.peft import original_name
from lightning_ptdp.shims.torch import copy_gradient_hooks


def is_meta(module: nn.Module) -> bool:
    """Return True if any of the module's own parameters or buffers is on the meta device."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def awaits_values(model: nn.Module) -> bool:
    """Return True if any of the model's modules is on the meta device."""
    return any(is_meta(module) for module in model.modules())


def make_room(
    model: nn.Module, *, device: torch.device, padded: Collection[nn.Parameter] = ()
) -> None:
    """Allocate memory on ``device`` for every parameter that is on the meta device.

    The parameter stays the same object. ``padded`` parameters are filled with zeros, because later
    values do not cover all of their elements.
    """
    for parameter in model.parameters():
        if parameter.is_meta:
            make = torch.zeros_like if parameter in padded else torch.empty_like
            put_values(parameter, make(parameter, device=device))


def put_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Replace the values of ``parameter``, which may be on the meta device and stays the object."""
    if not parameter.is_meta:
        parameter.data = values
        return
    allocated = nn.Parameter(values, parameter.requires_grad)
    vars(allocated).update(vars(parameter))
    torch.utils.swap_tensors(parameter, allocated)


class Materializer:
    """Materializer of meta modules, one at a time, that keeps tied parameters tied.

    Args:
        model: The whole, uncut module; the owner of a tied parameter is the first module that
            registers it.
        seed: Seed of the run.
        device: Device of the values.
        left: Names of parameters that stay on the meta device, because their values come from
            elsewhere.
        late: Leave all parameters on the meta device; ``value`` returns their values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        device: torch.device,
        left: Collection[str] = (),
        late: bool = False,
    ) -> None:
        self._seed = seed
        self._device = device
        self._left = frozenset(left)
        self._late = late
        self._last: tuple[str, nn.Module] | None = None
        self._owners: dict[int, tuple[str, str]] = {}
        # keys of a module's parameters that another module owns
        self._others: dict[str, set[str]] = {}
        self._made: dict[int, nn.Parameter] = {}
        # kept alive while their ids are keys
        self._kept: list[nn.Parameter] = [p for p in model.parameters() if p.is_meta]
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and self._owners.setdefault(
                    id(parameter), (name, key)
                ) != (name, key):
                    self._others.setdefault(name, set()).add(key)
        self._initialize = Initializers(model) if awaits_values(model) else None

    def __call__(self, module: nn.Module, name: str) -> None:
        """Replace the module's own meta tensors by their initial values, in place.

        Raises:
            ValueError: No initializer of the module is known, or it does not set a tensor.
        """
        if not is_meta(module):
            return

        @cache
        def values(owner_name: str) -> nn.Module:
            return self._values(owner_name, module)

        for key, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in self._made:
                owner_name, owner_key = self._owners[id(parameter)]
                if self._late or f"{owner_name}.{owner_key}".removeprefix(".") in self._left:
                    continue
                value = values(owner_name).get_parameter(owner_key)
                new = nn.Parameter(
                    value.detach().to(self._device), requires_grad=parameter.requires_grad
                )
                vars(new).update(vars(parameter))
                copy_gradient_hooks(parameter, new)
                self._made[id(parameter)] = new
            module._parameters[key] = self._made[id(parameter)]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = values(name).get_buffer(key).to(self._device)

    def value(self, name: str) -> Tensor | None:
        """Return the initial values of a whole parameter on the CPU, by its first name.

        None: they come from elsewhere. Ask for the parameters of one module in a row.
        """
        if name in self._left:
            return None
        owner, _, key = name.rpartition(".")
        if self._last is None or self._last[0] != owner:
            self._last = owner, self._values(owner, nn.Module())
        return self._last[1].get_parameter(key).detach()

    def _values(self, name: str, module: nn.Module) -> nn.Module:
        """Return a module with initial values, drawn on the CPU to be independent of the device."""
        name = original_name(name)
        assert self._initialize is not None
        with seeded(derive_seed(self._seed, "init", name), torch.device("cpu")):
            source = self._initialize(name, others=self._others.get(name, ()))
        if source is None:
            raise ValueError(why_without_values(name, module))
        return source


def agree_on_values(tensors: Iterable[tuple[str, Tensor]], *, device: torch.device) -> list[str]:
    """Make eagerly built tensors equal on all ranks, which get rank 0's values.

    Returns:
        Names of the tensors that differed.
    """
    named = list(tensors)
    if not named or not dist.is_initialized():
        return []
    sums = torch.stack([_checksum(tensor) for _, tensor in named]).to(device)
    low = sums.clone()
    high = sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    differing = [i for i, same in enumerate((low == high).all(dim=1).tolist()) if not same]
    for index in differing:
        value = _resolved(named[index][1]).to(device)
        value = value.clone(memory_format=torch.contiguous_format)
        # As bytes, because no backend supports every dtype.
        dist.broadcast(value.view(-1).view(torch.uint8), src=0)
        named[index][1].detach().copy_(value)
    return [named[i][0] for i in differing]


def _resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose bytes are its values, unlike those of ``x.conj()``."""
    return tensor.detach().resolve_conj().resolve_neg()


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor:
    """Return three sums over the bits, of all elements and of two selections.

    Different values are very unlikely to have equal sums.
    """
    flat = _resolved(tensor).contiguous().view(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
    return torch.stack([bits[::step].sum(dtype=torch.int64) for step in (1, 2, 3)])
