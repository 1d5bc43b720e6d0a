"""Recomputation changes only memory: gradients stay bitwise equal.

This includes dropout, tensor parallelism and autocast.
"""

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ptdp.blocks import offload
from lightning_ptdp.blocks.recompute import (
    Recomputed,
    apply_recomputation,
    check_recomputation,
    check_recompute_options,
)
from lightning_ptdp.forward.own_forward import restore_forwards
from lightning_ptdp.models import GPT, GPTConfig, gpt_plan
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.errors import raises_with
from tests.fake_cuda import fake_cuda
from tests.memory import kept_bytes
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import counted_collectives, tensor_group

CONFIG = GPTConfig.gpt2(
    vocabulary_size=61,
    sequence_length=16,
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    dropout=0.2,
    init_std=0.2,
)
PLAN = gpt_plan(CONFIG, prefix="")
OPTIONS = {
    "full": {"policy": "full"},
    "full, 1 layer": {"policy": "full", "layers": 1},
    "selective": {"policy": "selective", "selective": PLAN.selective},
    "offload": {"policy": "offload"},
    "offload, 2 layers": {"policy": "offload", "layers": 2},
    "selective, 3 layers": {"policy": "selective", "selective": PLAN.selective, "layers": [3]},
}


def make_gpt():
    torch.manual_seed(3)
    return GPT(CONFIG)


def ids(batch=3, length=12):
    return torch.randint(
        CONFIG.vocabulary_size, (batch, length), generator=torch.Generator().manual_seed(5)
    )


def step(model, *, seed=9):
    """Run one training step and return its loss and gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    batch = ids()
    loss = nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"loss": loss.detach(), "random": torch.rand(1), **gradients}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@contextmanager
def counted_calls(*modules):
    """Count how often each module's forward runs.

    The hook is on the first child, or on the module itself if it has no children.
    """
    calls = [0] * len(modules)

    def count(index):
        def note(*_):
            calls[index] += 1

        return note

    inner = [next(module.children(), module) for module in modules]
    hooks = [module.register_forward_pre_hook(count(index)) for index, module in enumerate(inner)]
    yield calls
    for hook in hooks:
        hook.remove()


# ---- equal gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gradients_with_dropout_are_bitwise_equal(options, bf16):
    model, reference = make_gpt(), make_gpt()
    apply_recomputation(model, blocks="blocks", **options)
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        expected = step(reference)
        assert_equal(step(model), expected)
        assert not torch.equal(step(reference, seed=10)["loss"], expected["loss"]), (
            "dropout has no effect"
        )


def parallel_step(rank, sequence_parallel):
    group = tensor_group(rank)
    results = []
    for options in (None, *OPTIONS.values(), {"policy": "full", "shard_input": group}):
        model = make_gpt()
        apply_plan(model, PLAN, group=group, sequence_parallel=sequence_parallel)
        if options is not None:
            if sequence_parallel:
                options = {**options, "shard_input": None}
            apply_recomputation(model, blocks="blocks", **options)
        with counted_collectives() as counts:
            results.append((step(model), sum(counts.values())))
    for found, _ in results[1:]:
        assert_equal(found, results[0][0])
    plain, full, one, selective, offload, _, _, sharded = (count for _, count in results)
    per_layer = 4 if sequence_parallel else 2  # collectives in the forward of a block
    assert full == plain + 4 * per_layer
    assert one == plain + per_layer
    assert selective == offload == plain
    assert sharded == (full if sequence_parallel else full + 4)


@pytest.mark.thorough
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["t2", "t2 sp"])
def test_tensor_parallel_gradients_and_collective_counts(pool, sequence_parallel):
    pool.run(parallel_step, world_size=2, args=(sequence_parallel,))


class TupleBlock(nn.Module):
    """Block like in Hugging Face models: keyword arguments, non-tensors, tuple output."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, hidden_states, attention_mask=None, *, flags, cache=None):
        scale, power = flags
        y = self.dropout(torch.tanh(self.linear(hidden_states)) * scale) ** power
        return (hidden_states + (y if attention_mask is None else y * attention_mask), cache)


class TupleModel(nn.Module):
    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.layers, self.by_keyword = nn.ModuleList(TupleBlock() for _ in range(3)), by_keyword

    def forward(self, x, scale):
        mask = torch.linspace(0, 1, 8)
        for layer in self.layers:
            if self.by_keyword:
                x, rest = layer(hidden_states=x, attention_mask=mask, flags=(scale, 2))
            else:
                x, rest = layer(x, mask, flags=(scale, 2))
            assert rest is None
        return x


def replaced(module):
    """Return the names of the modules whose forward was replaced."""
    return [name for name, child in module.named_modules() if "forward" in vars(child)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_blocks_with_keyword_arguments_and_tuple_outputs(by_keyword):
    torch.manual_seed(0)
    reference = TupleModel(by_keyword)
    model = copy.deepcopy(reference)
    apply_recomputation(model, policy="full", blocks=None)
    assert replaced(model) == ["layers.0", "layers.1", "layers.2"]
    gradients = []
    for module in (reference, model):
        torch.manual_seed(1)
        x, scale = torch.randn(4, 8, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        module(x, scale).sum().backward()
        gradients.append([x.grad, scale.grad, *(p.grad for p in module.parameters())])
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def cut_step(recompute):
    """Return the gradients of four stages in one process and the runs of each block.

    Each stage's backward runs after all forwards.
    """
    model, ranges = make_gpt(), ((0, 1), (1, 2), (2, 3), (3, 4))
    parts = find_parts(model, PLAN)
    cut = PipelineCut(model, parts=parts, ranges=ranges, stages=range(4))
    blocks = list(model.blocks)
    if recompute:
        apply_recomputation(model, policy="full", blocks="blocks", ranges=ranges)
    batch = ids()

    def forward():
        return nn.functional.cross_entropy(
            model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )

    torch.manual_seed(9)
    received, backwards, crossings = None, [], []
    with counted_calls(*blocks) as calls:
        for stage in range(4):
            output = cut.run(stage, received, forward, training=True)
            if stage == 3:
                continue
            received = output.entering(training=True)
            backwards.append(output.tensors)
            crossings.append(received.tensors)
        output.backward()
        for sent, entered in zip(reversed(backwards), reversed(crossings), strict=True):
            torch.autograd.backward(sent, [tensor.grad for tensor in entered])
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, calls


def test_recomputation_in_pipeline_stages():
    """The recomputation runs after the step has left the stage.

    The placeholders of the other stages are then in place.
    """
    expected, once = cut_step(recompute=False)
    found, twice = cut_step(recompute=True)
    assert (once, twice) == ([1] * 4, [2] * 4)
    assert len(found) == len(list(make_gpt().parameters()))
    assert_equal(found, expected)


# ---- memory and work -----------------------------------------------------------------------------


def test_saved_memory_by_recompute_policy():
    config = GPTConfig.gpt2(
        vocabulary_size=61,
        sequence_length=64,
        num_layers=1,
        hidden_size=32,
        num_heads=4,
        dropout=0.1,
    )
    kept = {}
    for policy in ("none", "selective", "full"):
        torch.manual_seed(0)
        block = GPT(config).blocks
        if policy != "none":
            apply_recomputation(block, policy=policy, blocks="", selective=("*.attention.core",))
        x = torch.randn(2, 64, 32, requires_grad=True)
        kept[policy] = kept_bytes(lambda x=x, block=block: block[0](x + 0), block.parameters())
    tokens, hidden, scores = 2 * 64, 32, 2 * 4 * 64 * 64
    assert kept["full"] == tokens * hidden * 4
    # Without recomputation, the attention scores save at least their softmax.
    assert kept["none"] - kept["selective"] >= scores * 4
    assert kept["selective"] < tokens * hidden * 4 * 24


class Observed(nn.Module):
    """Block that reports which of its storages are alive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.made = []

    def forward(self, x, shared):
        inner = torch.tanh(self.up(x))  # its backward needs the output
        parts = (inner * shared).chunk(4, dim=-1)
        mixed = parts[0].sigmoid() * parts[1] + parts[2] * parts[3]  # views of one storage
        self.made.append(StorageWeakRef(inner.untyped_storage()))
        return x + mixed + self.down(inner)

    @property
    def lives(self):
        return [not made.expired() for made in self.made]


def _empty(*args, pin_memory=False, empty=torch.empty, **kwargs):
    """Return an empty tensor; only GPUs have page-locked memory."""
    return empty(*args, **kwargs)


@pytest.mark.parametrize(("fetched", "recorded"), [(0, 0), (1, 4)], ids=["used", "unused"])
def test_fetched_storages_are_free_as_soon_as_stream_waits(fetched, recorded):
    """Memory with ``record_stream`` is free only when the device is done, and the host runs ahead.

    It is needed only for storages that no backward uses.
    """
    torch.manual_seed(0)
    model = nn.ModuleList(Observed(16) for _ in range(3))
    apply_recomputation(model, policy="offload", blocks="")
    calls = []
    with fake_cuda(0), mock.patch.object(torch, "empty", _empty):
        model.cuda()
        record = torch.Tensor.record_stream
        noted = mock.patch.object(
            torch.Tensor, "record_stream", lambda *used: (calls.append(used), record(*used))
        )
        inputs = [torch.randn(8, 16).cuda().requires_grad_()]
        shared = torch.rand(64).cuda()
        for block in model:
            inputs.append(block(inputs[-1], shared))
        with noted:
            torch.autograd.grad(inputs[-1].sum(), inputs[2 * fetched])
            inputs.clear()
            del model, block
            gc.collect()
        assert len(calls) == recorded
        calls.clear()  # while the GPU exists


@pytest.mark.parametrize("layers", [None, 2])
def test_offloaded_blocks_are_released_and_prefetched(layers, monkeypatch):
    """Each storage is offloaded once, and the last block's storages stay on the device.

    A block is fetched while the next one runs its backward.
    """
    torch.manual_seed(0)
    model = nn.ModuleList(Observed(16) for _ in range(4))
    reference = copy.deepcopy(model)
    apply_recomputation(model, policy="offload", blocks="", layers=layers)
    sending = [name for name, block in model.named_children() if block.forward.__self__.sends]
    assert sending == ["0", "1", "2", "3"][: layers or 4]
    events = []
    for name in ("send", "release", "fetch"):
        whole = getattr(offload._Block, name)

        def noted(self, name=name, whole=whole):
            before = sum(s.device is None for s in self._alive())
            whole(self)
            if change := sum(s.device is None for s in self._alive()) - before:
                events.append(f"{name} {self.layer}: {abs(change)}")

        monkeypatch.setattr(offload._Block, name, noted)
    unpack = offload._Block.unpack

    def needed(self, saved):
        if f"need {self.layer}" not in events:
            events.append(f"need {self.layer}")
        return unpack(self, saved)

    monkeypatch.setattr(offload._Block, "unpack", needed)

    def run(blocks):
        torch.manual_seed(1)
        x, shared = torch.randn(8, 16, requires_grad=True), torch.rand(64)
        y = x
        for block in blocks:
            y = block(y, shared)
        return x, y.sum()

    x, loss = run(model)
    sent = range(3) if layers is None else range(2)
    # Block input, tanh output, the product shared by four views, and the first view's sigmoid.
    assert events == [f"release {index}: 4" for index in sent]
    assert [block.lives for block in model] == [[index not in sent] for index in range(4)]
    events.clear()
    loss.backward()
    if layers is None:
        assert events == [
            "need 3",
            "fetch 2: 4",
            "need 2",
            "fetch 1: 4",
            "need 1",
            "fetch 0: 4",
            "need 0",
        ]
    else:
        assert events == ["need 1", "fetch 1: 4", "fetch 0: 4", "need 0"]
    assert not any(block.lives[0] for block in model)
    expected, other = run(reference)
    other.backward()
    assert x.grad is not None and expected.grad is not None and torch.equal(x.grad, expected.grad)
    for found, p in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, p.grad)


class Force(nn.Module):
    """Computes a gradient with respect to the model's input, through the blocks before."""

    def forward(self, x, source):
        return torch.autograd.grad(x.square().sum(), source, create_graph=True)[0]


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, source):
        return self.layer(x).tanh()


def test_backward_inside_block_reads_offloaded_blocks():
    def gradients(policy):
        torch.manual_seed(0)
        blocks = nn.ModuleList([Dense(), Dense(), Dense(), Force()])
        apply_recomputation(blocks, policy=policy, blocks="")
        source = torch.randn(5, 8, requires_grad=True)
        x = source
        for block in blocks:
            x = block(x, source)
        x.sum().backward()
        return [parameter.grad for parameter in blocks.parameters()]

    for found, expected in zip(gradients("offload"), gradients("none"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def kept_with_parts(rank):
    group = tensor_group(rank)
    found = []
    for shard in (None, group):
        model = make_gpt()
        apply_plan(model, PLAN, group=group, sequence_parallel=False)
        apply_recomputation(model.blocks, policy="full", blocks="", shard_input=shard)
        x = torch.randn(3, 12, 32, requires_grad=True)
        found.append(
            kept_bytes(lambda x=x, model=model: model.blocks[0](x + 0), model.parameters())
        )
    whole = x + 0
    alive = weakref.ref(whole)
    output = model.blocks[0](whole)
    del whole
    assert alive() is None, "the full input is kept in addition to its shard"
    output.sum().backward()
    odd = torch.randn(1, 1, 31, requires_grad=True)
    block = nn.ModuleList([nn.Linear(31, 31)])
    apply_recomputation(block, policy="full", blocks="", shard_input=group)
    found.append(kept_bytes(lambda: block[0](odd), block.parameters()))
    block[0](odd).sum().backward()
    # If a block starts without weights, the tensors that it saves depend on whether its input needs
    # a gradient, in the recomputation too.
    block = nn.ModuleList([nn.Tanh()])
    apply_recomputation(block, policy="full", blocks="", shard_input=group)
    x = torch.linspace(0, 1, 8, requires_grad=True)
    block[0](x + 0).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh() ** 2)
    dist.barrier()
    return found


def test_only_shard_of_block_input_is_saved(pool):
    whole = 3 * 12 * 32 * 4
    for found in pool.run(kept_with_parts, world_size=2):
        assert found == [whole, whole // 2, 31 * 4]


def test_blocks_run_once_in_evaluation_and_twice_in_training():
    model = make_gpt()
    apply_recomputation(model, policy="full", blocks="blocks", layers=3)
    with counted_calls(*model.blocks) as calls:
        with torch.no_grad():
            model(ids())
        with torch.inference_mode():
            model.eval()(ids())
        assert calls == [2] * 4
        step(model)  # fine-tuning in evaluation mode is recomputed too
        assert calls == [4, 4, 4, 3]
        model.train()
        step(model)
    assert calls == [6, 6, 6, 4]


def test_hooks_of_recomputed_module_run_once():
    model, seen = make_gpt(), []
    apply_recomputation(model, policy="full", blocks="blocks")
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    step(model)
    assert seen == ["after", "backward"]


# ---- selection of modules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, "0123456"),
        (2, "013456"),
        (0, ""),
        ([0, 2, 1], "125"),
        (4, "0123456"),
        ((3, 0, 0), ""),
    ],
)
def test_first_layers_of_each_stage_are_recomputed(layers, expected):
    container = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(7))})
    ranges = ((0, 1), (1, 5), (5, 7)) if layers != 2 else ((0, 3), (3, 5), (5, 7))
    if layers == (3, 0, 0):
        with pytest.raises(
            ValueError,
            match=r"recomputes 3 layers of stage 0, which has 1. Use at most \[1, 0, 0\]",
        ):
            apply_recomputation(container, policy="full", blocks="h", ranges=ranges, layers=layers)
        return
    apply_recomputation(container, policy="full", blocks="h", ranges=ranges, layers=layers)
    assert "".join(name.removeprefix("h.") for name in replaced(container)) == expected


def test_blocks_of_other_stages_are_skipped():
    model = make_gpt()
    parts = find_parts(model, PLAN)
    ranges = ((0, 2), (2, 3), (3, 4))
    PipelineCut(model, parts=parts, ranges=ranges, stages=[0, 2])
    apply_recomputation(model, policy="full", blocks="blocks", ranges=ranges, layers=1)
    assert replaced(model) == ["blocks.0", "blocks.3"]
    restore_forwards(model, Recomputed)
    apply_recomputation(
        model, policy="selective", blocks="blocks", ranges=ranges, selective=PLAN.selective
    )
    assert replaced(model) == [f"blocks.{index}.attention.core" for index in (0, 1, 3)]


def test_nested_patterns_are_recomputed_once():
    model = make_gpt()
    patterns = ("blocks.*.attention.core", "blocks.*.attention", "blocks.[01].mlp")
    apply_recomputation(model, policy="selective", blocks="blocks", selective=patterns, layers=3)
    assert replaced(model) == [
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.1.attention",
        "blocks.1.mlp",
        "blocks.2.attention",
    ]


# ---- module structure ----------------------------------------------------------------------------


def test_recomputation_keeps_names_types_and_copies():
    model = make_gpt()
    modules, names, state = (
        list(model.modules()),
        [n for n, _ in model.named_parameters()],
        list(model.state_dict()),
    )
    types = [type(m) for m in modules]
    expected = step(model)
    apply_recomputation(model, policy="full", blocks="blocks")
    assert list(model.modules()) == modules
    assert [type(m) for m in model.modules()] == types
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == state
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with counted_calls(*made.blocks) as calls:
            assert_equal(step(made), expected)
        assert calls == [2] * 4
        assert made.blocks[0].forward.__self__.module is made.blocks[0]
    assert type(pickle.loads(pickle.dumps(model.blocks[1].forward)).__self__.module) is type(
        model.blocks[1]
    )
    restore_forwards(model, Recomputed)
    assert all("forward" not in vars(m) for m in model.modules())
    assert_equal(step(model), expected)


class OwnForward:
    """Forward of an instance, set by other code."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def __call__(self, *inputs):
        self.calls += 1
        return type(self.module).forward(self.module, *inputs)


def test_instance_forward_is_kept_and_restored():
    model = make_gpt()
    block = model.blocks[0]
    own = OwnForward(block)
    block.__dict__["forward"] = own
    for _ in range(2):  # the second call changes nothing
        apply_recomputation(model, policy="full", blocks="blocks")
    step(model)
    assert own.calls == 2
    restore_forwards(model, Recomputed)
    assert block.forward is own
    assert "forward" not in vars(model.blocks[1])


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("none", 2), ["recompute_layers=2", "recompute='none'", "leave"]),
        (
            ("selective", [1, 1, 1]),
            ["recompute_layers=[1, 1, 1]", "3 entries", "= 2", "one number for all"],
        ),
    ],
)
def test_invalid_recompute_options_are_refused(options, words):
    with raises_with(words):
        check_recompute_options(*options, num_stages=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "selective"}, ["recompute='selective'", "selective=(", "recompute='full'"]),
        (
            {"policy": "selective", "selective": ("blocks.*.atention.core",)},
            ["'blocks.*.atention.core'", "inside 'blocks'", "attention.core"],
        ),
        ({"policy": "selective", "selective": ("head",)}, ["'head'", "inside 'blocks'"]),
        ({"policy": "full", "layers": 4}, ["recompute_layers=4", "1, 3 layers", "Use at most 3"]),
        ({"policy": "full", "layers": (1, 4)}, ["recompute_layers=[1, 4]", "stage 1", "[1, 3]"]),
        ({"policy": "full", "blocks": None}, []),
        ({"policy": "selective", "selective": PLAN.selective, "layers": 3}, []),
        ({"policy": "none"}, []),
    ],
)
def test_recompute_options_are_checked_against_model(options, words):
    with torch.device("meta"):
        model = GPT(CONFIG)
    options = {"blocks": "blocks", "ranges": ((0, 1), (1, 4)), **options}
    if not words:
        check_recomputation(model, **options)
        return
    with raises_with(words):
        check_recomputation(model, **options)


def test_plan_checks_selective_patterns():
    PLAN.check(make_gpt(), 1)
    with pytest.raises(
        ValueError,
        match=r"pattern 'blocks\.\*\.attn\.core' in the plan's selective matches no module of GPT; nearest "
        r"names: .*core",
    ):
        ParallelPlan(selective=("blocks.*.attn.core",)).check(make_gpt(), 1)
    with pytest.raises(ValueError, match=r"selective='a' must be a list"):
        ParallelPlan(selective="a")
    assert ParallelPlan(selective=["a"]).selective == ("a",)
