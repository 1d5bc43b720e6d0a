"""Permutations of samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data.stream import sample_order


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_epoch_contains_each_sample_once(size, seed, epoch):
    numbers = np.arange(epoch * size, (epoch + 2) * size)
    order = sample_order(numbers, size=size, seed=seed)
    for part in (order[:size], order[size:]):
        assert np.array_equal(np.sort(part), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 10**15))
def test_order_is_independent_of_batch_shape(size, number):
    alone = sample_order(np.array([number]), size=size, seed=1)
    among = sample_order(np.arange(number, number + 6).reshape(2, 3), size=size, seed=1)
    assert among.shape == (2, 3)
    assert among[0, 0] == alone[0]
    assert (among < size).all()


def test_orders_of_epochs_and_seeds_are_uncorrelated():
    size = 10_000
    orders = [sample_order(np.arange(size), size=size, seed=seed) for seed in (0, 1)]
    orders.append(sample_order(np.arange(size, 2 * size), size=size, seed=0))
    for index, order in enumerate(orders):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        for other in orders[:index]:
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.05
            assert (order == other).sum() < 20


def test_positions_are_uniform_over_seeds():
    counts = np.zeros((7, 7))
    for seed in range(2000):
        counts[np.arange(7), sample_order(np.arange(7), size=7, seed=seed)] += 1
    expected = 2000 / 7
    # 36 degrees of freedom: 99.99 % of the values are below 76.
    assert ((counts - expected) ** 2 / expected).sum() < 80


def test_order_matches_golden_values():
    """Old checkpoints must resume at the same sample in later versions."""
    assert sample_order(np.arange(12), size=10, seed=0).tolist() == [
        1,
        7,
        3,
        4,
        8,
        2,
        0,
        9,
        5,
        6,
        7,
        6,
    ]


def test_order_without_shuffle_is_sequential():
    assert sample_order(np.arange(5, 12), size=5, seed=0, shuffle=False).tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
        1,
    ]
