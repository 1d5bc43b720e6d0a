"""What Lightning asks of all ranks: reductions, agreement, broadcasts."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp._lightning import LightningNames, StrategyBase
from lightning_ptdp.pipeline.watchdog import Watchdog

__all__ = ["WorldCollectives"]


class WorldCollectives(StrategyBase):
    """Mixin of the strategy: collectives over the world, in which the ranks of one replica hold equal values."""

    _names: LightningNames
    _watchdog: Watchdog | None

    def waiting_in(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for other ranks outside the steps: a lost one gives an error that names ``what`` and what each rank did.

        Raises:
            PeerError: Inside, instead of an error of torch's communication.
        """
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.during(what)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas. Ranks of one replica hold equal values, so that the world's mean is the replicas' mean; a sum
        counts every replica once."""
        if not isinstance(tensor, Tensor):
            return tensor
        with self.waiting_in("reduction of a value"):
            result = self._names.sync_tensor(tensor, group, reduce_op=reduce_op)
        is_sum = reduce_op is dist.ReduceOp.SUM or str(reduce_op).lower() == "sum"
        copies = self.layout.model_parallel_size
        if group is None and is_sum and copies > 1:
            result = torch.div(result, copies, rounding_mode=None if result.is_floating_point() else "floor")
        return result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over the whole world."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            with self.waiting_in("agreement"):
                dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the world."""
        if dist.is_initialized():
            with self.waiting_in(f"barrier {name!r}" if name else "barrier"):
                dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from rank ``src`` to the world."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        with self.waiting_in(f"broadcast from rank {src}"):
            dist.broadcast_object_list(box, src)
        return box[0]
