"""Tests of cutting a model's forward: the stages match the whole model, or the cut is refused."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn

from lightning_ptdp.pipeline.containers import ModelParts
from lightning_ptdp.pipeline.crossing import StageError
from lightning_ptdp.pipeline.discover import find_blocks, find_parts
from lightning_ptdp.pipeline.placeholders import stub_shape
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.pipeline.crossing_models import crossing_of


class Net(nn.Module):
    """Embedding, four blocks that may return tuples, head."""

    def __init__(self, *, tuples: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.tuples = tuples
        if tuples:
            self.layers = nn.ModuleList(TupleBlock() for _ in range(4))

    def run_layers(self, x):
        for layer in self.layers:
            x = layer(x)[0] if self.tuples else layer(x)
        return x

    def forward(self, ids):
        return self.head(self.norm(self.run_layers(self.embedding(ids))))


class TupleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x), None


RANGES = ((0, 1), (1, 3), (3, 4))


HIDDEN = torch.zeros(2, 5, 6)


def cut_of(part, stage):
    return PipelineCut(part, parts=find_parts(part), ranges=RANGES, stages=(stage,))


def run_cut(whole, ids):
    result = None
    for stage in range(3):
        part = copy.deepcopy(whole)
        cut = cut_of(part, stage)
        result = cut.run(stage, result, lambda part=part: part(ids), training=True)
    return result


def run_stage(part, stage, received):
    """Run one stage, which receives a block's output unless it is the first."""
    crossing = None if received is None else crossing_of(received)
    ids = torch.zeros(2, 5, dtype=torch.long)
    cut_of(part, stage).run(stage, crossing, lambda: part(ids), training=True)


@pytest.mark.parametrize("tuples", [False, True])
def test_three_stages_match_whole_model(tuples):
    torch.manual_seed(0)
    whole, ids = Net(tuples=tuples), torch.randint(0, 11, (2, 5))
    assert torch.equal(run_cut(whole, ids), whole(ids))


def test_forward_of_an_object_runs_on_its_stage_only():
    torch.manual_seed(0)
    whole, ids = Net(), torch.randint(0, 11, (2, 5))
    for layer in whole.layers:
        layer.forward = MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), layer)
    assert torch.equal(run_cut(whole, ids), whole(ids))


def test_each_parameter_keeps_its_name_on_one_stage():
    whole = Net()
    names = []
    for stage in range(3):
        part = copy.deepcopy(whole)
        cut_of(part, stage)
        names += [name for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


def test_placeholders_keep_training_mode():
    whole = Net()
    for name in ("embedding", "layers.0", "layers.3", "head"):
        whole.get_submodule(name).eval()
    modes = {name: module.training for name, module in whole.named_modules()}
    for stage in range(3):
        part = copy.deepcopy(whole)
        cut_of(part, stage)
        assert {
            name: module.training for name, module in part.named_modules() if name in modes
        } == modes


class SameNorm(Net):
    """One norm, used before and after the blocks."""

    def __init__(self):
        super().__init__()
        self.last = self.norm

    def forward(self, ids):
        return self.head(self.last(self.run_layers(self.norm(self.embedding(ids)))))


@pytest.mark.parametrize(("model", "before"), [(Net, ()), (SameNorm, ("norm",))])
def test_chunks_of_one_rank_match_whole_model(model, before):
    torch.manual_seed(0)
    whole, ids = model(), torch.randint(0, 11, (2, 5))
    expected = whole(ids)
    part, middle = copy.deepcopy(whole), copy.deepcopy(whole)
    parts = find_parts(whole, ParallelPlan(before=before))
    ends = PipelineCut(part, parts=parts, ranges=RANGES, stages=(0, 2))
    between = PipelineCut(middle, parts=parts, ranges=RANGES, stages=(1,))
    first = ends.run(0, None, lambda: part(ids), training=True)
    second = between.run(1, first, lambda: middle(ids), training=True)
    result = ends.run(2, second, lambda: part(ids), training=True)
    assert torch.equal(result, expected)


class Late(Net):
    """Calls the embedding again after the blocks."""

    def forward(self, ids):
        return super().forward(ids) + self.embedding(ids)[..., :3]


class Early(Net):
    """Calls the norm before the blocks, though it is registered after them."""

    def forward(self, ids):
        return self.head(self.run_layers(self.norm(self.embedding(ids))))


class Twice(Net):
    def forward(self, ids):
        return super().forward(ids) + super().forward(ids)


class Between(Net):
    def run_layers(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Scaled(Net):
    def run_layers(self, x):
        for layer in self.layers:
            x = layer(2 * x)
        return x


class Never(Net):
    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


class Indexed(Net):
    """Uses an item of a list before the blocks, though it is registered after them."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(6)])

    def forward(self, ids):
        return self.head(self.norm(self.run_layers(self.embedding(ids) * self.gains[0])))


class Peeking(Net):
    def forward(self, ids):
        return super().forward(ids) @ self.head.weight + self.embedding.weight.sum()


@pytest.mark.parametrize(
    ("model", "stage", "words"),
    [
        (Late, 2, "after="),
        (Early, 0, "before="),
        (Indexed, 0, "'gains' belongs to the last pipeline stage but was used before"),
        (Twice, 2, "more than once"),
        (Between, 1, "between or after the repeated blocks"),
        (Between, 0, "computes something before block"),
        (Scaled, 0, "computes something before block"),
        (Scaled, 1, "computes something before block"),
        (Scaled, 2, "computes something before block"),
        (Never, 1, "belongs to the last pipeline stage"),
        (Never, 2, "did not call the blocks"),
    ],
)
def test_unsupported_forward_is_refused(model, stage, words):
    with pytest.raises(StageError, match=words):
        run_stage(model(), stage, HIDDEN if stage else None)


def test_reading_weight_of_other_stage_is_refused():
    words = "'embedding' and its attribute 'weight' are on another pipeline stage"
    with pytest.raises(AttributeError, match=words):
        run_stage(Peeking(), 2, HIDDEN)


class AsksForDtypes(Net):
    """Reads dtypes and devices of modules before and after the blocks."""

    def forward(self, ids):
        x = self.embedding(ids.to(self.embedding.weight.device)).to(self.embedding.weight.dtype)
        x = self.run_layers(x.to(self.embedding.weight.dtype))
        return self.head(self.norm(x.to(self.head.weight.dtype)))


def test_dtype_and_device_of_weight_of_other_stage_can_be_read():
    whole, ids = AsksForDtypes().double(), torch.randint(0, 11, (2, 5))
    assert torch.equal(run_cut(whole, ids), whole(ids))


def test_weight_of_other_stage_is_absent_outside_of_a_step():
    part = Net()
    cut_of(part, 2)
    names = [name for name, module in part.named_modules() if hasattr(module, "weight")]
    assert names == ["layers.3", "norm", "head"]


class JoinsWeights(Net):
    """Passes the weight inside of a list."""

    def forward(self, ids):
        return super().forward(ids) + torch.cat([self.embedding.weight, self.embedding.weight])


def test_weight_of_other_stage_in_a_list_is_refused():
    with pytest.raises(AttributeError, match=r"everywhere=\('embedding',\)"):
        run_stage(JoinsWeights(), 2, HIDDEN)


class ViewsNorm(Net):
    """Reshapes the output of a norm, which is contiguous also if its input is not."""

    def __init__(self):
        super().__init__()
        self.first_norm = nn.LayerNorm(6)

    def forward(self, ids):
        x = self.first_norm(torch.ones(*ids.T.shape, 6).transpose(0, 1)).view(-1, 6)
        return self.head(self.norm(self.run_layers(x)))


class ViewsChannels(ViewsNorm):
    """Reshapes the output of a norm that keeps the channels last."""

    def __init__(self):
        super().__init__()
        self.first_norm = nn.GroupNorm(2, 6)

    def forward(self, ids):
        x = torch.ones(*ids.shape, 2, 6).permute(0, 3, 1, 2)
        x = self.first_norm(x).permute(0, 2, 3, 1).view(-1, 6)
        return self.head(self.norm(self.run_layers(x)))


@pytest.mark.parametrize("kind", [ViewsNorm, ViewsChannels])
def test_norm_before_blocks_has_same_strides_on_every_stage(kind):
    whole, ids = kind(), torch.zeros(2, 5, dtype=torch.long)
    parts = ModelParts(
        blocks=("layers",), before=("embedding", "first_norm"), after=("norm", "head")
    )
    result = None
    for stage in range(3):
        part = copy.deepcopy(whole)
        cut = PipelineCut(part, parts=parts, ranges=RANGES, stages=(stage,))
        result = cut.run(stage, result, lambda part=part: part(ids), training=True)
    assert torch.equal(result, whole(ids))


class CallsLayerOfBlock(Net):
    """Calls a layer of the first block, which is on another stage."""

    def __init__(self):
        super().__init__(tuples=True)

    def forward(self, ids):
        return super().forward(ids) + self.layers[0].inner(torch.zeros(6)).sum()


class ReadsWeightOfBlock(CallsLayerOfBlock):
    def forward(self, ids):
        return Net.forward(self, ids) + self.layers[0].inner.weight.sum()


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (CallsLayerOfBlock, StageError, "'layers.0.inner' is called, but it is on another"),
        (ReadsWeightOfBlock, AttributeError, "'layers.0.inner' and its attribute 'weight' are"),
    ],
)
def test_use_of_layer_inside_block_of_other_stage_is_refused(model, error, words):
    with pytest.raises(error, match=words):
        run_stage(model(), 2, (HIDDEN, None))


def test_block_container_is_found_or_error_names_option():
    assert find_blocks(Net()) == ("layers",)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ("",)
    with pytest.raises(ValueError, match="blocks="):
        find_blocks(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nearest names: layers"):
        find_parts(Net(), ParallelPlan(blocks="layer"))
    assert find_parts(Net(), ParallelPlan(before=("norm",))) == ModelParts(
        blocks=("layers",), before=("norm", "embedding"), after=("head",)
    )


class FixedTable(nn.Embedding):
    """Position table that takes the shape of the input, as in Pegasus and Marian."""

    def forward(self, shape):
        return super().forward(torch.arange(shape[1]))


def test_frozen_table_with_custom_forward_is_not_stubbed():
    assert stub_shape(FixedTable(4, 2)) is not None
    assert stub_shape(FixedTable(4, 2).requires_grad_(False)) is None
