"""Tests of crossings with several tensors.

A model cut in one process matches the whole model, or the cut is refused."""

import contextlib
import gc
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_ptdp.pipeline.boundary import Boundary
from lightning_ptdp.pipeline.crossing import (
    Form,
    StageError,
    TensorForm,
    describe,
    rebuild,
    substitute,
    tensors_in,
)
from lightning_ptdp.pipeline.stage import PipelineCut
from tests.pipeline.crossing_models import (
    EXACT,
    MODELS,
    RANGES,
    WIDTH,
    Base,
    Block,
    Context,
    Emulated,
    FrozenMemory,
    KeptBias,
    Memory,
    Nest,
    Pair,
    PairBlock,
    Skip,
    as_the_whole,
    build,
    crossing_of,
    ids,
)


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_match_whole_model(model):
    as_the_whole(model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_prior_training_matches_whole_model(model, context):
    whole = build(model).eval()
    with context():
        torch.testing.assert_close(
            Emulated(whole).forward(ids(), training=False), whole(ids()), rtol=0, atol=0
        )


@pytest.mark.parametrize(
    ("model", "dtypes", "extras"),
    [
        (Pair, [torch.float64, torch.float64], []),
        (Nest, [torch.float64, torch.float64, torch.int64, torch.bool], []),
        (Memory, [torch.float64, torch.float64], [((1,), 1)]),
        (Skip, [torch.float64, torch.float64], [(("other",), 1)]),
        (Context, [torch.float64, torch.float64], [(("context", "memory", 0), 1)]),
    ],
)
def test_only_required_tensors_cross_stage_boundary(model, dtypes, extras):
    stages = Emulated(build(model))
    stages.forward(ids(), training=True)
    for crossing in stages.crossings:
        assert [tensor.dtype for tensor in crossing.tensors] == dtypes
        assert list(crossing.form.extras) == extras
        assert [form.differentiable for form in crossing.form.tensors] == [
            dtype.is_floating_point for dtype in dtypes
        ]
    for entered in stages.entered[1:]:
        assert [tensor.shape for tensor in entered.gradients().tensors] == [
            form.shape for form in entered.awaited
        ]


def assert_one_tensor_crosses(model, name):
    """And the named parameter has the gradient of the whole model."""
    whole = build(model)
    stages = Emulated(whole)
    whole(ids()).sum().backward()
    stages.backward(stages.forward(ids(), training=True).sum())
    assert [len(crossing.tensors) for crossing in stages.crossings] == [1, 1]
    gradient = whole.get_parameter(name).grad
    torch.testing.assert_close(stages.gradients()[name], gradient, **EXACT)


def test_tensor_returned_twice_is_sent_once_with_summed_gradient():
    class Same(Base):
        def __init__(self):
            super().__init__(SameBlock)

        def run_blocks(self, x, ids):
            y = x
            for layer in self.layers:
                x, y = layer(x, y)
            return x + 2 * y

    class SameBlock(PairBlock):
        def forward(self, x, y):
            mixed = self.mix(x, y)
            return mixed, mixed

    assert_one_tensor_crosses(Same, "embedding.weight")


def test_evaluation_expects_no_gradients():
    stages = Emulated(build(Memory))
    with torch.no_grad():
        stages.forward(ids(), training=False)
    assert [crossing.awaited for crossing in stages.crossings] == [(), ()]
    assert [crossing.roots() for crossing in stages.crossings] == [(), ()]


def test_unfreezing_parameters_keeps_crossing_form():
    """Parameters may be unfrozen during training, but the form is sent only once."""
    whole = build(FrozenMemory)
    stages = Emulated(whole)
    stages.backward(stages.forward(ids(), training=True).sum())
    before = stages.crossings[0].form
    for part in (whole, *stages.parts):
        part.requires_grad_(True).zero_grad()
    stages.backward(stages.forward(ids(), training=True).sum())
    whole(ids()).sum().backward()
    assert stages.crossings[0].form == before
    torch.testing.assert_close(
        stages.gradients()["memory.weight"], whole.memory.weight.grad, **EXACT
    )


@pytest.mark.parametrize("training", [True, False])
def test_local_crossing_shares_memory_between_stages(training):
    stages = Emulated(build(Memory))
    stages.forward(ids(), training=training)
    for crossing, entered in zip(stages.crossings, stages.entered[1:], strict=True):
        assert [t.data_ptr() for t in crossing.tensors] == [t.data_ptr() for t in entered.tensors]
        assert all(
            tensor.is_leaf and tensor.requires_grad == training for tensor in entered.tensors
        )


def test_finished_stage_releases_its_tensors():
    stages = Emulated(build(Memory))
    stages.forward(ids(), training=False)
    watched = [weakref.ref(tensor) for crossing in stages.crossings for tensor in crossing.tensors]
    stages.crossings, stages.entered, stages.roots = [], [], []
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_each_stage_uses_its_own_copy_of_bare_parameter():
    class Bare(KeptBias):
        def run_blocks(self, x, ids):
            return self.chain(x, self.memory.weight)

    assert_one_tensor_crosses(Bare, "memory.weight")


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_blocks_match_whole_model(how, monkeypatch):
    traced = []
    returned = Boundary.returned

    def watched(boundary, *args, **kwargs):
        traced.append(torch.compiler.is_compiling())
        return returned(boundary, *args, **kwargs)

    monkeypatch.setattr(Boundary, "returned", watched)
    whole = build(Memory)
    stages = Emulated(whole)
    for part, (start, stop) in zip(stages.parts, RANGES, strict=True):
        for index in range(start, stop):
            if how == "wrapped":
                part.layers[index] = torch.compile(part.layers[index], backend="eager")
            else:
                part.layers[index].compile(backend="eager")
    for batch in (ids(2, 5), ids(3, 4)):
        torch.testing.assert_close(
            stages.forward(batch, training=True), whole(batch), rtol=0, atol=0
        )
    assert traced == [False] * 8, (
        "the hooks depend on tensor identity and must not be compiled with the block"
    )


# ---- refusals ------------------------------------------------------------------------------------


class EachItsOwn(Base):
    def run_blocks(self, x, ids):
        memories = [self.memory(x) * k for k in range(4)]
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, memory)
        return x


class OnlyAtTheEnd(Base):
    def run_blocks(self, x, ids):
        memory = self.memory(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, memory) if index == 3 else layer(x)
        return x


class AroundTheBlocks(Base):
    def run_blocks(self, x, ids):
        return self.chain(x) + x


class Residual(Base):
    def run_blocks(self, x, ids):
        for layer in self.layers:
            x = x + layer(x)
        return x


class SecondComputed(Base):
    """The second stream is modified between the blocks."""

    def __init__(self):
        super().__init__(PairBlock)

    def run_blocks(self, x, ids):
        y = x
        for layer in self.layers:
            x, y = layer(x, y)
            y = y + 1
        return x + y


class Collected(Base):
    """Each block returns a loss, as a router does."""

    def __init__(self):
        super().__init__(CollectedBlock)

    def run_blocks(self, x, ids):
        total = 0
        for layer in self.layers:
            x, loss = layer(x)
            total = total + loss
        return x + total


class CollectedBlock(Block):
    def forward(self, x, other=None):
        return self.mix(x, x), x.square().mean()


class Opaque(Base):
    def __init__(self):
        super().__init__(OpaqueBlock)

    def run_blocks(self, x, ids):
        for layer in self.layers:
            x, _ = layer(x)
        return x


class OpaqueBlock(Block):
    def forward(self, x, other=None):
        return self.mix(x, x), object()


class NamedBlock(Block):
    def forward(self, x, other=None):
        return Named(self.mix(x, x), None)


class Named(NamedTuple):
    x: Tensor
    weights: Tensor | None


class ReturnsNamed(Opaque):
    def __init__(self):
        Base.__init__(self, NamedBlock)


class Returned(Base):
    def forward(self, ids):
        x = self.embedding(ids)
        return {"logits": self.head(self.chain(x)), "embedded": [x]}


class Sealed(Base):
    """The memory is in an object that is not searched for tensors."""

    def __init__(self):
        super().__init__(SealedBlock)

    def run_blocks(self, x, ids):
        sealed = nn.ParameterDict()
        sealed.value = self.memory(x)
        return self.chain(x, sealed)


class Transformed(Base):
    def run_blocks(self, x, ids):
        return torch.func.vmap(lambda row: self.chain(row[None])[0])(x)


class ForwardMode(Base):
    def run_blocks(self, x, ids):
        with torch.autograd.forward_ad.dual_level():
            return self.chain(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


class SealedBlock(Block):
    def forward(self, x, other=None):
        return self.mix(x, other.value)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (EachItsOwn, "same tensor for all"),
        (OnlyAtTheEnd, "Pass it to every block"),
        (AroundTheBlocks, "between or after the repeated blocks"),
        (Residual, "computes something before block"),
        (SecondComputed, "computes something before block|does not pass it to"),
        (Collected, r"x, total = block\(x, total\)"),
        (Opaque, "returned a object, which cannot be rebuilt"),
        (ReturnsNamed, "returned a Named, which cannot be rebuilt"),
        (Returned, "between or after the repeated blocks"),
        (Sealed, "between or after the repeated blocks"),
        (Transformed, "is called inside a transform"),
        (ForwardMode, "is called inside a transform"),
    ],
)
def test_unsupported_model_is_refused(model, words, training):
    stages = Emulated(build(model))
    with torch.set_grad_enabled(training), pytest.raises(StageError, match=words):
        stages.forward(ids(), training=training)


class FillingBlock(Block):
    def forward(self, x, other=None):
        other["seen"].append(x.detach().mean())
        return self.mix(x, x)


class Filling(Base):
    """Blocks append to a list that they receive."""

    def __init__(self):
        super().__init__(FillingBlock)

    def run_blocks(self, x, ids):
        state = {"seen": []}
        return self.chain(x, state) + sum(state["seen"])


class HaltingBlock(Block):
    def forward(self, x, other=None):
        output = self.mix(x, x * other.logical_not().unsqueeze(-1))
        other |= x.detach().mean(-1) > 0
        return output


class Halting(Base):
    """Blocks change a mask that they receive."""

    def __init__(self):
        super().__init__(HaltingBlock)

    def run_blocks(self, x, ids):
        halted = ids < 0
        return self.chain(x, halted) + halted.unsqueeze(-1)


@pytest.mark.parametrize("model", [Filling, Halting])
def test_block_that_changes_an_argument_is_refused(model):
    with pytest.raises(StageError, match=r"block 'layers\.0' changes a tensor"):
        Emulated(build(model)).forward(ids(), training=True)


class MemoBlock(Block):
    def forward(self, x, other=None):
        if "angles" not in other:
            other["angles"] = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        if not self.training:
            other["cache"].append(x.detach())
        return self.mix(x, x + other["angles"])


class Memo(Filling):
    """Each block computes a missing entry of a dictionary; evaluation also fills a list."""

    def __init__(self):
        Base.__init__(self, MemoBlock)

    def run_blocks(self, x, ids):
        state = {"cache": []}
        return self.chain(x, state)


@pytest.mark.parametrize("evaluates", [False, True])
def test_block_that_stores_a_missing_entry_is_warned_of(evaluates):
    model = build(Memo).train(not evaluates)
    expected = model(ids())
    with contextlib.nullcontext() if evaluates else pytest.warns(UserWarning, match="'angles'"):
        actual = Emulated(model).forward(ids(), training=True)
    torch.testing.assert_close(actual, expected, **EXACT)


class AddingBlock(Block):
    def forward(self, x, other=None):
        return self.mix(x, x + other)


class KeptMask(Base):
    """The mask is computed once, which may be during an evaluation."""

    def __init__(self):
        super().__init__(AddingBlock)
        self.mask = None

    def run_blocks(self, x, ids):
        if self.mask is None:
            self.mask = torch.ones(ids.size(1), 1, dtype=x.dtype)
        return self.chain(x, self.mask)


def test_mask_kept_from_an_evaluation_is_accepted():
    stages = Emulated(build(KeptMask))
    with torch.inference_mode():
        expected = stages.forward(ids(), training=False)
    torch.testing.assert_close(stages.forward(ids(), training=True), expected)


class InspectedBlock(Block):
    scale = 0.5

    @property
    def is_wide(self):
        return self.own.out_features > 1

    @property
    def norm(self):
        return self.own.weight.norm()


class Inspected(Base):
    """The loop reads values that the class of the blocks defines."""

    def __init__(self):
        super().__init__(InspectedBlock)

    def run_blocks(self, x, ids):
        for layer in self.layers:
            x = layer(x, x.detach()) if layer.is_wide and layer.scale == 0.5 else layer(x)
        return x


def test_values_of_block_classes_can_be_read():
    model = build(Inspected)
    stages = Emulated(model)
    torch.testing.assert_close(stages.forward(ids(), training=True), model(ids()), **EXACT)
    with pytest.raises(AttributeError, match="'norm' are on another pipeline stage"):
        _ = stages.parts[0].layers[3].norm


class ChangingBlock(Block):
    def forward(self, state):
        state["x"] = self.mix(state["x"], state["x"])
        state["count"].add_(1)
        return state


class Changing(Base):
    """Blocks change the dictionary and the tensor that they receive, and return them."""

    def __init__(self):
        super().__init__(ChangingBlock)

    def run_blocks(self, x, ids):
        state = {"x": x, "count": torch.zeros(())}
        for layer in self.layers:
            state = layer(state)
        return state["x"] + state["count"]


def test_block_may_change_what_it_returns():
    as_the_whole(Changing)


def test_forward_outside_of_step_is_refused():
    stages = Emulated(build(Memory))
    for part in stages.parts:
        with pytest.raises(StageError, match="outside of a step"):
            part(ids())


def test_shape_and_mask_operations_around_blocks_are_allowed():
    class Inspects(Memory):
        def run_blocks(self, x, ids):
            kept = x.new_ones(x.shape[:2]).unsqueeze(-1) * torch.zeros_like(x).to(
                ids.device, x.dtype
            ).add(1)
            assert not torch.isnan(x).any()
            first, size = x, x.size()
            x = super().run_blocks(x, ids) * kept.to(first)
            assert x.shape == size == first.shape
            return x.view_as(first).type_as(first) * first.new_ones(())

    whole = build(Inspects)
    stages = Emulated(whole)
    torch.testing.assert_close(stages.forward(ids(), training=True), whole(ids()), rtol=0, atol=0)
    assert [len(crossing.tensors) for crossing in stages.crossings] == [2, 2]


# ---- descriptions --------------------------------------------------------------------------------


def test_form_round_trips_through_header():
    tensors = (torch.zeros(2, 3), torch.zeros((), dtype=torch.bool))
    output = {
        "a": (tensors[0], [None, True, 2, 0.1, "text"]),
        3: {"b": tensors[1], "again": tensors[0]},
    }
    crossing = crossing_of(output)
    form = Form(
        tensors=crossing.form.tensors, output=crossing.form.output, extras=((("memory", 0), 1),)
    )
    received = pickle.loads(pickle.dumps(form))
    assert received == form
    again = rebuild(received.output, crossing.tensors, lambda: pytest.fail("nothing is elsewhere"))
    assert again == output
    assert again["a"][1] == [None, True, 2, 0.1, "text"]
    assert again[3]["again"] is tensors[0]
    assert all(
        TensorForm.of(tensor) == known for tensor, known in zip(tensors, form.tensors, strict=True)
    )


def test_nested_tensors_are_listed_and_substituted():
    x, other = torch.zeros(1), torch.ones(1)
    nest = ({"a": [x, 1]}, x)
    assert [path for path, _ in tensors_in(nest)] == [(0, "a", 0), (1,)]
    assert substitute(nest, lambda path, tensor: tensor) is nest
    changed = substitute(nest, lambda path, tensor: other if path == (1,) else tensor)
    assert changed[0] is nest[0]
    assert changed[1] is other


@pytest.mark.parametrize("value", [object(), {1.5: 1}, torch.Size([1]), {2}])
def test_unsupported_output_type_is_named(value):
    with pytest.raises(StageError, match=f"block 'layers.0' returned a {type(value).__name__}"):
        describe((torch.zeros(1), value), lambda tensor: 0, "layers.0")


def test_tensor_origins_are_tracked_only_during_run():
    whole = build(Memory)
    assert not hasattr(whole.embedding(ids()), "origin")
    cut = PipelineCut(
        whole, parts=Emulated(build(Memory)).cuts[0].parts, ranges=RANGES, stages=(0,)
    )
    cut.run(0, None, lambda: whole(ids()), training=True)
    assert type(whole.embedding(ids())) is Tensor
