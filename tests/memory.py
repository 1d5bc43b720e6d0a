"""Memory saved by a forward pass for its backward pass."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def kept_bytes(run: Callable[[], Tensor], parameters: Iterator[nn.Parameter]) -> int:
    """Return the bytes that the graph of ``run()`` saves, without parameters.

    Each storage counts once.
    """
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = run()
    total = sum(storages.values())
    del output
    return total
