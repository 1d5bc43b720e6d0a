"""Private and renamed functions of torch, and differences between its supported versions.

A comment "Needed until torch X" marks code that can be removed once X is the lowest supported
version. A test reports these places when the bound in ``pyproject.toml`` is raised
(tests/test_torch_shims.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from lightning_ptdp.base.torch_calls import outer_frames
from lightning_ptdp.shims.lightning import is_compiled as is_compiled_module

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return a function that a compiler calls without tracing it.

    ``torch.compiler.disable`` does the same, but imports the compiler at once.
    """
    return cast(Function, torch._disable_dynamo(function))


compares_storages = torch._has_compatible_shallow_copy_type
"""Function by which ``Module.to`` decides whether a parameter's values can be replaced."""


def keep_padded(model: nn.Module) -> None:
    """Let torch's encoders compute padding in evaluation too, in place.

    By default they pass packed sequences to their layers. Stand-ins for layers of other pipeline
    stages and sharded attentions accept only tensors.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def with_late_waits(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` that make a graph wait for collectives late.

    The graph then waits where the result is used, as the source code does. By default, torch's
    compiler waits right where a collective starts.
    """
    if arguments.get("backend", "inductor") != "inductor":
        return dict(arguments)
    # A mode is a named set of options, and torch accepts either a mode or options.
    from torch._inductor import list_mode_options

    late = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
    }
    mode = arguments.get("mode")
    mode_options = {} if mode is None else list_mode_options(mode, arguments.get("dynamic"))
    remaining = {name: value for name, value in arguments.items() if name != "mode"}
    return {**remaining, "options": {**late, **mode_options, **(arguments.get("options") or {})}}


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the tensor's storage, equal for all views of it.

    Living storages have different keys, even without addresses.
    """
    return tensor.untyped_storage()._cdata


def without_data() -> AbstractContextManager[object]:
    """Return a context in which tensors have sizes but no values, and use no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # FakeTensorMode makes torch report an available GPU. A first backward would then start a thread
    # for that GPU, and no backward could run in processes forked later.
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()
    return FakeTensorMode(allow_non_fake_inputs=True)


def unscale_before_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a loss scaler divide by the scale before the step, in place.

    Otherwise, a fused step would do the division.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        vars(optimizer)["_step_supports_amp_scaling"] = False


@contextlib.contextmanager
def replaced_total_norm(replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let ``clip_grad_norm_`` and ``get_total_norm`` compute norms by ``replacement``.

    ``replacement`` gets the original function as first argument. Modules that imported
    ``clip_grad_norm_`` by name are affected too, because it looks up a private name when it is
    called.
    """
    places = [(torch.nn.utils.clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm")]
    originals = [getattr(*place) for place in places]
    for place, original in zip(places, originals, strict=True):
        setattr(*place, partial(replacement, original))
    try:
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            setattr(*place, original)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return True if hooks see the parameter's gradient before or after its accumulation."""
    return bool(getattr(parameter, "_backward_hooks", None)) or has_accumulation_hooks(parameter)


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Return True if hooks see the parameter's gradient after its accumulation."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def copy_gradient_hooks(parameter: torch.Tensor, to: torch.Tensor) -> None:
    """Let ``to`` call the hooks of ``parameter`` on gradients."""
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        to.register_hook(hook)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        to.register_post_accumulate_grad_hook(hook)


def adds_to_gradient(parameter: torch.Tensor) -> bool:
    """Return True if the running backward will add to ``parameter.grad``, unseen by hooks.

    The backward of ``torch.autograd.grad`` does not add to it.
    """
    if (
        type(parameter) is not nn.Parameter
        or not parameter.requires_grad
        or has_gradient_hooks(parameter)
    ):
        return False
    try:
        return torch._C._will_engine_execute_node(
            torch.autograd.graph.get_gradient_edge(parameter).node
        )
    except RuntimeError:  # no backward runs, or one that computes only this gradient
        return False


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return True if a transform of ``torch.func`` or forward-mode differentiation uses it."""
    return (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
    )


@contextlib.contextmanager
def keeping_casts() -> Iterator[None]:
    """Keep the copies of trainable weights in lower precision that ``sharing_casts`` makes.

    Autocast frees them at the end of its outermost context, and this context acts as that one.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def sharing_casts(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context that may be autocast, and let it reuse the copies of weights.

    Lightning's contexts do not, because of an old error of torch's (pytorch issue 65766).
    """
    with context():
        torch.set_autocast_cache_enabled(True)  # restored at the end of autocast
        yield


def has_module_hooks(module: nn.Module) -> bool:
    """Return True if hooks see a module's calls or their backwards."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_backward_hooks(module)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if hooks see the backwards of a module's calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if hooks see the optimizer's steps."""
    return any(
        getattr(optimizer, name, None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )


def saved_tensor_hooks() -> object:
    """Return the hooks that are applied to the tensors that autograd saves now, or None.

    Activation checkpointing uses such hooks.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_recomputed_later(*, by_us: bool) -> bool:
    """Return True if a checkpoint of other code will run this part of the forward again.

    A reentrant checkpoint is the forward of a ``torch.autograd.Function``, so that any such forward
    counts, and in compiled code any part without gradients. The result is False in the
    recomputation itself.

    Args:
        by_us: Whether this package recomputes the part too, with its own contexts.
    """
    if torch.compiler.is_compiling():
        # A graph that read ``by_us`` would be compiled again for the recomputation.
        return not torch.is_grad_enabled()
    if not torch.is_grad_enabled():
        return _is_in_autograd_function()
    hooks: Any = saved_tensor_hooks()
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return not by_us and name.startswith("_checkpoint_hook.")


def _is_in_autograd_function() -> bool:
    return any(
        isinstance(frame.f_locals.get(name), FunctionCtx)
        for frame in outer_frames()
        for name in frame.f_code.co_varnames[:1]
    )


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., object]], dict[int, bool]]:
    """Return a module's forward hooks by key, and the keys of those with keyword arguments.

    Both are the module's own dictionaries.
    """
    return module._forward_hooks, module._forward_hooks_with_kwargs


def forward_pre_hooks(
    module: nn.Module,
) -> tuple[dict[int, Callable[..., object]], dict[int, bool]]:
    """Return the same for the hooks that run before a module's forward."""
    return module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def output_before_hooks(tensor: torch.Tensor) -> tuple[object, int] | None:
    """Return the graph's edge of the output that a module's backward hooks replaced by ``tensor``.

    torch replaces the outputs of a module with such hooks after its forward hooks. The result is
    None for any other tensor.
    """
    node = tensor.grad_fn
    if node is None or node.name() != "BackwardHookFunctionBackward":
        return None
    return node.next_functions[tensor.output_nr]


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``module.compile()`` was called.

    The module is then traced with its hooks and any replacement of its forward.
    """
    return module._compiled_call_impl is not None


def has_compiled_parts(module: nn.Module) -> bool:
    """Return True if the LightningModule or a module in it is compiled.

    If a torch function mode surrounded one of its forwards, the next forward without the mode would
    be compiled again.
    """
    return any(
        is_compiled(child) or is_compiled_module(child) for child in nn.Module.modules(module)
    )


def grouped_product(
    x: torch.Tensor, matrices: torch.Tensor, *, sizes: Callable[[], list[int]], ends: torch.Tensor
) -> torch.Tensor:
    """Return the products of consecutive rows of ``x`` (r, i) with ``matrices`` (E, i, o).

    torch's grouped kernel is used if it has one for these. Otherwise the products are computed one
    after the other.

    Args:
        x: The rows.
        matrices: The matrices, or a view with the last two dimensions exchanged.
        sizes: Returns the number of rows of each matrix, which the grouped kernel does not need.
        ends: (E,) int32 on the device, end of each matrix's rows.
    """
    if x.size(0) and _has_grouped_kernel(x, matrices):
        return nn.functional.grouped_mm(x, matrices, offs=ends)
    return _ProductsInTurn.apply(x, matrices, sizes())


def _has_grouped_kernel(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return True if torch has a grouped kernel for these tensors.

    It needs single or half precision and rows of whole 16 bytes, on CUDA bfloat16 and Hopper or
    Blackwell. For others torch computes the products in turn too, but first reads ``ends``.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or any(
        size * x.element_size() % 16 for size in matrices.shape[1:]
    ):
        return False
    return x.device.type == "cpu" or (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    )


def cuda_error() -> str:
    """Start CUDA, and return torch's reason if it does not start, or ""."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch without CUDA
        return str(error).partition(". ")[0].strip(".")
    return ""


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """End the program if ``condition`` is False, without waiting for the device.

    On a GPU the error has no traceback to this call; CUDA prints ``message``.
    """
    torch._assert_async(condition, message)


class _ProductsInTurn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrices: torch.Tensor, sizes: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.sizes = sizes
        output = x.new_empty(x.size(0), matrices.size(2))
        for part, rows, matrix in zip(output.split(sizes), x.split(sizes), matrices, strict=True):
            torch.mm(rows, matrix, out=part)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, matrices = ctx.saved_tensors
        parts = grad.split(ctx.sizes)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        if grad_x is not None:
            for part, rows, matrix in zip(grad_x.split(ctx.sizes), parts, matrices, strict=True):
                torch.mm(rows, matrix.t(), out=part)
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        if grad_matrices is not None:
            for part, rows, grad_part in zip(grad_matrices, x.split(ctx.sizes), parts, strict=True):
                torch.mm(rows.t(), grad_part, out=part)
        return grad_x, grad_matrices, None


def set_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let autograd accumulate ``parameter.grad`` in ``dtype`` (in torch since 2.10)."""
    if dtype != gradient_dtype(parameter):
        parameter.grad = None
        parameter.grad_dtype = dtype


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that ``set_gradient_dtype`` has set; the parameter's own by default."""
    return parameter.grad_dtype or parameter.dtype


def found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device
) -> torch.Tensor:
    """Return the tensor in which ``GradScaler.unscale_`` records an overflow.

    It is created if this rank has no gradient at all.
    """
    tensors: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    if not tensors:
        tensors[device] = torch.zeros((), device=device)
    (tensor,) = tensors.values()
    return tensor
