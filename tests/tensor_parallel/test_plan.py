"""Tensor-parallel plans: matched modules, refusals and messages."""

import pickle

import pytest
import torch
from torch import nn

from lightning_ptdp.tensor_parallel import (
    Column,
    ParallelPlan,
    Partial,
    PerRank,
    Position,
    Row,
    Vocabulary,
)
from tests.errors import raises_with
from tests.tensor_parallel.toy import Toy, toy_plan


def test_resolve_returns_kinds_in_model_order():
    kinds = toy_plan().resolve(Toy())
    assert list(kinds.items()) == [
        ("wte", Vocabulary()),
        ("wpe", Position()),
        ("layers.0.attention.qkv", Column(parts=(32, 16, 16))),
        ("layers.0.attention.proj", Row()),
        ("layers.0.attention.q_norm", Partial()),
        ("layers.0.up", Column()),
        ("layers.0.down", Row()),
        ("layers.1.attention.qkv", Column(parts=(32, 16, 16))),
        ("layers.1.attention.proj", Row()),
        ("layers.1.attention.q_norm", Partial()),
        ("layers.1.up", Column()),
        ("layers.1.down", Row()),
        ("head", Vocabulary()),
    ]


def test_star_matches_within_one_name_component():
    model = Toy()
    assert list(ParallelPlan(tensor={"layers.1.[ud]*": "row"}).resolve(model)) == [
        "layers.1.up",
        "layers.1.down",
    ]
    assert list(ParallelPlan(tensor={"layers.*.d*n": "row"}).resolve(model)) == [
        "layers.0.down",
        "layers.1.down",
    ]
    with pytest.raises(ValueError, match="matches no module"):
        ParallelPlan(tensor={"layers.*.qkv": "column"}).resolve(model)


def test_plans_are_picklable_and_comparable():
    plan = toy_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan == toy_plan()
    assert ParallelPlan(tensor={"a": "row"}) == ParallelPlan(tensor={"a": Row()})
    assert ParallelPlan(before=["wte"]).before == ("wte",)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"tensor": {"layers.*.attention.qvk": "column"}},
            ["'layers.*.attention.qvk'", "Toy", "layers.0.attention.qkv"],
        ),
        ({"tensor": {"zzz": "column"}}, ["'zzz'", "wte"]),
        ({"tensor": {"norm": "row"}}, ["'norm'", "LayerNorm", "Row()", "nn.Linear"]),
        ({"tensor": {"layers.*": "column"}}, ["'layers.0'", "Layer", "nn.Linear"]),
        ({"tensor": {"head": "position"}}, ["'head'", "Linear", "nn.Embedding"]),
        (
            {"tensor": {"head": "row", "h*d": "column"}},
            ["'head'", "Row()", "Column(parts=None)", "'h*d'"],
        ),
        ({"blocks": "layer"}, ["blocks='layer'", "layers"]),
        ({"after": ("nrom",)}, ["after='nrom'", "norm"]),
    ],
)
def test_mismatch_of_plan_and_model_is_refused(plan, words):
    with raises_with(words):
        ParallelPlan(**plan).check(Toy(), tensor_parallel_size=1)


def test_kind_inside_of_module_with_kind_is_refused():
    """Both would shard the inner module, whose weight stayed whole."""
    tensor = {"layers.*.attention": "partial", "layers.*.attention.qkv": "column"}
    with raises_with(["Partial() for 'layers.0.attention'", "'layers.0.attention.qkv' inside"]):
        ParallelPlan(tensor=tensor).check(Toy(), tensor_parallel_size=2)


def test_numbers_of_no_module_are_refused():
    plan = ParallelPlan(
        tensor={"layers.*.up": "column"}, numbers={"layers.*.atention": {"heads": PerRank()}}
    )
    with raises_with(["'layers.*.atention'", "numbers", "layers.0.attention"]):
        plan.check(Toy(), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParallelPlan(tensor={"a": "columns"}), ["'columns'", "'column'", "'row'"]),
        (lambda: ParallelPlan(tensor={"a": 3}), ["tensor={'a': 3}", "a Kind"]),
        (lambda: ParallelPlan(before="wte"), ["before='wte'", "('wte',)"]),
        (lambda: Column(parts=()), ["parts=()"]),
        (lambda: Column(parts=(4, 0)), ["parts=(4, 0)"]),
    ],
)
def test_invalid_plan_is_refused(make, words):
    with raises_with(words):
        make()


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        (nn.Linear(4, 6), "column", ["out_features=6", "tensor_parallel_size=4", "[2, 3, 6]"]),
        (nn.Linear(6, 4), "row", ["in_features=6", "tensor_parallel_size=4"]),
        (nn.Linear(4, 14), Column(parts=(8, 6)), ["parts[1]=6", "tensor_parallel_size=4"]),
        (nn.Linear(4, 14), Column(parts=(8, 4)), ["sum to 12", "out_features=14"]),
        (nn.Embedding(8, 4, max_norm=1.0), "vocabulary", ["max_norm=1.0"]),
        (nn.Embedding(8, 4, sparse=True), "vocabulary", ["sparse=True"]),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "position", ["scale_grad_by_freq=True"]),
        (
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "column",
            ["parametrizations"],
        ),
    ],
)
def test_unsupported_sizes_and_options_are_refused(module, kind, words):
    model, plan = nn.ModuleDict({"x": module}), ParallelPlan(tensor={"x": kind})
    with raises_with(("'x'", *words)):
        plan.check(model, tensor_parallel_size=4)


def test_indivisible_vocabulary_is_accepted():
    toy_plan().check(Toy(vocabulary=37), tensor_parallel_size=4, sequence_parallel=True)


@pytest.mark.parametrize("missing", ["wte", "head"])
def test_partly_sharded_tied_weight_is_refused(missing):
    tensor = {name: kind for name, kind in toy_plan().tensor.items() if name != missing}
    with pytest.raises(ValueError, match=r"'wte' and 'head' share a weight"):
        ParallelPlan(tensor=tensor).check(Toy(), tensor_parallel_size=2)
    ParallelPlan(tensor=tensor).check(Toy(tied=False), tensor_parallel_size=2)


@pytest.mark.parametrize(("missing", "word"), [("wte", "embedding"), ("head", "head")])
def test_sequence_parallelism_needs_embedding_and_head(missing, word):
    tensor = {name: kind for name, kind in toy_plan().tensor.items() if name != missing}
    with pytest.raises(ValueError, match=rf"sequence_parallel=True.*no 'vocabulary' {word}"):
        ParallelPlan(tensor=tensor).check(
            Toy(tied=False), tensor_parallel_size=2, sequence_parallel=True
        )


def test_explain_names_every_parameter_once():
    lines = toy_plan().explain(Toy()).splitlines()
    text = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert text["wte.weight"] == "(37, 32) (ceil(37/t), 32) vocabulary: split by token"
    assert text["head.weight"].endswith("the same parameter as wte.weight")
    assert (
        text["layers.*.attention.qkv.weight"]
        == "x2 (64, 32) (64/t, 32) column: split by output features, 3 parts, each separately"
    )
    assert text["layers.*.down.bias"].startswith("x2 (32) (32) row: whole, added once")
    assert text["layers.*.attention.q_norm.weight"].endswith("whole; gradient partial")
    assert text["norm.weight"].endswith("partial under sequence parallelism")
    assert len(lines) == 1 + 2 + 14 + 3
