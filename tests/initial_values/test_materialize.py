"""Initial values that depend only on the seed and the name."""

import pytest
import torch
from torch import nn

from lightning_ptdp.parameters.materialize import Materializer, agree_on_values


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def build(seed, only=None):
    with torch.device("meta"):
        model = Tied()
    materialize = Materializer(model, seed=seed, device=torch.device("cpu"))
    for name, module in model.named_modules():
        if only is None or name in only:
            materialize(module, name)
    return model


def test_values_depend_only_on_seed_and_name():
    whole = build(5)
    torch.manual_seed(99)
    part = build(5, only=("head", "middle"))
    assert torch.equal(part.head.weight, whole.embedding.weight)
    assert torch.equal(part.middle.weight, whole.middle.weight)
    assert part.embedding.weight.is_meta
    assert whole.head.weight is whole.embedding.weight
    assert not torch.equal(build(6).middle.weight, whole.middle.weight)


def test_buffers_are_initialized_and_global_rng_is_unchanged():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = build(5)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert model.norm.num_batches_tracked.item() == 0


def test_module_without_initializer_is_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.ModuleDict({"own": Own()})
    with pytest.raises(ValueError, match=r"'own' \(Own\).*reset_parameters"):
        Materializer(model, seed=1, device=torch.device("cpu"))(model["own"], "own")


def _agree(rank):
    same, different = torch.ones(5), torch.full((3,), float(rank))
    columns = torch.full((2, 3), rank, dtype=torch.int16).t()  # no backend broadcasts them
    lazy = torch.tensor([rank + 1j]).conj()
    named = [("same", same), ("different", different), ("columns", columns), ("lazy", lazy)]
    names = agree_on_values(named, device=torch.device("cpu"))
    return names, different.tolist(), columns.tolist(), lazy.tolist()


def test_rank_zero_values_win_if_eager_values_differ(pool):
    expected = (["different", "columns", "lazy"], [0.0] * 3, [[0, 0]] * 3, [-1j])
    assert pool.run(_agree, world_size=2) == [expected] * 2
