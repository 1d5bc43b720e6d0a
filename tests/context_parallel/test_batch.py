"""Slicing of the tensors of a batch along the sequence."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_ptdp.context_parallel import sequence_length
from lightning_ptdp.context_parallel.sequence_batch import (
    count_targets,
    may_hide,
    padding_masks,
    shard_batch,
)

LENGTH = 8
MINE = [0, 1, 6, 7]
Pair = namedtuple("Pair", "input_ids weights")


@dataclass
class Sample:
    input_ids: Tensor
    scale: float


def shard(batch, **sequence_dims):
    """Return the batch of rank 0 of two."""
    return shard_batch(batch, length=LENGTH, rank=0, size=2, sequence_dims=sequence_dims)


def test_tensors_are_cut_along_sequence_dimension():
    torch.manual_seed(0)
    batch = {
        "input_ids": torch.randn(3, LENGTH),
        "embeddings": torch.randn(3, LENGTH, 5),
        "mask": torch.randn(3, 1, LENGTH, LENGTH),
        "keys": torch.randn(3, 1, 1, LENGTH),
        "image": torch.randn(3, 4, 9, 9),
        "class": torch.randn(3),
        "scalar": torch.tensor(1.0),
        "name": "text",
    }
    local = shard(batch)
    assert torch.equal(local["input_ids"], batch["input_ids"][:, MINE])
    assert torch.equal(local["embeddings"], batch["embeddings"][:, MINE])
    assert torch.equal(local["mask"], batch["mask"][:, :, MINE])
    assert all(local[key] is batch[key] for key in ("keys", "image", "class", "scalar", "name"))


def test_images_are_no_sequence():
    """A tensor with four dimensions may also be a sequence, and the next tensor another one."""
    image = torch.zeros(2, 3, 16, 16)
    text = torch.zeros(2, LENGTH)
    for batch in ({"image": image, "class": torch.zeros(2)}, {"image": image, "text": text}):
        with pytest.raises(ValueError, match=r"does not begin with a tensor \(batch, sequence"):
            sequence_length(batch)
    assert sequence_length({"image": image, "text": text}, {"image": None}) == LENGTH


def test_sequence_dims_override_default_dimension():
    x = torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH)
    local = shard({"rows": x, "whole": x, "nested": [{"rows": x}]}, rows=0, whole=None)
    assert torch.equal(local["rows"], x[MINE])
    assert local["whole"] is x
    assert torch.equal(local["nested"][0]["rows"], x[MINE])
    with pytest.raises(ValueError, match=r"sequence_dims=\{'rows': 2\}.*\(8, 8\)"):
        shard({"rows": x}, rows=2)


def test_containers_keep_their_type():
    x = torch.arange(2 * LENGTH).view(2, LENGTH)
    pair = shard(Pair(x, torch.ones(2)))
    assert isinstance(pair, Pair)
    assert torch.equal(pair.input_ids, x[:, MINE])
    sample = shard(Sample(x, 2.0))
    assert isinstance(sample, Sample)
    assert (sample.input_ids.size(1), sample.scale) == (4, 2.0)
    assert torch.equal(shard((x, [x]))[1][0], x[:, MINE])


def test_single_rank_keeps_batch():
    batch = {"input_ids": torch.zeros(1, 7)}
    assert shard_batch(batch, length=7, rank=0, size=1) is batch


@pytest.mark.parametrize(
    ("shapes", "dims", "expected"),
    [
        ({"image": (2, 3, 8, 8), "input_ids": (2, 16)}, {}, 16),
        ({"class": (2,), "x": (2, 12, 4)}, {}, 12),
        ({"x": (2, 3, 20)}, {"x": 2}, 20),
        ({"class_weights": (2, 5), "x": (2, 12)}, {"class_weights": None}, 12),
    ],
)
def test_sequence_length_of_batch(shapes, dims, expected):
    assert (
        sequence_length({name: torch.zeros(shape) for name, shape in shapes.items()}, dims)
        == expected
    )


def test_batch_without_unique_sequence_length_is_refused():
    with pytest.raises(ValueError, match=r"with \{'class': \(2,\)\}.*sequence_dims"):
        sequence_length({"class": torch.zeros(2)})
    with pytest.raises(ValueError, match="different lengths"):
        sequence_length({"a": torch.zeros(2, 4), "b": torch.zeros(2, 8)}, {"a": 1, "b": 1})


def test_padding_is_detected_in_attention_mask():
    ones = torch.ones(2, 4, dtype=torch.int64)
    padded = ones.clone()
    padded[1, 3:] = 0
    (mask,) = padding_masks({"attention_mask": ones, "x": padded})
    assert mask is ones
    assert not may_hide(ones)
    assert may_hide(padded)
    assert may_hide(padded == 0)
    assert padding_masks({}) == []


IDS = torch.ones(2, 3, dtype=torch.long)
LABELS = torch.tensor([[1, -100, 3], [-100, -100, 6]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": LABELS, "label_mask": IDS}, 3),
        ({"input_ids": IDS, "target": LABELS, "attention_mask": IDS}, 3),
        ((IDS, LABELS), 3),
        ((IDS, LABELS, IDS), 3),
        ({"labels": LABELS.short()}, 3),
        ({"labels": LABELS[..., None].expand(2, 3, 4)}, 12),
        ({"label_mask": IDS, "targets": LABELS, "labels_are_whole": IDS}, 3),
        ({"input_ids": IDS, "labels": torch.tensor([1, -100])}, 6),
        ({"hidden": torch.ones(2, 3), "label": torch.tensor([1, -100])}, None),
    ],
    ids=[
        "labels",
        "target",
        "tuple",
        "before mask",
        "short",
        "of codebooks",
        "named masks",
        "of samples",
        "no tokens",
    ],
)
def test_ignored_labels_are_not_counted(batch, expected):
    count = count_targets(batch, 3)
    assert (None if count is None else count.item()) == expected
