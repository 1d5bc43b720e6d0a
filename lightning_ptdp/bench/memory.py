"""The peak of what tensors take on a CPU, counted: a process's own peak has the interpreter, the libraries and what the C library keeps."""

from __future__ import annotations

import gc
import itertools
import warnings

import torch

from lightning_ptdp._torch import memory_changes

__all__ = ["CountedMemory"]


class CountedMemory:
    """From when it is made to ``peak_bytes``: the tensors that are there, and all that torch allocates. Made in front of a step: gradients
    that have a memory of their own, which the step begins with giving up, do not count as there."""

    def __init__(self) -> None:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance looks at lazy attributes of modules
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        gradients = {id(one.grad) for one in tensors if one.is_leaf and one.grad is not None}
        kept = [one.untyped_storage() for one in tensors if id(one) not in gradients and one.device.type == "cpu"]
        self._there = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def peak_bytes(self) -> int:
        """Ends the count."""
        self._profile.stop()
        changes = memory_changes(self._profile)
        return self._there + max(0, *itertools.accumulate(changes), 0)
