"""Ordered map over worker processes."""

import os
import signal
import threading

import pytest
import torch

from lightning_ptdp.data import DataError
from lightning_ptdp.data.preparation_work import call_in_process, ordered_map


def square(number):
    if number == 13:
        raise ValueError("unlucky")
    if number == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_are_ordered_and_errors_are_raised(num_workers):
    assert list(ordered_map(square, range(12), num_workers=num_workers)) == [
        number * number for number in range(12)
    ]
    results = ordered_map(square, range(17), num_workers=num_workers)
    assert [next(results) for _ in range(13)] == [number * number for number in range(13)]
    with pytest.raises(ValueError, match="unlucky"):
        next(results)


def test_killed_worker_raises_instead_of_hanging():
    with pytest.raises(
        DataError,
        match=r"was killed, possibly because memory ran out\. Use fewer than num_workers=2",
    ):
        list(ordered_map(square, [1, 17, 2], num_workers=2))


def test_prefetch_of_items_is_bounded():
    taken = []

    def items():
        for number in range(12):
            taken.append(number)
            yield number

    results = ordered_map(square, items(), num_workers=2)
    assert next(results) == 0
    assert len(taken) <= 6
    results.close()


def threads(_):
    return torch.get_num_threads()


def test_worker_does_not_wait_for_threads_of_parent():
    """With more threads than one, it would wait for those that its parent had in OpenMP."""
    given = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(ordered_map(threads, range(4), num_workers=2)) == [1] * 4
        assert call_in_process(threads, 0) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(given)


def test_function_is_not_sent_with_every_item():
    """A tokenizer takes longer to be sent than to tokenize some texts."""
    lock = threading.Lock()  # cannot be sent
    assert list(ordered_map(lambda item: (item, lock.locked()), "ab", num_workers=2)) == [
        ("a", False),
        ("b", False),
    ]


def test_call_in_separate_process_returns_or_raises():
    assert call_in_process(square, 3) == 9
    with pytest.raises(ValueError, match="unlucky"):
        call_in_process(square, 13)
    with pytest.raises(DataError, match="a process was killed"):
        call_in_process(square, 17)
