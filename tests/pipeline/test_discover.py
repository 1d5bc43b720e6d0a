"""Tests of finding the modules before and after the repeated container.

Most models are traced without data to find the order of calls.
"""

import pytest
import torch
from torch import nn

from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.dry_run import call_order, trace_calls
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.pipeline.crossing_models import Uncalled


class Model(nn.Module):
    """The norm is registered before the layers and called after them."""

    example_input_array = torch.zeros(2, 3, dtype=torch.int64)

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def test_parts_follow_order_of_calls():
    model = Model()
    assert call_order(model) == ["", "embedding", "layers.0", "layers.1", "layers.2", "norm"]
    parts = find_parts(model)
    assert (parts.before, parts.after) == (("embedding",), ("norm", "spare"))
    assert not model._forward_pre_hooks
    assert not model.layers[0]._forward_pre_hooks
    named = find_parts(model, ParallelPlan(before=("norm",)))
    assert named.before == ("norm", "embedding"), "before= must override the order of calls"


def test_registration_order_is_used_without_example_input():
    model = Model()
    model.example_input_array = None
    assert call_order(model) is None
    assert find_parts(model).before == ("embedding", "norm")


def test_value_dependent_forward_cannot_be_traced():
    class Looks(Model):
        def forward(self, ids):
            return super().forward(ids[ids > 1])

    assert trace_calls(Looks(), torch.zeros(2, 3, dtype=torch.int64)) is None


def test_module_called_before_and_after_blocks_is_refused():
    class Both(Model):
        def forward(self, ids):
            x = self.norm(self.embedding(ids))
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    with pytest.raises(
        ValueError, match=r"'norm' is called more than once.*pipeline_parallel_size=1"
    ):
        find_parts(Both())


def test_layers_called_twice_are_refused():
    class Twice(Model):
        def forward(self, ids):
            x = self.embedding(ids)
            for layer in [*self.layers, *self.layers]:
                x = layer(x)
            return self.norm(x)

    with pytest.raises(
        ValueError, match=r"'layers' looks like the repeated container.*blocks='model.layers'"
    ):
        find_parts(Twice())


def test_example_input_of_submodule_is_ignored():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers, self.last = (
                Model(),
                nn.ModuleList(nn.Linear(40, 40) for _ in range(2)),
                nn.Linear(4, 4),
            )

    parts = find_parts(Around())
    assert (parts.blocks, parts.before, parts.after) == (("layers",), ("first",), ("last",))


def test_hugging_face_model_provides_example_input():
    pytest.importorskip("transformers")
    from tests.huggingface.runs import make_model

    parts = find_parts(nn.ModuleDict({"model": make_model("opt")}))
    assert parts.before == (
        "model.model.decoder.embed_tokens",
        "model.model.decoder.embed_positions",
    )
    assert parts.after == ("model.model.decoder.final_layer_norm", "model.lm_head")


def test_module_used_without_call_is_kept_on_every_stage():
    parts = find_parts(Uncalled())
    assert parts.everywhere == ("embedding", "memory")
    model = Uncalled()
    model.example_input_array = None
    assert find_parts(model).everywhere == ()
    assert find_parts(model, ParallelPlan(everywhere=("memory",))).everywhere == ("memory",)
    with pytest.raises(ValueError, match="everywhere='memories' is not a module"):
        find_parts(model, ParallelPlan(everywhere=("memories",)))


def test_blocks_are_not_searched_in_modules_of_every_stage():
    model = nn.ModuleDict({"teacher": Model(), "student": Model()})
    assert find_parts(model).blocks == ("teacher.layers", "student.layers")
    parts = find_parts(model, ParallelPlan(everywhere=("teacher",)))
    assert (parts.blocks, parts.before[:1]) == (("student.layers",), ("teacher",))


def test_container_inside_block_of_another_is_no_container():
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    model = nn.ModuleDict({"backbone": stages, "model": Model()})
    model["model"].layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    assert find_parts(model).blocks == ("backbone", "model.layers")


def test_alias_of_module_runs_where_the_module_does():
    class Prompted(nn.Module):
        """Gives an embedding a second name, as peft's prompt tuning does."""

        example_input_array = Model.example_input_array

        def __init__(self):
            super().__init__()
            self.base = Model()
            self.word_embeddings = self.base.embedding

        def forward(self, ids):
            return self.base(self.word_embeddings(ids).argmax(-1))

    assert find_parts(Prompted()).before == ("base.embedding", "word_embeddings")
    model = Prompted()
    model.example_input_array = model.base.example_input_array = None
    assert "word_embeddings" in find_parts(model).before


class Named(nn.Module):
    """Holds some modules of another model under second names."""

    def __init__(self, second, *, example):
        super().__init__()
        self.base = Model()
        self.second = second(self.base)
        self.base.example_input_array = None
        self.example_input_array = Model.example_input_array if example else None

    def forward(self, ids):
        return self.base(ids)


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize(
    "second",
    [
        lambda base: base.layers,
        lambda base: base.layers[-1],
        lambda base: nn.ModuleList([base.layers[0], base.layers[1]]),
    ],
    ids=["container", "block", "list of blocks"],
)
def test_second_name_of_blocks_is_accepted(second, example):
    assert find_parts(Named(second, example=example)).blocks == ("base.layers",)


def test_alias_of_module_in_plan_runs_where_the_module_does():
    model = Named(lambda base: base.embedding, example=False)
    parts = find_parts(model, ParallelPlan(before=("base.embedding",)))
    assert "second" in parts.before


def test_known_values_are_not_guessed():
    class Counts(Model):
        """Stores its number of layers in a tensor that is no buffer."""

        def __init__(self):
            super().__init__()
            self.depth = torch.tensor(len(self.layers))

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers[: self.depth.item()]:
                x = layer(x)
            return self.norm(x)

    assert "layers.1" in call_order(Counts())


def test_value_dependent_branch_does_not_hide_uncalled_modules():
    class Looks(Uncalled):
        def forward(self, ids):
            return super().forward(ids + (1 if 3 in ids or ids.any() else 0))

    assert call_order(Looks())[-1] == "head"
    assert find_parts(Looks()).everywhere == ("embedding", "memory")


def test_module_queried_or_called_with_shape_is_kept_on_every_stage():
    class Positions(nn.Embedding):
        def forward(self, shape):
            return super().forward(torch.arange(shape[1]))

    class Asks(Model):
        def __init__(self):
            super().__init__()
            self.positions, self.limits = Positions(3, 4), nn.Embedding(3, 4)

        def forward(self, ids):
            assert (
                ids.shape[1] <= self.limits.weight.shape[0]
                and self.embedding.weight.dtype.is_floating_point
            )
            x = self.embedding(ids) + self.positions(ids.shape) + self.limits(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    assert find_parts(Asks()).everywhere == ("limits", "positions")


def test_container_of_module_lists_is_refused():
    model = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(4))
    with pytest.raises(
        ValueError,
        match=r"blocks='layers' has lists of modules as members, such as 'layers.0'. The model "
        r"unpacks",
    ):
        find_parts(nn.ModuleDict({"layers": model}), ParallelPlan(blocks="layers"))
