"""Shims for names of torch that differ between versions."""

import pickle
import re
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_ptdp
from lightning_ptdp.shims.torch import (
    adds_to_gradient,
    forward_hooks,
    found_inf,
    gradient_dtype,
    grouped_product,
    has_gradient_hooks,
    has_module_hooks,
    is_compiled,
    saved_tensor_hooks,
    set_gradient_dtype,
    storage_key,
    unscale_before_step,
    untraced,
    with_late_waits,
    without_data,
)
from lightning_ptdp.shims.torch_distributed import (
    abort_process_groups,
    all_gather_single,
    connect_symmetric_memory,
    default_store,
    flight_record,
    has_symmetric_products,
    is_communication_error,
    nccl_options,
    reduce_scatter_single,
    resolve_group,
    start_traced,
    wait_traced,
)


def _collect(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a deprecated function would warn
        gathered = torch.empty(4)
        all_gather_single(gathered, torch.tensor([rank * 2.0, rank * 2.0 + 1]), dist.group.WORLD)
        scattered = torch.empty(2)
        reduce_scatter_single(scattered, torch.arange(4.0) + rank, dist.group.WORLD)
    return gathered.tolist(), scattered.tolist()


def test_collectives_of_flat_tensors(pool):
    assert pool.run(_collect, world_size=2) == [
        ([0.0, 1.0, 2.0, 3.0], [1.0, 3.0]),
        ([0.0, 1.0, 2.0, 3.0], [5.0, 7.0]),
    ]


def _collect_traced(rank):
    name = dist.group.WORLD.group_name
    assert resolve_group(name) is dist.group.WORLD

    def collect(x):
        under_way = [
            start_traced("all_reduce", x, "sum", name),
            start_traced("all_gather_into_tensor", x, 2, name),
            start_traced("reduce_scatter_tensor", x, "sum", 2, name),
        ]
        return [wait_traced(y) for y in under_way]

    return [
        y.tolist()
        for y in torch.compile(collect, backend="aot_eager", fullgraph=True)(
            torch.arange(2.0) + rank
        )
    ]


def test_traced_collectives_in_compiled_graph(pool):
    first, second = pool.run(_collect_traced, world_size=2)
    assert first[:2] == second[:2] == [[1.0, 3.0], [0.0, 1.0, 1.0, 2.0]]
    assert first[2] + second[2] == [1.0, 3.0]


def _tell(rank):
    """Write and read through a second store connection, as the watchdog's thread does."""
    store = default_store().clone()
    store.set(f"key {rank}", f"value {rank}")
    dist.barrier()
    assert store.check([f"key {1 - rank}"])
    assert not store.check(["no such key"])
    return bytes(store.get(f"key {1 - rank}"))


def test_default_store_accepts_second_connection(pool):
    assert pool.run(_tell, world_size=2) == [b"value 1", b"value 0"]


def _abort(rank):
    dist.new_group([0, 1])
    dist.barrier()
    abort_process_groups()
    return dist.is_initialized()


def test_all_process_groups_are_aborted(pool):
    assert pool.run(_abort, world_size=2) == [False, False]


def test_gloo_timeout_is_communication_error():
    assert is_communication_error(RuntimeError("Application timeout caused pair closure"))
    assert not is_communication_error(RuntimeError("the application timed out"))


@pytest.mark.skipif(
    not dist.is_nccl_available(), reason="torch was built without NCCL, whose record is read"
)
def test_nccl_flight_record_is_readable():
    assert {"version", "pg_config"} <= pickle.loads(flight_record()).keys()


@pytest.mark.skipif(
    not dist.is_nccl_available(), reason="torch was built without NCCL, whose options are made"
)
def test_nccl_group_options():
    options = nccl_options(timedelta(seconds=5), high_priority=True, max_ctas=3)
    assert (options.is_high_priority_stream, options.config.max_ctas, options._timeout) == (
        True,
        3,
        timedelta(seconds=5),
    )
    assert (
        nccl_options(None, high_priority=False).config.max_ctas
        == dist.ProcessGroupNCCL.Options().config.max_ctas
    )
    with (
        mock.patch.object(dist.ProcessGroupNCCL, "Options", SimpleNamespace),
        pytest.raises(ValueError, match="channel_ctas=3"),
    ):
        nccl_options(None, high_priority=True, max_ctas=3)


def test_symmetric_memory_is_available():
    """Its use is tested in tests/tensor_parallel/test_overlap.py."""
    from torch.distributed import _symmetric_memory

    assert has_symmetric_products()
    with mock.patch.object(_symmetric_memory, "get_symm_mem_workspace", autospec=True) as made:
        connect_symmetric_memory("tensor", 8)
    made.assert_called_once_with("tensor", min_size=8)


def test_compiler_options_for_late_waits():
    """Their effect is tested in tests/test_compile.py."""
    from torch._inductor import comms, config

    late = with_late_waits({})["options"]
    assert all(hasattr(config, name) for name in late)
    assert all(
        callable(getattr(comms, name)) for name in late["reorder_for_compute_comm_overlap_passes"]
    )
    given = with_late_waits({"mode": "max-autotune-no-cudagraphs", "dynamic": False})
    assert given == {
        "dynamic": False,
        "options": {**late, "max_autotune": True, "coordinate_descent_tuning": True},
    }
    own = {"options": {"reorder_for_compute_comm_overlap": False, "epilogue_fusion": True}}
    assert with_late_waits(own)["options"] == {**late, **own["options"]}
    assert with_late_waits({"backend": "aot_eager"}) == {"backend": "aot_eager"}


def test_tensor_hooks_are_detected():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(parameter)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda gradient: None)
        assert has_gradient_hooks(parameter)
        handle.remove()
        assert not has_gradient_hooks(parameter)
    assert saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert saved_tensor_hooks() is not None
    assert saved_tensor_hooks() is None


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_module_hooks_are_detected(kind):
    module = torch.nn.Linear(2, 2)
    assert not has_module_hooks(module)
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert has_module_hooks(module)


def test_backward_that_adds_to_gradient_is_detected():
    added, x, other = [], torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    product = x * other
    product.register_hook(lambda _: added.append(adds_to_gradient(x)))
    product.sum().backward(retain_graph=True)
    product.sum().backward(inputs=[other], retain_graph=True)
    torch.autograd.grad(product.sum(), [x])
    assert added == [True, False, False]
    assert not adds_to_gradient(x)


def test_backward_accepts_gradient_edge():
    x = torch.ones(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x * 2)
    torch.autograd.backward(edge, torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad.tolist() == [2.0, 4.0, 6.0]


def test_gradient_dtype_may_be_wider_than_parameter():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert gradient_dtype(parameter) == torch.bfloat16
    set_gradient_dtype(parameter, torch.float32)
    assert gradient_dtype(parameter) == torch.float32
    buffer = torch.full((2,), 256.0)
    parameter.grad = buffer
    parameter.sum().backward()
    assert parameter.grad is buffer
    assert buffer.tolist() == [257.0, 257.0], "the gradient was rounded to bfloat16"


def test_found_inf_is_read_from_grad_scaler():
    scaler = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.unscale_(optimizer)
    assert float(found_inf(scaler, optimizer, parameter.device)) == 1.0
    empty = torch.optim.SGD([{"params": []}], lr=1.0)
    scaler.unscale_(empty)
    assert float(found_inf(scaler, empty, parameter.device)) == 0.0
    scaler.step(empty)


def test_fused_step_uses_unscaled_gradients():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [
        torch.optim.SGD([p], lr=0.1, fused=fused)
        for p, fused in zip(parameters, (False, True), strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        unscale_before_step(optimizer)
        scaler.scale((parameter * 2).sum()).backward()
        scaler.unscale_(optimizer)
        assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3
        parameter.grad.mul_(0.5)  # gradient clipping
        scaler.step(optimizer)
    assert parameters[0].tolist() == parameters[1].tolist() == pytest.approx([0.9] * 3)


def test_untraced_function_is_called_but_not_compiled():
    calls = []

    @untraced
    def note(x):
        calls.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: note(x * 2) * 3, backend="eager")
    assert [compiled(torch.ones(())).item() for _ in range(2)] == [9, 9]
    assert calls == [False, False]


def test_module_compiled_in_place_is_detected():
    module = torch.nn.Linear(2, 2)
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module)


def test_forward_hooks_returns_live_hook_dictionaries():
    module, seen = torch.nn.Identity(), []
    one = module.register_forward_hook(lambda *_: seen.append("one"))
    two = module.register_forward_hook(lambda *_: seen.append("two"), with_kwargs=True)
    hooks, with_kwargs = forward_hooks(module)
    assert set(hooks) == {one.id, two.id}
    assert set(with_kwargs) == {two.id}
    hooks[one.id] = lambda *_: seen.append("other")
    two.remove()
    module(torch.zeros(1))
    assert seen == ["other"]


def test_traced_collective_output_allows_in_place_add():
    """A user's block may add in place to the output of a row-parallel layer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        assert group is not None

        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return wait_traced(start_traced("all_reduce", x, "sum", group.group_name))

            @staticmethod
            def backward(ctx, grad):
                return grad

        weight, bias = (torch.ones(size, requires_grad=True) for size in ((4, 4), (4,)))

        def block(x):
            y = Sum.apply(x @ weight)
            y += bias
            return y

        torch.compile(block, backend="aot_eager", fullgraph=True)(torch.ones(3, 4)).sum().backward()
        assert weight.grad is not None and weight.grad.tolist() == [[3.0] * 4] * 4
        assert bias.grad is not None and bias.grad.tolist() == [3.0] * 4
    finally:
        dist.destroy_process_group()


def test_outdated_torch_workarounds_are_removed():
    package = Path(lightning_ptdp.__file__).parent
    declared = re.search(
        r'"torch>=([\d.]+)', (package.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert declared is not None
    marked = [
        (path.name, version)
        for folder in (package, package.parent / "tests")
        for path in sorted(folder.rglob("*.py"))
        for version in re.findall(
            r"[Nn]eeded until torch (\d+\.\d+)", path.read_text(encoding="utf-8")
        )
    ]
    assert len(marked) >= 8
    assert [each for each in marked if Version(each[1]) <= Version(declared[1])] == []


def test_tensor_unflatten_is_not_used():
    """``Tensor.unflatten`` breaks the graph inside a function mode. Needed until torch 2.14."""
    package = Path(lightning_ptdp.__file__).parent
    found = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r"(?<!torch)\.unflatten\(", path.read_text(encoding="utf-8"))
    ]
    assert not found, "use torch.unflatten"


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 16), (torch.float32, 6), (torch.float64, 16), (torch.bfloat16, 16)],
)
@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 0, 0]])
def test_grouped_product_matches_separate_products(dtype, width, sizes):
    torch.manual_seed(1)
    x = torch.randn(sum(sizes), width, dtype=dtype, requires_grad=True)
    stored = torch.randn(3, 8, width, dtype=dtype, requires_grad=True)
    found = grouped_product(
        x, stored.mT, sizes=lambda: sizes, ends=torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    )
    expected = torch.cat(
        [rows @ matrix.t() for rows, matrix in zip(x.split(sizes), stored, strict=True)]
    )
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for one, other in zip(
        *(torch.autograd.grad(y, (x, stored), grad) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_storage_keys_without_data_are_distinct():
    with without_data():
        one, other = torch.zeros(4), torch.zeros(4)
    assert storage_key(one) == storage_key(one.view(2, 2)) != storage_key(other)


def test_without_data_allocates_no_memory():
    with without_data():
        table = torch.nn.Embedding(2**40, 8)
        found = table(torch.zeros(2, 3, dtype=torch.long))
        found.sum().backward()
    assert found.shape == (2, 3, 8)
    assert table.weight.grad is not None
