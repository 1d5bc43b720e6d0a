"""One order of samples in every layout."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch.utils.data import RandomSampler

__all__ = ["draw_like_replicas"]


def draw_like_replicas(sampler: RandomSampler) -> None:
    """Let a random sampler without a generator draw the order of ``DistributedSampler``, which
    Lightning gives to replicas: from the seed of ``seed_everything`` and the epoch. By itself it
    would draw from the process's random state, which pipeline stages consume differently, and all
    ranks of a replica must read the same samples."""
    if sampler.generator is not None:
        return
    sampler.generator = torch.Generator()
    # As Lightning seeds the one that it makes; it calls ``set_epoch`` where a sampler has it.
    begin = partial(_begin, sampler.generator, int(os.getenv("PL_GLOBAL_SEED", "0")))
    vars(sampler)["set_epoch"] = begin
    begin(0)


def _begin(generator: torch.Generator, seed: int, epoch: int) -> None:
    generator.manual_seed(seed + epoch)
