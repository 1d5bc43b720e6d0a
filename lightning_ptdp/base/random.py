"""Random numbers that depend on the computation, not on the process that runs it."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch

States: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""States of the CPU's generator and of a GPU's."""


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a function of ``parts`` (integers and strings).

    It is the same in every process.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_process(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators (CPU and ``device``), and restore their states afterwards."""
    states = reseed(seed, device)
    try:
        yield
    finally:
        set_states(states, device)


def reseed(seed: int, device: torch.device) -> States:
    """Seed torch's generators (CPU and ``device``), and return their previous states."""
    cuda = device.type == "cuda"
    states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
    torch.default_generator.manual_seed(seed)
    if cuda:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    return states


def set_states(states: States, device: torch.device) -> None:
    """Restore states of torch's generators."""
    cpu_state, device_state = states
    torch.set_rng_state(cpu_state)
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, device)
