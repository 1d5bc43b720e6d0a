"""Replacement of a module's forward in place, by a method bound to the instance.

The module keeps its type, parameters, names, children and hooks, and can still be copied and
pickled. A bound method is used because ``torch.compile`` guards on a method's code, which is the
same in every block, but on any other callable's identity.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_ptdp.forward.surroundings import Context, FirstForwards, Surroundings
from lightning_ptdp.shims.torch import forward_hooks, forward_pre_hooks

_Kind = TypeVar("_Kind", bound="OwnForward")


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnForward:
    """Replacement of one module's forward.

    It is an object, not a closure, so that the module can be copied and pickled.

    Attributes:
        module: The module. The forward of its type is looked up at each call. A stored bound method
            would be copied as a second reference to the value of ``module.forward`` in the middle
            of copying.
        replaced: The forward that the instance had as an attribute before, or None.
        surroundings: Contexts to enter around a recomputation of this forward too, or None.
    """

    module: nn.Module
    replaced: Callable[..., Any] | None
    surroundings: Surroundings | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """Return the forward that this one replaces.

        It is not named ``__wrapped__``, which ``inspect.signature`` follows on classes before
        CPython 3.11.7 and 3.12.1 (gh-112006).
        """
        if self.replaced is not None:
            return self.replaced
        return partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward; subclasses replace this method."""
        return self.original(*args, **kwargs)


def replace_forward(
    module: nn.Module, kind: type[OwnForward], *, as_method: bool = True, **options: Any
) -> None:
    """Replace the forward of ``module`` by a ``kind``, or by its bound method.

    Nothing is done if the forward has already been replaced by a ``kind``. This happens for a
    module that is registered under several names.
    """
    if not isinstance(_own(module), kind):
        own = kind(module=module, replaced=vars(module).get("forward"), **options)
        vars(module)["forward"] = own.__call__ if as_method else own


def restore_forwards(module: nn.Module, *kinds: type[OwnForward]) -> None:
    """Undo ``replace_forward`` everywhere in ``module``, the latest replacement first."""
    for child in module.modules():
        while isinstance(replacement := _own(child), kinds):
            del vars(child)["forward"]
            if replacement.replaced is not None:
                vars(child)["forward"] = replacement.replaced


def replacements(module: nn.Module, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield the replaced forwards of ``kind`` in ``module``, those under others included."""
    for child in module.modules():
        own = _own(child)
        while own is not None:
            if isinstance(own, kind):
                yield own
            own = _own_of(own.replaced)


def _own(module: nn.Module) -> OwnForward | None:
    return _own_of(vars(module).get("forward"))


def _own_of(forward: object) -> OwnForward | None:
    replacement = getattr(forward, "__self__", forward)
    return replacement if isinstance(replacement, OwnForward) else None


# ---- Hooks of this package on modules whose forward is called directly ---------------------------
#
# ``module.forward(x)`` skips all hooks of the module, among them those that give a Hugging Face
# model the positions of a slice of the sequence, or that pass activations between pipeline stages.
# Users and other packages (AdaLoRA of peft) call modules this way.

_CALLERS = frozenset(("torch", "lightning_ptdp"))
_OURS = "lightning_ptdp."


class DirectCalls(FirstForwards):
    """Runs hooks of this package also if a module's forward is called directly.

    The hooks are looked up in the first forward of each kind, when all are installed.
    """

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Return a function that gives the module its forwards back."""
        super().attach(module)
        return lambda: restore_forwards(module, HookedForward)

    def first(self, module: nn.Module) -> Context:
        """Replace the forwards of the modules with hooks."""
        for child in module.modules():
            if _has_own_hooks(child) and not isinstance(child, torch.jit.ScriptModule):
                # Hugging Face models read the signature; they are not within compiled blocks.
                is_model = hasattr(type(child), "main_input_name")
                replace_forward(child, HookedForward, as_method=not is_model)
        return super().first(module)


@dataclass(frozen=True, eq=False, kw_only=True)
class HookedForward(OwnForward):
    """Forward of a module with hooks, which has the signature of the module's own."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the forward; call the whole module if code outside of torch calls this."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return (self.original if caller in _CALLERS else self.module)(*args, **kwargs)


def _has_own_hooks(module: nn.Module) -> bool:
    hooks = (*forward_pre_hooks(module)[0].values(), *forward_hooks(module)[0].values())
    return any(getattr(hook, "func", hook).__module__.startswith(_OURS) for hook in hooks)
