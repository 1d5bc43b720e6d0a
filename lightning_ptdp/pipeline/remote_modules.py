"""Hooks and attributes of a module that lives on another stage.

A hook runs on the stage that holds its module. The output that it receives there crosses with the
hidden state, and the placeholders of later stages call the hook again. On the last stage it has
therefore seen all blocks::

    stage 0     block 0: hook(y0)    block 1: leaves with y0
    stage 1     Earlier: hook(y0)    block 1: hook(y1)          loss of [y0, y1]

Plain attributes can be read, because models inspect their layers (``layers[0].self_attn``). Tensors
that a block's forward stores (``self.loss = ...``) cannot be read, because other stages do not have
them.

Reading such a tensor from a placeholder is an error. But a sum over ``model.modules()`` does not
even see the blocks of other stages. Therefore a stored number with a gradient, which can only be a
loss, is refused, and any other stored tensor with a gradient causes a warning.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ptdp.pipeline.crossing import StageError, tensors_in
from lightning_ptdp.shims.lightning import is_profiling
from lightning_ptdp.shims.torch import forward_hooks, forward_pre_hooks, is_compiled, untraced
from lightning_ptdp.shims.transformers import is_capture

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
    for full_name, child in module.named_modules(prefix=name) if inside else [(name, module)]:
        hooks, with_kwargs = forward_hooks(child)
        selected = {
            key: (hook, key in with_kwargs)
            for key, hook in hooks.items()
            if not is_capture(hook) and not is_profiling(hook)
        }
        if selected:
            owners = {id(_owner(hook)) for hook, _ in selected.values()} - {id(None)}
            registered, with_kwargs = forward_pre_hooks(child)
            before = tuple(
                (hook, key in with_kwargs)
                for key, hook in registered.items()
                if id(_owner(hook)) in owners
            )
            yield UserHooks(full_name, child, selected, before)


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


_PLAIN = (bool, int, float, str, tuple, NoneType)
_OWN = frozenset({"_parameters", "_buffers", "_modules"})
SUMMED = (
    "as a loss to be summed over the blocks. Under a pipeline, a stage sees only those of its own "
    "blocks. Return it from the blocks (x, loss = block(x), with ParallelPlan(collects=True)), "
    "carry a sum through them (x, total = block(x, total)), or use pipeline_parallel_size=1"
)
"""Purpose and remedy of a number with a gradient that a block stores."""

_Path = tuple[str, ...]


def watch_left(name: str, block: nn.Module, placeholders: Iterable[nn.Module]) -> None:
    """Watch which tensors the block ``name`` stores, until its first forward with gradients.

    The ``placeholders`` on other stages cannot have these tensors, so reading them there raises an
    error.
    """
    before: dict[_Path, set[int]] = {}

    def enters(block: nn.Module, _args: object) -> None:
        before.clear()
        before.update(
            {path: {id(tensor) for tensor in tensors} for path, tensors in _kept_tensors(block)}
        )

    def leaves(block: nn.Module, _args: object, _output: object) -> None:
        if torch.is_grad_enabled():
            for handle in handles:
                handle.remove()
        for path, tensors in _kept_tensors(block):
            new_tensors = [tensor for tensor in tensors if id(tensor) not in before.get(path, ())]
            if new_tensors:
                _check_left(f"{name}.{'.'.join(path)}", new_tensors)
                for placeholder in placeholders:
                    _forget(placeholder, path)

    handles = (
        block.register_forward_pre_hook(eager(block, enters)),
        block.register_forward_hook(eager(block, leaves)),
    )


def _check_left(name: str, tensors: Iterable[Tensor]) -> None:
    """Check the tensors that a block has stored in its forward.

    Raises:
        StageError: One of them is a loss.
    """
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if any(tensor.numel() == 1 for tensor in differentiable):
        raise StageError(
            f"'{name}' is a number with a gradient that a block stores in its forward, {SUMMED}"
        )
    if differentiable:
        warnings.warn(
            f"'{name}' is stored by a block in its forward, but under a pipeline a stage sees "
            "only its own blocks. Return values that are used after the blocks from them "
            "(ParallelPlan(collects=True))",
            stacklevel=2,
        )


def _kept_tensors(block: nn.Module) -> Iterator[tuple[_Path, tuple[Tensor, ...]]]:
    """Yield the tensors in module attributes, other than parameters and buffers, by path."""
    for suffix, module in block.named_modules():
        parents = tuple(suffix.split(".")) if suffix else ()
        for key, value in vars(module).items():
            if key not in _OWN and (tensors := tuple(tensor for _, tensor in tensors_in(value))):
                yield (*parents, key), tensors


class _Shell:
    """Placeholder for a child of a remote module.

    It has the child's public attributes that are neither parameters nor buffers. Its own children
    are shells too.
    """

    def __init__(self, name: str, attributes: dict[str, object]) -> None:
        self.__dict__.update(attributes)
        self._ptdp_name = name

    def __getattr__(self, key: str) -> NoReturn:
        name = self.__dict__.get("_ptdp_name", "?")
        check_kept(self, key)
        raise AttributeError(
            f"'{name}' and its attribute '{key}' are on another pipeline stage. Use them in the "
            "forward of the block that contains the module, or use pipeline_parallel_size=1"
        )

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise StageError(
            f"'{self._ptdp_name}' is called, but it is on another pipeline stage. Call it in the "
            "forward of the block that contains it, or use pipeline_parallel_size=1"
        )


def plain_attributes(name: str, module: nn.Module) -> dict[str, object]:
    """Return the public attributes of module ``name`` that are neither parameters nor buffers.

    Its children become shells. Values that its class defines are those of now.
    """
    attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    children = {
        key: _Shell(f"{name}.{key}", plain_attributes(f"{name}.{key}", child))
        for key, child in module._modules.items()
        if child is not None
    }
    return {**_constants(module), **children, **attributes}


def _constants(module: nn.Module) -> dict[str, object]:
    """Return the plain values that a module's class defines, as constants and properties."""
    found: dict[str, object] = {}
    for kind in reversed(type(module).__mro__):
        if issubclass(nn.Module, kind):  # torch's own
            continue
        for key, value in vars(kind).items():
            if isinstance(value, property):
                with contextlib.suppress(Exception):  # it may need tensors, or a running Trainer
                    value = getattr(module, key)
            if type(value) in _PLAIN and not key.startswith("_"):
                found[key] = value
    return found


def _forget(shell: object, path: tuple[str, ...]) -> None:
    """Make every access to ``path`` on ``shell`` raise an error.

    The forward changes this attribute on another stage.
    """
    *parents, key = path
    for parent in parents:
        if parent not in vars(shell):
            return
        shell = vars(shell)[parent]
    vars(shell).pop(key, None)
    vars(shell).setdefault("_ptdp_forgotten", {})[key] = ".".join(path)


def check_kept(shell: object, key: str) -> None:
    """Check that ``key`` was not forgotten.

    Raises:
        StageError: It was.
    """
    path = vars(shell).get("_ptdp_forgotten", {}).get(key)
    if path is not None:
        raise StageError(
            f"'{path}' of a block on another pipeline stage is read, but blocks store a tensor "
            "there in their forward, which is not sent. Return it from the blocks (x, loss = "
            "block(x), with ParallelPlan(collects=True)), or use pipeline_parallel_size=1"
        )
