"""Parameters whose values are on other ranks: only their metadata can be read.

While its values are freed, a parameter is an ``AbsentParameter``. Code that reads it makes its
owner gather the values first, or raises an error that names the parameter. No read returns wrong
values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.nested import iterate_tensors
from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.shims.quantization import class_of, set_elements
from lightning_ptdp.shims.torch import compares_storages

Access = Callable[[str | None], bool]
"""Called with the name of a torch function that needs the values; gathers them or raises.

With None it returns False where it would raise, and True after it has gathered the values.
"""


class AbsentParameter(nn.Parameter):
    """A parameter without values."""

    _ptdp_access: Access

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the parameter with its values, which has the parameter's own class."""
        self._ptdp_access("deepcopy")
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata; gather the values for any other function."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        parameter = args[0] if args and isinstance(args[0], AbsentParameter) else None
        if parameter is not None and func in _CONVERSIONS and not parameter._ptdp_access(None):
            if func == _Asks.data_ptr:
                return super().__torch_function__(func, types, args, kwargs)
            # by ``Module.to`` and ``state_dict``: what this rank holds is already on its device
            if func in _MOVES and not _DTYPES & {*args[1:], *kwargs.values()} - {parameter.dtype}:
                return parameter
            if func == _SETS_DATA and args[1] is parameter:
                return None
            if func in _COPIES:
                plain = vars(parameter).get("qdata", parameter)  # torchao's class is gone
                value = super().__torch_function__(func, types, (plain, *args[1:]), kwargs)
                value.__class__ = AbsentValue  # as_subclass would add a node to the graph
                value._ptdp_access = parameter._ptdp_access
                return value
        for tensor in iterate_tensors((args, kwargs)):
            if isinstance(tensor, AbsentParameter):
                tensor._ptdp_access(_name_of(func))
        return func(*args, **kwargs)


class AbsentValue(Tensor):
    """The result of ``detach`` of a parameter without values, as in a ``state_dict``."""

    _ptdp_access: Access

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata.

        Raises:
            PartialModelError: Another function needs the values.
        """
        if func in _METADATA or func in _COPIES or func == _Asks.data_ptr:
            return super().__torch_function__(func, types, args, kwargs or {})
        name = _name_of(func)
        for tensor in iterate_tensors((args, kwargs or {})):
            if isinstance(tensor, AbsentValue):
                tensor._ptdp_access(name)
        raise PartialModelError(
            f"{name} reads a value that was taken from a parameter while this rank had only a part "
            "of it (shard='parameters'). Read the parameter itself, in the step"
        )


def set_access(parameter: nn.Parameter, access: Access) -> None:
    """Set the function that is called when the absent ``parameter`` is read."""
    vars(parameter)["_ptdp_access"] = access


def make_absent(parameter: nn.Parameter, replacement: Tensor | None = None) -> None:
    """Remove the values of ``parameter``, which keeps its shape and gradient.

    ``replacement`` is a one-element tensor of the same dtype and device, which replaces the values.
    None: the memory is kept, and the new values are written to it.
    """
    vars(parameter).setdefault("_ptdp_class", type(parameter))
    if replacement is not None:
        set_elements(parameter, replacement.expand(parameter.shape))
    parameter.__class__ = AbsentParameter


def make_available(parameter: nn.Parameter, values: Tensor | None) -> None:
    """Give ``parameter`` its values; None: it has them."""
    parameter.__class__ = class_of(parameter)
    if values is not None:
        set_elements(parameter, values)


# ---- Functions that need no values ---------------------------------------------------------------


_Asks: Any = Tensor
_READING = ("T", "H", "mT", "mH", "real", "imag", "data")
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_SETS_DATA = _Asks.data.__set__
_MOVES = frozenset([_Asks.to, _Asks.cpu, _Asks.cuda])
_COPIES = frozenset([_Asks.detach, _Asks.view_as, _Asks.data.__get__])
_CONVERSIONS = _MOVES | _COPIES | {_SETS_DATA, _Asks.data_ptr}  # the address is that for a kernel
_METADATA: frozenset[Callable[..., Any]] = frozenset(
    [
        getattr(attribute, accessor)
        for name, attribute in vars(Tensor.__base__).items()
        if isinstance(attribute, GetSetDescriptorType) and name not in _READING
        for accessor in ("__get__", "__set__")
    ]
    + [
        *(_Asks.size, _Asks.dim, _Asks.numel, _Asks.nelement, _Asks.element_size, _Asks.__len__),
        *(_Asks.is_floating_point, _Asks.is_complex, _Asks.is_inference, _Asks.is_pinned),
        *(_Asks.is_conj, _Asks.is_neg, _Asks.is_shared, _Asks.get_device, _Asks.untyped_storage),
        *(_Asks.stride, _Asks.storage_offset, _Asks.is_contiguous),
        *(_Asks.requires_grad_, _Asks.register_hook, _Asks.register_post_accumulate_grad_hook),
        *(_Asks.new_zeros, _Asks.new_empty, _Asks.new_full, _Asks.new_tensor, _Asks.new_ones),
        *(torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like, torch.numel),
        *(torch.is_floating_point, torch.is_complex, torch.result_type, compares_storages),
    ]
)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    return getattr(getattr(func, "__self__", func), "__name__", str(func))
