"""Token loader: one global sample order for any number of replicas, batch size and workers."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from lightning_ptdp.data import (
    DataError,
    EvaluationLoader,
    StoreError,
    TokenLoader,
    TokenStream,
)
from lightning_ptdp.data.stream import IGNORE_INDEX
from lightning_ptdp.world.batch_size import RampUp

pytestmark = pytest.mark.thorough

LENGTH = 128


@pytest.fixture
def stream(prepared):
    return TokenStream(prepared.folder, sequence_length=LENGTH)


def rows(batch):
    return [tuple(row) for row in batch["input_ids"].tolist()]


def steps(loaders, count):
    """Return the samples of ``count`` steps in global order, replica by replica in each step."""
    found = []
    for batches in itertools.islice(zip(*loaders, strict=True), count):
        found += [row for batch in batches for row in rows(batch)]
    return found


def replicas(stream, d, **kwargs):
    return [
        TokenLoader(stream, num_replicas=d, replica_rank=rank, seed=5, **kwargs)
        for rank in range(d)
    ]


def test_blocks_are_consecutive_with_labels_shifted_by_one(stream, prepared):
    first, second = stream[0], stream[1]
    assert first["input_ids"].dtype == first["labels"].dtype == torch.int64
    assert first["input_ids"].shape == first["labels"].shape == (LENGTH,)
    assert torch.equal(first["input_ids"][1:], first["labels"][:-1])
    longer = TokenStream(prepared.folder, sequence_length=2 * LENGTH + 1)[0]["input_ids"]
    assert torch.equal(longer[:LENGTH], first["input_ids"])
    assert longer[LENGTH] == first["labels"][-1]
    assert torch.equal(longer[LENGTH + 1 :], second["input_ids"])
    with pytest.raises(IndexError):
        stream[len(stream)]


def test_epochs_are_different_permutations_of_all_samples(stream):
    size = len(stream)
    loader = TokenLoader(stream, batch_size=1, seed=5)
    assert len(loader) == size
    epochs = [[rows(batch)[0] for batch in loader] for _ in range(2)]
    stored = [tuple(stream[index]["input_ids"].tolist()) for index in range(size)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(stored)
    assert epochs[0] != epochs[1]
    assert epochs[0] != stored
    assert loader.epoch == 2
    unshuffled = TokenLoader(stream, batch_size=1, shuffle=False)
    assert [rows(batch)[0] for batch in unshuffled] == stored


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sample_order_is_independent_of_layout_and_workers(stream, num_workers):
    reference = steps(replicas(stream, 1, batch_size=1), 48)
    for d, batch_size in ((1, 8), (2, 4), (2, 3), (3, 2), (4, 1)):
        loaders = replicas(stream, d, batch_size=batch_size, num_workers=num_workers)
        assert steps(loaders, 48 // (d * batch_size)) == reference
        if num_workers and d > 1:
            break


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resume_in_mid_epoch_with_other_replicas_and_batch_size(stream, num_workers):
    """d = 4 -> 2 -> 3 -> 1 across the end of an epoch. No sample is lost or repeated."""
    total = len(stream) + 40
    reference = TokenLoader(stream, batch_size=1, seed=5)
    expected = [row for _ in range(2) for batch in reference for row in rows(batch)][:total]
    found = []
    state = None
    for d, batch_size, count in ((4, 2, 3), (2, 5, 4), (3, 3, 2), (1, 1, total)):
        loaders = replicas(
            stream, d, batch_size=batch_size, num_workers=num_workers if d == 2 else 0
        )
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        while count and len(found) < total:
            part = steps(loaders, count)
            found += part
            count -= len(part) // (d * batch_size)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        if len(found) < total:
            assert state["consumed_samples"] == len(found)
    assert found[:total] == expected


def test_prefetching_does_not_advance_position(stream):
    loader = TokenLoader(stream, batch_size=2, num_workers=2)
    iterator = iter(loader)
    assert loader.consumed_samples == 0
    next(iterator)
    assert loader.consumed_samples == 2
    del iterator
    assert loader.state_dict()["consumed_samples"] == 2


def test_global_random_state_is_unchanged(stream):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    next(iter(TokenLoader(stream, batch_size=2)))
    next(iter(EvaluationLoader(stream, batch_size=2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_saved_position_excludes_batch_in_flight(stream):
    waiting = [0]
    loader = TokenLoader(stream, batch_size=2, num_replicas=3, in_flight=lambda: waiting[0])
    next(iter(loader))
    assert loader.state_dict()["consumed_samples"] == 6
    waiting[0] = 1
    assert loader.state_dict()["consumed_samples"] == 0


def test_position_in_other_data_is_refused(stream, prepared):
    state = TokenLoader(stream, batch_size=2, seed=1).state_dict()
    for words, other, seed in (
        ("seed is 1 in the checkpoint, but 2 in this training", stream, 2),
        ("sequence_length", TokenStream(prepared.folder, sequence_length=16), 1),
        (
            "data",
            TokenStream(prepared.folder, split="validation", sequence_length=LENGTH),
            1,
        ),
    ):
        loader = TokenLoader(other, batch_size=2, seed=seed)
        with pytest.raises(DataError, match=words):
            loader.load_state_dict(state)
    with pytest.raises(ValueError, match="consumed_samples"):
        TokenLoader(stream, batch_size=2, seed=1).load_state_dict({**state, "consumed_samples": -3})


def test_inconsistent_sizes_are_refused(stream, prepared):
    with pytest.raises(
        DataError,
        match=r"batch_size 5000 x 2 replicas = 10000 samples.*have "
        rf"{len(stream)}.*{len(stream) // 2}",
    ):
        TokenLoader(stream, batch_size=5000, num_replicas=2)
    with pytest.raises(
        StoreError, match=r"sequence_length=6000.*chunks of at most 5000.*sequence_length <= 4999"
    ):
        TokenStream(prepared.folder, sequence_length=6000)
    TokenStream(prepared.folder, sequence_length=4999)
    with pytest.raises(ValueError, match="replica_rank=2 must be an integer from 0 to 1"):
        TokenLoader(stream, batch_size=2, num_replicas=2, replica_rank=2)
    with pytest.raises(ValueError, match="micro_batch_size"):
        EvaluationLoader(stream, batch_size=4, micro_batch_size=3)


@pytest.mark.parametrize(
    ("num_replicas", "batch_size", "micro_batch_size", "num_workers"),
    [
        *(
            (d, b, micro, 0)
            for d in (1, 2, 3)
            for b, micro in ((4, None), (6, 2), (8, 1), (1000, 10))
        ),
        (3, 6, 2, 2),
    ],
)
def test_validation_counts_each_sample_once(
    prepared, num_replicas, batch_size, micro_batch_size, num_workers
):
    stream = TokenStream(prepared.folder, split="validation", sequence_length=16)
    loaders = [
        EvaluationLoader(
            stream,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            num_replicas=num_replicas,
            replica_rank=rank,
            num_workers=num_workers,
        )
        for rank in range(num_replicas)
    ]
    counted, lengths, empty_microbatches = [], set(), 0
    for loader in loaders:
        batches = list(loader)
        lengths.add((len(loader), len(batches)))
        for batch in batches:
            assert batch["input_ids"].shape == batch["labels"].shape == (batch_size, 16)
            ignored = (batch["labels"] == IGNORE_INDEX).all(1)
            assert torch.equal(ignored, (batch["labels"] == IGNORE_INDEX).any(1))
            assert not batch["input_ids"][ignored].any()
            counted += [
                tuple(row)
                for row in torch.cat([batch["input_ids"], batch["labels"]], 1)[~ignored].tolist()
            ]
            empty_microbatches += int(ignored.view(-1, micro_batch_size or batch_size).all(1).sum())
    expected = [
        tuple(torch.cat([s["input_ids"], s["labels"]]).tolist())
        for s in (stream[i] for i in range(len(stream)))
    ]
    assert sorted(counted) == sorted(expected)
    assert len(lengths) == 1
    slots = lengths.pop()[0] * num_replicas * (batch_size // (micro_batch_size or batch_size))
    assert empty_microbatches == max(slots - len(stream), 0)


def test_validation_keeps_order_and_can_be_limited(prepared):
    stream = TokenStream(prepared.folder, split="validation", sequence_length=16, max_samples=5)
    assert len(stream) == 5
    (batch,) = EvaluationLoader(stream, batch_size=8)
    assert torch.equal(
        batch["input_ids"][:5], torch.stack([stream[index]["input_ids"] for index in range(5)])
    )
    assert (batch["labels"][5:] == IGNORE_INDEX).all()


def test_streams_can_be_pickled_after_reading(stream):
    first = stream[3]["labels"]
    assert torch.equal(pickle.loads(pickle.dumps(stream))[3]["labels"], first)


def test_replica_visits_its_slice_of_each_step(stream):
    loaders = replicas(stream, 3, batch_size=2, shuffle=False)
    assert [loader.visits(0, 2).tolist() for loader in loaders] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert np.array_equal(loaders[0].visits(len(stream) - 1, 1), [[len(stream) - 1, len(stream)]])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ramp_up_resumes_with_other_number_of_replicas(stream, num_workers):
    ramp = RampUp(start=4, stop=16, increment=4, samples=60)
    order = (
        TokenLoader(stream, batch_size=1, seed=5).visits(0, ramp.consumed(12)).flatten().tolist()
    )
    expected = [stream[visit % len(stream)]["input_ids"].tolist() for visit in order]
    consumed = 0
    state = {}
    for d, count in ((4, 3), (2, 2), (1, 3), (4, 4)):
        loaders = replicas(stream, d, batch_size=16 // d, ramp_up=ramp, num_workers=num_workers)
        for loader in loaders:
            loader.load_state_dict(state or loader.state_dict())
        found = [list(row) for row in steps(loaders, count)]
        size = ramp.consumed(count, start=consumed)
        assert found == expected[consumed : consumed + size]
        consumed += size
        state = loaders[0].state_dict()
        assert state["consumed_samples"] == consumed
        assert all(loader.state_dict() == state for loader in loaders)
    assert consumed == ramp.consumed(12)


def test_ramp_up_epoch_has_as_many_steps_as_data_allow(stream):
    ramp = RampUp(start=2, stop=16, increment=2, samples=2 * len(stream))
    loader = TokenLoader(stream, batch_size=8, num_replicas=2, ramp_up=ramp)
    lengths = []
    for _ in range(4):
        before, length = loader.consumed_samples, len(loader)
        assert sum(1 for _ in loader) == length
        taken = loader.consumed_samples - before
        assert taken <= len(stream) < taken + ramp.global_batch(loader.consumed_samples)
        lengths.append(length)
    assert lengths[0] > lengths[1] > lengths[2] == lengths[3] == len(stream) // 16
    assert loader.steps_of_epochs(4) == sum(lengths)


def test_saved_position_excludes_batch_in_flight_during_ramp_up(stream):
    ramp = RampUp(start=2, stop=4, increment=2, samples=4)
    loader = TokenLoader(stream, batch_size=4, ramp_up=ramp, in_flight=lambda: 1)
    assert loader.state_dict()["consumed_samples"] == 0
    assert [loader.state_dict()["consumed_samples"] for _ in itertools.islice(loader, 4)] == [
        0,
        2,
        4,
        8,
    ]


def test_ramp_up_inconsistent_with_loader_is_refused(stream):
    with pytest.raises(
        ValueError, match="ramp_up ends at 8 samples per step, but batch_size 4 x 1 replicas = 4"
    ):
        TokenLoader(stream, batch_size=4, ramp_up=RampUp(start=4, stop=8, increment=4, samples=9))
    with pytest.raises(ValueError, match="global_batch_size=3 is not divisible"):
        TokenLoader(
            stream,
            batch_size=4,
            num_replicas=2,
            ramp_up=RampUp(start=3, stop=8, increment=5, samples=9),
        )
