"""A transformer under a plan against a single process, and collectives per layer."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ptdp.parameters.placement import slice_full
from lightning_ptdp.tensor_parallel import (
    ParallelPlan,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)
from lightning_ptdp.world.mesh import Group
from tests.tensor_parallel.sharded import apply_plan
from tests.tensor_parallel.toy import (
    Toy,
    assert_gradients,
    assert_same,
    counted_collectives,
    sequence_slice,
    tensor_group,
    toy_plan,
)

pytestmark = pytest.mark.thorough


def shifted_loss(model, ids):
    """Return the usual next-token loss of a language model."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=5)


def check_model(rank, tied):
    group = tensor_group(rank)
    for dtype in (torch.float32, torch.float64):
        for sequence_parallel in (False, True):
            torch.manual_seed(11)
            reference = Toy(tied=tied).to(dtype)
            ids = torch.randint(37, (3, 8))
            model = deepcopy(reference).eval()
            shardings = apply_plan(
                model, toy_plan(), group=group, sequence_parallel=sequence_parallel
            )
            assert not any(module.training for module in model.modules())
            for name, parameter in reference.named_parameters():
                assert_same(
                    model.get_parameter(name).detach(), slice_full(parameter, shardings[name])
                )
                whole = not shardings[name].sharded
                assert bool(shardings[name].partial) == (
                    whole and (sequence_parallel or "q_norm" in name)
                ), name
            expected, loss = shifted_loss(reference, ids), shifted_loss(model, ids)
            expected.backward()
            loss.backward()
            assert_same(loss, expected)
            assert_gradients(model, shardings, reference, group)
            assert isinstance(model.wte, VocabularyParallelEmbedding)
            assert isinstance(model.head, VocabularyParallelHead)
            assert (model.wte.weight is model.head.weight) == tied


def check_messages(rank):
    """Check the costs stated in linear.py for a layer of two column-row pairs and for both ends."""
    group = tensor_group(rank)
    for sequence_parallel in (False, True):

        def costs(gathers, scatters, reductions, split=sequence_parallel):
            """Return the collectives with a split sequence, or else the reductions."""
            if split:
                return Counter(all_gather=gathers, reduce_scatter=scatters)
            return Counter(all_reduce=reductions)

        model = Toy()
        apply_plan(model, toy_plan(), group=group, sequence_parallel=sequence_parallel)
        x = torch.randn(2, 8, 32)
        x = sequence_slice(group, sequence_parallel)(x).clone().requires_grad_()
        with counted_collectives() as counts:
            y = model.layers[0](x)
        assert counts == costs(2, 2, 2)
        with counted_collectives() as counts:
            y.sum().backward()
        assert counts == costs(4, 2, 2)

        # two layers, embedding, head, and two small collectives in the loss
        with counted_collectives() as counts:
            loss = shifted_loss(model, torch.randint(37, (2, 8)))
        assert counts == costs(5, 5, 4 + 1) + Counter(all_reduce=2)
        with counted_collectives() as counts:
            loss.backward()
        assert counts == costs(8 + 1 + 1, 4 + 1, 4 + 1)
        with counted_collectives() as counts, torch.no_grad():
            model(torch.randint(37, (2, 8)))
        assert counts == costs(5, 5, 5)


def check_swapping(rank):
    group = tensor_group(rank)
    with torch.device("meta"):
        meta = Toy()
    shardings = apply_plan(meta, toy_plan(), group=group, sequence_parallel=True)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert {name: tuple(p.shape) for name, p in meta.named_parameters()} == {
        n: s.local_shape for n, s in shardings.items()
    }

    class Twice(nn.Module):
        """One module under two names."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.again = self.first
            self.first.bias.requires_grad_(False)

    model = Twice()
    apply_plan(
        model,
        ParallelPlan(tensor={"first": "row", "again": "row"}),
        group=group,
        sequence_parallel=False,
    )
    assert model.first is model.again
    assert model.first.weight.shape == (8, 8 // group.size)
    assert not model.first.bias.requires_grad
    with pytest.raises(ValueError, match="'first' and 'again' share a weight"):
        apply_plan(
            Twice(), ParallelPlan(tensor={"first": "row"}), group=group, sequence_parallel=False
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_match_single_process(pool, size, tied):
    pool.run(check_model, world_size=size, args=(tied,))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("check", [check_messages, check_swapping])
def test_collectives_and_replaced_modules(pool, check, size):
    pool.run(check, world_size=size)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_group_of_one_leaves_model_unchanged(sequence_parallel, tied):
    model = Toy(tied=tied)
    before = list(model.named_modules())
    shardings = apply_plan(model, toy_plan(), group=Group(), sequence_parallel=sequence_parallel)
    assert all(a is b for (_, a), (_, b) in zip(before, model.named_modules(), strict=True))
    assert list(shardings) == [name for name, _ in model.named_parameters()]
    assert all(not sharding.sharded and not sharding.partial for sharding in shardings.values())
