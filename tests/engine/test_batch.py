"""Splitting of batches and merging of outputs."""

from collections import UserDict, defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ptdp.base.nested import batch_size, iterate_tensors, map_tensors
from lightning_ptdp.engine.microbatches import (
    merge_outputs,
    microbatch_sizes,
    signature,
    split_batch,
)
from lightning_ptdp.engine.rank_agreement import label_spread

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Labelled:
    tokens: Tensor
    source: str


@dataclass(frozen=True)
class Built:
    tokens: Tensor
    scale: InitVar[float]
    lengths: Tensor = field(init=False)

    def __post_init__(self, scale):
        object.__setattr__(self, "lengths", self.tokens * scale)


class Columns(UserDict):
    """Like a TensorDict, loses the size of its batch if it is made of its items."""

    def __init__(self, items, batch_size=()):
        super().__init__(items)
        self.batch_size = self.shape = torch.Size(batch_size)

    def __getitem__(self, key):
        if not isinstance(key, slice):
            return super().__getitem__(key)
        items = {name: value[key] for name, value in self.items()}
        return Columns(items, [len(range(*key.indices(self.shape[0])))])

    def clone(self, recurse):
        assert not recurse
        return Columns(self.data, self.batch_size)

    def set(self, key, value):
        self[key] = value


@given(st.integers(1, 50), st.integers(1, 20))
def test_microbatch_sizes_are_even_and_complete(samples, count):
    sizes = microbatch_sizes(samples, count)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, count)
    assert max(sizes) - min(sizes) <= 1


def test_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="the batch has 0 samples"):
        microbatch_sizes(0, 2)


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(7),
        (torch.arange(7), torch.arange(14).view(7, 2)),
        {"x": torch.arange(7), "nested": [torch.arange(7), {"y": torch.arange(7)}]},
        Pair(torch.arange(7), torch.arange(7)),
        Labelled(torch.arange(7), "book"),
        defaultdict(list, x=torch.arange(7)),
        Columns({"x": torch.arange(7)}, [7]),
        Columns({"x": torch.arange(7)}),
        {
            "x": torch.arange(7),
            "scale": torch.tensor(2.0),
            "mask": torch.ones(1, 3),
            "names": list("abcdefg"),
        },
    ],
)
def test_microbatches_keep_type_and_sizes(batch):
    sizes = microbatch_sizes(batch_size(batch), 3)
    parts = split_batch(batch, sizes)
    assert [batch_size(part) for part in parts] == list(sizes)
    assert type(parts[0]) is type(batch)
    if isinstance(batch, Columns) and batch.shape:
        assert [map_tensors(part, Tensor.clone).batch_size[0] for part in parts] == list(sizes)


def test_lists_are_split_but_scalars_and_broadcasts_are_not():
    batch = {
        "x": torch.arange(4),
        "scale": torch.tensor(2.0),
        "mask": torch.ones(1, 3),
        "names": list("abcd"),
    }
    first, second = split_batch(batch, (2, 2))
    assert first["scale"] is batch["scale"]
    assert second["mask"] is batch["mask"]
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert second["x"].tolist() == [2, 3]


@pytest.mark.parametrize(
    "items",
    [
        [{"weight": float(i)} for i in range(4)],
        [{"weight": torch.tensor(i)} for i in range(4)],
        [("file", i) for i in range(4)],
        [("a", 1, 2.0, None)] * 4,  # as long as the batch, but its items are no samples
        [[i] for i in range(4)],
        [torch.tensor(i) for i in range(4)],
        np.arange(4.0),
        np.array(list("abcd")),
    ],
)
def test_one_item_per_sample_is_split_like_samples(items):
    first, second = split_batch({"x": torch.arange(4), "items": items}, (2, 2))
    assert (list(first["items"]), list(second["items"])) == (list(items[:2]), list(items[2:]))


def test_fields_of_samples_in_lists_are_split_one_by_one():
    # ``default_collate`` makes one list per position in a sample's list.
    fields = [torch.arange(2), torch.zeros(())]
    first, second = split_batch(fields, (1, 1))
    assert first[0].tolist() == [0] and second[0].tolist() == [1]
    assert first[1] is fields[1] is second[1]
    batch = {
        "x": torch.arange(2),
        "answers": [("a0", "a1"), ("b0", "b1")],
        "views": [fields[0]] * 2,
    }
    second = split_batch(batch, (1, 1))[1]
    assert second["answers"] == [("a1",), ("b1",)]
    assert [view.tolist() for view in second["views"]] == [[1], [1]]


@pytest.mark.parametrize(
    "batch", [{"a": torch.zeros(4), "b": torch.zeros(3)}, {"a": torch.tensor(1.0)}, "text"]
)
def test_batch_without_common_first_dimension_is_refused(batch):
    with pytest.raises(ValueError, match="dimension"):
        batch_size(batch)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(4).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "nested"],
)
def test_sparse_and_nested_tensors_are_whole_or_refused(tensor):
    """They have no rows that a microbatch could take; a step on the whole batch may use them."""
    batch = {"edges": tensor.to(torch.int64), "x": torch.zeros(len(tensor), 3)}
    with pytest.raises(ValueError, match="edges in the batch has layout"):
        batch_size(batch)
    assert split_batch(batch, (len(tensor),)) == [batch]
    assert not label_spread(batch, (len(tensor),), device=torch.device("cpu")).any()


def test_outputs_are_concatenated_and_scalars_weighted():
    outputs = [
        {"logits": torch.zeros(2, 3), "loss": torch.tensor(1.0), "ids": ["a", "b"]},
        {"logits": torch.ones(1, 3), "loss": torch.tensor(4.0), "ids": ["c"]},
    ]
    merged = merge_outputs(outputs, (2, 1), (2.0, 1.0))
    assert merged["logits"].shape == (3, 3)
    assert merged["loss"].item() == 2.0
    assert merged["ids"] == ["a", "b", "c"]


def test_arrays_and_lists_of_samples_are_merged():
    outputs = [
        {
            "scores": np.ones(2),
            "texts": [torch.zeros(3), torch.zeros(5)],
            "error": np.float32(1),
            "losses": [torch.tensor(1.0), torch.tensor(2.0)],
            "classes": np.array(["x", "y"]),
        },
        {
            "scores": np.zeros(1),
            "texts": [torch.ones(4)],
            "error": np.float32(4),
            "losses": [torch.tensor(4.0), torch.tensor(5.0)],
            "classes": np.array(["x", "y"]),
        },
    ]
    merged = merge_outputs(outputs, (2, 1), (2.0, 1.0))
    assert merged["scores"].tolist() == [1, 1, 0]
    assert [len(text) for text in merged["texts"]] == [3, 5, 4]
    assert merged["error"] == 2.0
    assert [loss.item() for loss in merged["losses"]] == [2.0, 3.0]  # one process has these means
    assert merged["classes"].tolist() == ["x", "y"]


def test_integers_and_missing_outputs_become_lists():
    outputs = [
        {"right": 4, "task": 3, "share": 0, "auxiliary": torch.ones(()), "first": "a"},
        {"right": 1, "task": 3, "share": 0.3, "auxiliary": None},
    ]
    assert merge_outputs(outputs, (2, 1), (2.0, 1.0)) == {
        "right": [4, 1],
        "task": 3,
        "share": pytest.approx(0.1),
        "auxiliary": [torch.ones(()), None],
        "first": ["a", None],
    }


def test_fields_of_outputs_are_merged():
    merged = merge_outputs(
        [Labelled(torch.zeros(2, 3), "a"), Labelled(torch.ones(1, 3), "a")], (2, 1), (2.0, 1.0)
    )
    assert merged.tokens.sum(1).tolist() == [0, 0, 3]
    assert merged.source == "a"
    pair = Pair(torch.zeros(5), torch.tensor(1.0))
    merged = merge_outputs([pair, pair], (2, 2), (1.0, 1.0))
    assert isinstance(merged, Pair)
    assert merged.y.item() == 1.0


def test_nan_of_microbatch_with_zero_weight_is_ignored():
    merged = merge_outputs([torch.tensor(float("nan")), torch.tensor(3.0)], (1, 1), (0.0, 5.0))
    assert merged.item() == 3.0


def test_signature_distinguishes_shapes_and_dtypes():
    one = signature({"x": torch.zeros(2, 3)})
    assert one == signature({"x": torch.ones(2, 3)})
    assert one != signature({"x": torch.zeros(2, 4)})
    assert one != signature({"x": torch.zeros(2, 3, dtype=torch.float64)})


def test_tensors_of_half_copied_dataclass_are_found():
    """A copy of a module in a step passes objects that copy.deepcopy has not filled yet."""
    copied = object.__new__(Labelled)
    copied.tokens = torch.arange(4)
    assert [tensor.tolist() for tensor in iterate_tensors({1: copied})] == [[0, 1, 2, 3]]


def test_dataclass_with_init_only_argument_is_split():
    parts = split_batch(Built(torch.arange(4), 2.0), (3, 1))
    assert [part.tokens.tolist() for part in parts] == [[0, 1, 2], [3]]
    assert [part.lengths.tolist() for part in parts] == [[0, 2, 4], [6]]
