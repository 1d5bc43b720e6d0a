"""User forward hooks, replayed on stages that do not hold the hooked blocks.

A hook runs on the stage that holds its module. The output that it receives there crosses with the
hidden state, and the placeholders of later stages call the hook again. On the last stage it has
therefore seen all blocks::

    stage 0     block 0: hook(y0)    block 1: leaves with y0
    stage 1     Earlier: hook(y0)    block 1: hook(y1)          loss of [y0, y1]

"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_ptdp.shims.lightning import is_profiling
from lightning_ptdp.shims.torch import forward_hooks, forward_pre_hooks, is_compiled, untraced
from lightning_ptdp.shims.transformers import is_capture

__all__ = ["UserHooks", "eager", "user_hooks"]

Hook = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class UserHooks:
    """The forward hooks that a module had when the model was cut.

    Attributes:
        name: Name of the module.
        module: The module, or its placeholder on another stage.
        hooks: The hooks by key, each with a flag that is True if it takes keyword arguments.
        before: Pre-hooks that are methods of the same objects as the hooks, with the same flag.
    """

    name: str
    module: nn.Module
    hooks: dict[int, tuple[Hook, bool]]
    before: tuple[tuple[Hook, bool], ...]

    def watch(self, note: Callable[[str, int, object], None]) -> None:
        """Call ``note(name, position, output)`` after each hook that is still registered.

        A hook that changes the output is not noted: it need not run again on another stage.
        """
        registered, _ = forward_hooks(self.module)
        for position, (key, (hook, _)) in enumerate(self.hooks.items()):
            if key in registered:
                registered[key] = eager(
                    self.module, partial(_noted, hook, partial(note, self.name, position))
                )

    def replay(self, position: int, args: tuple[object, ...], output: object) -> None:
        """Call one hook with the output from its module's stage.

        The pre-hooks of the same object are called first.
        """
        hook, with_kwargs = tuple(self.hooks.values())[position]
        for pre_hook, takes_kwargs in self.before:
            if _owner(pre_hook) is _owner(hook):
                pre_hook(self.module, args, *(({},) if takes_kwargs else ()))
        hook(self.module, args, *(({},) if with_kwargs else ()), output)


def user_hooks(name: str, module: nn.Module, *, inside: bool = True) -> Iterator[UserHooks]:
    """Yield the hooks of ``module``, called ``name``, and of its submodules.

    Hooks of profilers and of transformers' output capture are left out.
    """
    for suffix, child in module.named_modules() if inside else [("", module)]:
        hooks, with_kwargs = forward_hooks(child)
        selected = {
            key: (hook, key in with_kwargs)
            for key, hook in hooks.items()
            if not is_capture(hook) and not is_profiling(hook)
        }
        if selected:
            owners = [owner for hook, _ in selected.values() if (owner := _owner(hook)) is not None]
            registered, with_kwargs = forward_pre_hooks(child)
            pre_hooks = [(hook, key in with_kwargs) for key, hook in registered.items()]
            before = tuple(
                entry for entry in pre_hooks if any(_owner(entry[0]) is owner for owner in owners)
            )
            yield UserHooks(f"{name}.{suffix}" if suffix else name, child, selected, before)


def _owner(hook: Hook) -> object:
    """Return the object of which a hook is a method; None for a function."""
    return getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)


def eager(module: nn.Module, hook: Hook) -> Hook:
    """Exclude ``hook`` from compilation if ``module`` is compiled.

    ``module.compile()`` also compiles the hooks. The hooks of this package compare the identity of
    tensors, which a compiler does not preserve.
    """
    return untraced(hook) if is_compiled(module) else hook


def _noted(hook: Hook, note: Callable[[object], None], module: nn.Module, *args: object) -> object:
    result: object = hook(module, *args)
    if result is None or result is args[-1]:
        note(args[-1])
    return result
