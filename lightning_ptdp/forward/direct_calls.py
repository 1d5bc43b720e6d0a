"""Hooks of this package on modules whose ``forward`` is called directly.

``module.forward(x)`` skips all hooks of the module, among them those that give a Hugging Face model
the positions of a slice of the sequence, or that pass activations between pipeline stages. Users
and other packages (AdaLoRA of peft) call modules this way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_ptdp.forward.own_forward import OwnForward, give_back_forwards, replace_forward
from lightning_ptdp.forward.surroundings import Context, Forward, Surrounding
from lightning_ptdp.shims.torch import forward_hooks, forward_pre_hooks

_CALLERS = frozenset(("torch", "lightning_ptdp"))
_OURS = "lightning_ptdp."


class DirectCalls(Surrounding):
    """Runs hooks of this package also if a module's forward is called directly.

    The hooks are looked up in the first forward of each kind, when all are installed.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self._module: nn.Module | None = None

    def attach(self, module: nn.Module) -> Callable[[], None]:
        """Store the module, and return a function that gives it its forwards back."""
        self._module = module
        self._seen.clear()
        return lambda: give_back_forwards(module, HookedForward)

    def around(self, forward: Forward) -> Context:
        """Replace the forwards of the modules with hooks, in the first forward of its kind."""
        assert self._module is not None
        if forward.kind not in self._seen:
            self._seen.add(forward.kind)
            for module in self._module.modules():
                if _has_own_hooks(module) and not isinstance(module, torch.jit.ScriptModule):
                    # Hugging Face models read the signature; they are not within compiled blocks.
                    is_model = hasattr(type(module), "main_input_name")
                    replace_forward(module, HookedForward, as_method=not is_model)
        return super().around(forward)


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
