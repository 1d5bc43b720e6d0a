"""Vocabulary-parallel cross-entropy against ``F.cross_entropy``: values, gradients, corner cases,
communication."""

import random
from itertools import product

import pytest
import torch

from lightning_ptdp.tensor_parallel import VocabularyRange, vocabulary_parallel_cross_entropy
from tests.tensor_parallel.toy import assert_same, counted_collectives, tensor_group, with_z_loss

pytestmark = pytest.mark.thorough


def own_columns(full, words):
    """Return this rank's columns. Padding would dominate every softmax if it were included."""
    local = torch.full((*full.shape[:-1], words.rows), 99.0, dtype=full.dtype)
    local[..., : words.count] = full[..., words.start : words.stop]
    return local


def compare(group, logits, target, *, z_loss=0.0, **options):
    """Compare loss and gradient with torch's, and check that the logits are unchanged."""
    words = VocabularyRange(size=logits.size(-1), parts=group.size, index=group.rank)
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    reference = logits.to(dtype, copy=True).requires_grad_()
    expected = with_z_loss(reference, target, z_loss, **options)
    weights = (
        torch.rand(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    )
    (expected * weights).sum().backward()
    local = own_columns(logits, words).requires_grad_()
    before = local.detach().clone()
    with counted_collectives() as counts:
        loss = vocabulary_parallel_cross_entropy(
            local, target, vocabulary=words, group=group, z_loss=z_loss, **options
        )
        (loss * weights).sum().backward()
    assert counts == ({"all_reduce": 2} if group.size > 1 else {})
    assert loss.dtype is dtype
    assert torch.equal(local.detach(), before), "the logits were modified"
    assert_same(loss, expected)
    assert local.grad.dtype is logits.dtype
    assert_same(
        local.grad[..., : words.count].to(dtype),
        reference.grad[..., words.start : words.stop],
        dtype=logits.dtype,
    )
    assert not local.grad[..., words.count :].any(), "padding got a gradient"


def check_options(rank):
    group = tensor_group(rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for vocabulary in (5, 8, 37):
            torch.manual_seed(vocabulary)
            logits = (torch.randn(6, vocabulary) * 4).to(dtype)
            target = torch.randint(vocabulary, (6,))
            target[0], target[3] = vocabulary - 1, 0
            some = target.clone()
            some[1], some[4] = -100, -100
            for reduction, smoothing in product(("mean", "sum", "none"), (0.0, 0.1, 1.0)):
                options = {"reduction": reduction, "label_smoothing": smoothing}
                compare(group, logits, target, **options)
                compare(group, logits, some, **options)
                compare(group, logits, target, ignore_index=0, **options)


def check_random_cases(rank):
    group = tensor_group(rank)
    draw = random.Random(5)
    for case in range(40):
        generator = torch.Generator().manual_seed(case)
        shape = draw.choice([(), (1,), (7,), (2, 3), (2, 1, 4)])
        vocabulary = draw.randint(1, 40)
        scale = draw.choice([1e-3, 1.0, 30.0, 1e3])
        dtype = draw.choice([torch.float32, torch.float64])
        logits = (
            torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64) * scale
            + draw.uniform(-50, 50)
        ).to(dtype)
        ignored = draw.choice([-100, -1, 0, vocabulary + 3])
        target = torch.randint(vocabulary, shape, generator=generator)
        target = torch.where(
            torch.rand(shape, generator=generator) < draw.choice([0.0, 0.4, 0.9]), ignored, target
        )
        compare(
            group,
            logits,
            target,
            ignore_index=ignored,
            label_smoothing=draw.choice([0.0, 0.05, 0.5]),
            reduction=draw.choice(["mean", "sum", "none"]),
            z_loss=draw.choice([0.0, 1e-4]) if scale < 100 else 0.0,
        )


def check_corners(rank):
    group = tensor_group(rank)
    logits = torch.randn(4, 13, generator=torch.Generator().manual_seed(7))
    nothing = torch.full((4,), -100)
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            compare(group, logits, nothing, reduction=reduction, label_smoothing=smoothing)
    excluded = logits.clone()
    excluded[:, 3:11] = -torch.inf
    compare(group, excluded, torch.tensor([0, 1, 2, 12]))
    words = VocabularyRange(size=13, parts=group.size, index=group.rank)
    for bad in (13, -1):
        with pytest.raises(
            IndexError, match=f"Target {bad} is out of bounds: the vocabulary has 13"
        ):
            vocabulary_parallel_cross_entropy(
                own_columns(logits, words),
                torch.tensor([0, 1, bad, -100]),
                vocabulary=words,
                group=group,
            )
    broken = logits.clone()
    broken[1, 7] = torch.nan
    loss = vocabulary_parallel_cross_entropy(
        own_columns(broken, words),
        torch.zeros(4, dtype=torch.int64),
        vocabulary=words,
        group=group,
        reduction="none",
    )
    assert loss.isnan().tolist() == [False, True, False, False]
    empty = vocabulary_parallel_cross_entropy(
        own_columns(logits[:0], words), nothing[:0], vocabulary=words, group=group, reduction="sum"
    )
    assert empty.item() == 0.0


CHECKS = pytest.mark.parametrize("check", [check_options, check_random_cases, check_corners])


@CHECKS
@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_parallel_loss_matches_torch(pool, size, check):
    pool.run(check, world_size=size)


@CHECKS
def test_loss_in_group_of_one_matches_torch(check):
    check(0)
