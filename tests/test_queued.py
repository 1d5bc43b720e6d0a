"""NCCL semantics of the "queued" backend: programs that rely on gloo's tolerance fail."""

import ctypes

import pytest
import torch
import torch.distributed as dist

from tests.queued import HOST, RaceError


def message(rank):
    """Send a tensor, use it before waiting for it, and return the observations.

    The observations are the message of the race error, the receiver's memory before the wait, the
    values after it, and the calls.
    """
    gate, tensor = dist.new_group([0, 1]), torch.zeros(3)
    dist.barrier(gate)
    (dist.recv if rank else dist.send)(tensor, 1 - rank)  # opens the connection
    tensor.sum()  # blocks the host until that message has completed
    before = len(HOST.calls)
    if rank:
        work = dist.irecv(tensor, 0)
        # the message is not sent before the barrier
        there = tuple((ctypes.c_float * 3).from_address(tensor.data_ptr()))
        dist.barrier(gate)
    else:
        tensor += 1
        dist.barrier(gate)
        work = dist.isend(tensor, 1)
        there = ()
        tensor + 1  # reading is allowed
    with pytest.raises(RaceError) as error:
        _ = tensor + 1 if rank else tensor.mul_(2)
    work.wait()
    read = (tensor * 2).tolist()
    return str(error.value), there, read, [call.what for call in HOST.calls[before:]]


def test_use_before_wait_raises_race_error(pool):
    sender, receiver = pool.run(message, world_size=2, backend="queued")
    assert (
        sender[0] == "aten.mul_.Tensor uses tensors of send of (0, 1), which nobody has waited for"
    )
    assert (
        receiver[0] == "aten.add.Tensor uses tensors of recv of (0, 1), which nobody has waited for"
    )
    assert all(number != number for number in receiver[1]), (
        "the receiver had values before the message"
    )
    assert sender[2] == receiver[2] == [2.0] * 3
    assert sender[3] == ["barrier", "wait", "send", "wait", "read"]
    assert receiver[3] == ["recv", "barrier", "wait", "wait", "read"]
