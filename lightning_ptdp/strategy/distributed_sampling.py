"""One order of samples in every layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import RandomSampler

__all__ = ["read_alike"]


def read_alike(dataloader: object, *, seed_worker: Callable[[int], None]) -> None:
    """Let all ranks of a replica read the same samples in the same order.

    ``seed_worker`` seeds a worker of the loader by its number and the replica. Lightning would seed
    each rank's workers differently."""
    sampler = getattr(dataloader, "sampler", None)
    if isinstance(sampler, RandomSampler):
        _draw_like_replicas(sampler)
    unseeded = getattr(dataloader, "worker_init_fn", 0) is None
    if unseeded and os.getenv("PL_SEED_WORKERS", "0") == "1":
        vars(dataloader)["worker_init_fn"] = seed_worker


def _draw_like_replicas(sampler: RandomSampler) -> None:
    """Let a random sampler without a generator draw the order of ``DistributedSampler``.

    Lightning gives that sampler to replicas; its order depends on the seed of ``seed_everything``
    and on the epoch. Without a generator the sampler would draw from the process's random state,
    which pipeline stages consume differently."""
    if sampler.generator is not None:
        return
    sampler.generator = torch.Generator()
    # Lightning seeds its own sampler in the same way, and calls ``set_epoch`` if a sampler has it.
    begin = partial(_begin, sampler.generator, int(os.getenv("PL_GLOBAL_SEED", "0")))
    vars(sampler)["set_epoch"] = begin
    begin(0)


def _begin(generator: torch.Generator, seed: int, epoch: int) -> None:
    generator.manual_seed(seed + epoch)
