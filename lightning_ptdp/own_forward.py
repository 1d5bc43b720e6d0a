"""Another forward for a module in place: an object's method, as an attribute of the instance.

The module's type, parameters, names, children and hooks stay what they are, and it can be copied and pickled. (Of a method a compiler
looks at the code, and so finds the same in every block; of another callable, at the object.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_ptdp.surroundings import Surroundings

__all__ = ["OwnForward", "give_back_forwards", "replace_forward"]


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnForward:
    """What takes the place of a module's forward. An object and not a closure, so that the module can be copied and pickled.

    Attributes:
        module: The module. Its type's forward is looked up at each call: a bound method would be copied as a second reference to
            whatever ``module.forward`` means in the middle of copying.
        replaced: The instance's own forward from before, if it had one.
        surroundings: What surrounds the forward, if a recomputation of it has to be surrounded too.
    """

    module: nn.Module
    replaced: Callable[..., Any] | None
    surroundings: Surroundings | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What is replaced."""
        return self.replaced if self.replaced is not None else partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the module's forward."""
        return self.__wrapped__(*args, **kwargs)


def replace_forward(module: nn.Module, kind: type[OwnForward], **options: Any) -> None:
    """Put one in place; once, if the module has several names."""
    if not isinstance(_own(module), kind):
        vars(module)["forward"] = kind(module=module, replaced=vars(module).get("forward"), **options).__call__


def give_back_forwards(module: nn.Module, *kinds: type[OwnForward]) -> None:
    """Undo ``replace_forward`` everywhere in ``module``, what came last first."""
    for child in module.modules():
        while isinstance(own := _own(child), kinds):
            del vars(child)["forward"]
            if own.replaced is not None:
                vars(child)["forward"] = own.replaced


def _own(module: nn.Module) -> OwnForward | None:
    own = getattr(vars(module).get("forward"), "__self__", None)
    return own if isinstance(own, OwnForward) else None
