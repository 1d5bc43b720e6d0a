"""Random samplers that draw the same order on all ranks of a replica."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler

from lightning_ptdp.random import derive_seed

__all__ = ["seed_random_sampler"]


def seed_random_sampler(dataloader: Any, seed: int) -> Any:
    """Give a loader's RandomSampler a generator of its own where it has none.

    Without one it seeds itself from the process's random state, which pipeline stages consume differently.
    """
    sampler = getattr(dataloader, "sampler", None)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(derive_seed(seed, "sampler"))
    return dataloader
