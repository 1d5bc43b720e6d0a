"""Random numbers as a function of keys and indices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.forward.surroundings import Forward, Surroundings
from lightning_ptdp.keyed_dropout import KeyedDropout, KeyedDropoutError
from lightning_ptdp.keyed_dropout.keyed import mix, sample_keys, uniform
from lightning_ptdp.world.mesh import Group


def reference(key, index):
    """Return SplitMix64's finalizer, in Python integers."""
    mask = (1 << 64) - 1
    z = ((key ^ (index * 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hash_equals_splitmix64():
    keys, indices = torch.tensor([0, 1, -5, 2**62]), torch.tensor([0, 7, 123456789, 2**40])
    found = mix(keys, indices).tolist()
    for key, index, value in zip(keys.tolist(), indices.tolist(), found, strict=True):
        assert value % 2**64 == reference(key % 2**64, index)


def test_numbers_are_uniform_and_uncorrelated():
    x = uniform(
        torch.tensor([[3], [4]]).view(2, 1, 1),
        [torch.arange(200).view(1, -1, 1), torch.arange(300).view(1, 1, -1)],
    )
    assert x.shape == (2, 200, 300)
    assert 0 <= float(x.min()) < 1e-3
    assert 0.999 < float(x.max()) < 1
    # Bounds are five standard deviations for n = 120 000 numbers: 1/sqrt(12 n) of the mean,
    # 1/sqrt(n) of a correlation.
    assert abs(float(x.mean()) - 0.5) < 5 / (12 * x.numel()) ** 0.5
    for other in (x.roll(1, 1), x.roll(1, 2), x.flip(0)):
        correlation = torch.corrcoef(torch.stack([x.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / x.numel() ** 0.5


def test_sample_key_is_independent_of_batch():
    tokens, weights = torch.randint(50, (6, 9)), torch.randn(6)
    whole = sample_keys([tokens, weights], 6)
    part = sample_keys([tokens[[4, 1]], weights[[4, 1]]], 2)
    assert torch.equal(part, whole[[4, 1]])
    assert len(set(whole.tolist())) == 6
    changed = tokens.clone()
    changed[2, 3] += 1
    assert (sample_keys([changed, weights], 6) != whole).tolist() == [i == 2 for i in range(6)]


def test_batch_without_samples_is_refused():
    with pytest.raises(ValueError, match="no tensor of 3 samples"):
        sample_keys([torch.ones(4)], 3)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_inside_torch_attention_is_refused(dropout):
    keyed = KeyedDropout(tensor=Group(), context=Group(), sequence_parallel=False, seed=0)
    x = torch.randn(2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
    with keyed.around(Forward(hook="training_step", full_batch={"x": x})):
        if dropout:
            with pytest.raises(KeyedDropoutError, match=r"nn\.MultiheadAttention"):
                attention(x, x, x, need_weights=False)
        else:
            assert torch.equal(
                attention(x, x, x, need_weights=False)[0], attention(x, x, x, need_weights=False)[0]
            )
        assert torch.equal(attention.eval()(x, x, x)[0], attention(x, x, x)[0])


@pytest.mark.parametrize("module", [nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.RReLU()], ids=str)
def test_other_random_modules_are_refused_only_if_they_draw(module):
    keyed = KeyedDropout(tensor=Group(), context=Group(), sequence_parallel=False, seed=0)
    x = torch.rand(2, 4, 8, 8)
    with keyed.around(Forward(hook="training_step", full_batch={"x": x})):
        with pytest.raises(KeyedDropoutError, match="keyed_dropout=False"):
            module.train()(x)
        assert torch.equal(module.eval()(x), x)
        assert torch.equal(nn.Dropout2d(0.0)(x), x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_model_is_refused_only_around_dropout(reentrant):
    keyed = KeyedDropout(tensor=Group(), context=Group(), sequence_parallel=False, seed=0)
    x = torch.rand(2, 4, requires_grad=True)
    with keyed.around(Forward(hook="training_step", full_batch={"x": x})):
        checkpoint(F.gelu, x, use_reentrant=reentrant).sum().backward()
        with pytest.raises(KeyedDropoutError, match="recompute='full'"):
            checkpoint(F.dropout, x, use_reentrant=reentrant)
        with torch.no_grad():
            F.dropout(x)


def test_own_recomputation_drops_same_elements():
    keyed = KeyedDropout(tensor=Group(), context=Group(), sequence_parallel=False, seed=0)
    surroundings = Surroundings([keyed])
    x = torch.ones(4, 100, requires_grad=True)
    with surroundings.around(Forward(hook="training_step", full_batch={"x": x})):
        y = checkpoint(F.dropout, x, use_reentrant=False, context_fn=surroundings.recomputation)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_sequence_is_found_by_sequence_dims():
    """The batch also has features, whose number is not that of the tokens."""
    batch = {"features": torch.randn(2, 12), "ids": torch.arange(16).view(2, 8)}
    dropped = []
    for context in (Group(), Group(ranks=(0, 1)), Group(ranks=(0, 1), rank=1)):
        keyed = KeyedDropout(
            tensor=Group(),
            context=context,
            sequence_parallel=False,
            seed=0,
            sequence_dims={"ids": 1, "features": None},
        )
        with keyed.around(Forward(hook="training_step", full_batch=batch)):
            dropped.append(F.dropout(torch.ones(2, 8 // context.size, 5)))
    full, first, second = dropped
    assert torch.equal(torch.cat((first[:, :2], second, first[:, 2:]), 1), full)


def test_batch_without_common_dimension_is_refused():
    keyed = KeyedDropout(tensor=Group(), context=Group(), sequence_parallel=False, seed=0)
    graphs = {"x": torch.randn(5, 2), "edges": torch.zeros(2, 7)}
    with pytest.raises(KeyedDropoutError, match="keyed_dropout=False"):
        keyed.around(Forward(hook="training_step", full_batch=graphs))
