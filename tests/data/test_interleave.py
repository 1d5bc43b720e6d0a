"""Interleaving of several corpora."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data.mixture import Turns

WEIGHTS = st.lists(st.integers(1, 400).map(lambda number: number / 100), min_size=1, max_size=9)


@settings(deadline=None)
@given(WEIGHTS)
def test_every_prefix_matches_weights_within_one_sample(weights):
    turns = Turns.of(weights)
    length = len(turns.order) + 3
    corpora, _ = turns.at(np.arange(length))
    had = np.eye(len(weights))[corpora].cumsum(axis=0)
    wanted = np.arange(1, length + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(had - wanted).max() < 1


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_random_access_to_turns_matches_sequential_access(weights, start):
    turns = Turns.of(weights)
    corpora, ranks = turns.at(np.arange(start, start + 200))
    last = {}
    for place, (corpus, rank) in enumerate(zip(corpora.tolist(), ranks.tolist(), strict=True)):
        assert rank == last.get(corpus, rank - 1) + 1
        last[corpus] = rank
        assert abs(rank - (start + place) * weights[corpus] / sum(weights)) < 1.001
    alone, alone_ranks = turns.at(np.array([[start + 7]]))
    assert (alone[0, 0], alone_ranks[0, 0]) == (corpora[7], ranks[7])


def test_turns_match_golden_values():
    """Old checkpoints must resume at the same sample in later versions."""
    assert Turns.of([0.5, 0.3, 0.2]).order.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    assert Turns.of([3, 1]).order.tolist() == Turns.of([0.75, 0.25]).order.tolist() == [0, 0, 1, 0]
    assert Turns.of([7]).order.tolist() == [0]


def test_one_large_and_many_small_weights_interleave_evenly():
    turns = Turns.of([0.5] + [0.01] * 50)
    had = np.cumsum(turns.order == 0)
    assert np.abs(had - 0.5 * np.arange(1, 101)).max() < 1


def test_weights_without_short_period_are_rounded():
    turns = Turns.of([0.123456789, 1.0])
    assert len(turns.order) == 1 << 16
    assert turns.counts[0] / (1 << 16) == pytest.approx(
        0.123456789 / 1.123456789, abs=1 / (1 << 16)
    )


@pytest.mark.parametrize(
    "sizes", [(5, 100, 100), (100, 2, 100), (100, 100, 1), (3, 3, 3), (0, 4, 4)]
)
def test_prefix_ends_when_one_corpus_is_exhausted(sizes):
    turns = Turns.of([0.5, 0.3, 0.2])
    length = turns.prefix(sizes)
    corpora, _ = turns.at(np.arange(length + 1))
    assert all((corpora[:length] == corpus).sum() <= size for corpus, size in enumerate(sizes))
    assert any((corpora == corpus).sum() > size for corpus, size in enumerate(sizes))


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "a", True, 1e-9])
def test_bad_weights_are_refused(weight):
    with pytest.raises(ValueError, match="weight="):
        Turns.of([1.0, weight])
