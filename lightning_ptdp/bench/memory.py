"""The peak of what tensors take on a CPU, counted: a process's own peak has the interpreter, the libraries and what the C library keeps."""

from __future__ import annotations

import gc
import warnings

import torch

from lightning_ptdp._torch import memory_changes

__all__ = ["CountedMemory"]


class CountedMemory:
    """From when it is made to ``peak_bytes``: the tensors that are there, and all that torch allocates."""

    def __init__(self) -> None:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # isinstance looks at lazy attributes of modules
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if type(one) in _PLAIN}
        self._there = sum(storages.values())
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def peak_bytes(self) -> int:
        """Ends the count."""
        self._profile.stop()
        held = most = 0
        for change in memory_changes(self._profile):
            held += change
            most = max(most, held)
        return self._there + most


_PLAIN = (torch.Tensor, torch.nn.Parameter)
