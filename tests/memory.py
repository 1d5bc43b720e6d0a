"""Memory that a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def kept_bytes(run: Callable[[], Tensor], parameters: Iterator[nn.Parameter]) -> int:
    """Bytes that the graph of ``run()`` keeps alive beside parameters, each storage once."""
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
