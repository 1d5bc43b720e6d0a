"""Tensors on which the optimizer steps: parameters, float32 masters, or shards.

The user's optimizer is kept, with its groups, hyperparameters and schedulers. Only the tensors in
its groups are replaced, before its first step. A sharded optimizer (ZeRO-1, arXiv 1910.02054,
section 5.1) gets one-dimensional pieces::

    bucket        | w0 . . . | w1 . . . . . . | b1 | w2 . .    |
    rank 0 of 2   | w0 . . . | w1 . .                              steps on w0, first part of w1
    rank 1                            | . . . | b1 | w2 . .    |   steps on the rest

The parameters of a bucket are views of one flat tensor, their gradients views of another. The
pieces may have different hyperparameters.

After the step, all ranks gather the parts of the flat parameters, bucket by bucket in the order of
the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.data_parallel.bucket import HALF, Bucket
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.flat_shards import FlatSharding, Shard
from lightning_ptdp.data_parallel.reduction import PendingReduction
from lightning_ptdp.data_parallel.unbucketed_gradients import UnbucketedGradients
from lightning_ptdp.parameters.sharding import Sharding

__all__ = ["OptimizerParameters", "OptimizerTensor"]


@dataclass(eq=False)
class OptimizerTensor:
    """One tensor of the optimizer.

    Attributes:
        parameter: The model's parameter.
        value: The optimizer's tensor: the parameter itself, its float32 master, or a shard of
            either.
        shard: The range of the parameter; None for the whole.
        target: Tensor that receives a master's value after a step; None if it is not a master.
        bucket_gradient: The shard's part of a bucket's buffer; None for the whole, whose gradient
            is the parameter's.
        counts: True if this rank is the first that holds this shard.
    """

    parameter: nn.Parameter
    value: nn.Parameter
    shard: Shard | None = None
    target: Tensor | None = None
    bucket_gradient: Tensor | None = None
    counts: bool = True

    def placed(self, whole: Sharding) -> Sharding | FlatSharding:
        """Return the position of ``value`` in the full parameter.

        ``whole`` is the position of the parameter.
        """
        return whole if self.shard is None else FlatSharding(whole=whole, shard=self.shard)


class OptimizerParameters:
    """Replacement of an optimizer's tensors; keeps the model's parameters up to date.

    Args:
        gradients: The rank's gradients; sharded if their reduction scatters.
        masters: Step on float32 copies of half-precision parameters.
    """

    def __init__(self, gradients: GradientBuckets | UnbucketedGradients, *, masters: bool) -> None:
        self._gradients, self._masters = gradients, masters
        self.is_sharded = gradients.scatters
        self._flat: list[tuple[Bucket, Tensor]] = []
        self._pending: dict[int, PendingReduction] = {}
        self._bucket_of: dict[int, int] = {}
        self.entries = list(self._shards() if self.is_sharded else self._wholes())

    def adopt(self, optimizer: Optimizer) -> None:
        """Put the new tensors into the optimizer's groups, in place.

        Schedulers keep references to the groups.
        """
        mine = {id(stepped.parameter): stepped for stepped in self.entries}
        managed = {id(entry.parameter) for entry in self._gradients.entries}
        for group in optimizer.param_groups:
            kept = [
                index
                for index, p in enumerate(group["params"])
                if id(p) in mine or id(p) not in managed
            ]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][index] for index in kept]
            before = [group["params"][index] for index in kept]
            group["params"] = [mine[id(p)].value if id(p) in mine else p for p in before]
        for parameter in list(optimizer.state):
            if id(parameter) in managed:
                state = optimizer.state.pop(parameter)
                if id(parameter) in mine:
                    optimizer.state[mine[id(parameter)].value] = _state_of(
                        mine[id(parameter)], state
                    )

    def install(self) -> None:
        """Show the summed gradients to the optimizer.

        If they are shards, the parameters' own gradients are removed, because these are sums over
        one replica only.
        """
        for stepped in self.entries:
            if stepped.value is not stepped.parameter:
                gradient = (
                    stepped.parameter.grad
                    if stepped.bucket_gradient is None
                    else stepped.bucket_gradient
                )
                stepped.value.grad = None if gradient is None else gradient.to(stepped.value.dtype)
        if self.is_sharded:
            self._gradients.park()

    def publish(self) -> None:
        """Round the masters and start to gather the parameters, after the optimizer's step."""
        with torch.no_grad():
            for stepped in self.entries:
                if stepped.target is not None:
                    stepped.target.copy_(stepped.value)
        for index, (bucket, flat) in reversed(list(enumerate(self._flat))):
            self._pending[index] = bucket.reduction.start_gather(flat)

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Return when ``parameters`` (all by default) have the values of the last step."""
        if not self._pending:
            return
        wanted = sorted(self._pending, reverse=True)
        if parameters is not None:
            buckets = {self._bucket_of.get(id(parameter)) for parameter in parameters}
            wanted = [index for index in wanted if index in buckets]
        for index in wanted:
            self._pending.pop(index).wait()

    def reload(self) -> None:
        """Update the masters from parameters that were changed outside of the optimizer.

        These are the elements that differ from the rounded masters.
        """
        with torch.no_grad():
            for stepped in self.entries:
                if stepped.target is not None:
                    same = stepped.value.to(stepped.target.dtype) == stepped.target
                    stepped.value.copy_(torch.where(same, stepped.value, stepped.target.float()))

    def _wholes(self) -> Iterator[OptimizerTensor]:
        for entry in self._gradients.entries:
            parameter = entry.parameter
            if self._masters and parameter.dtype in HALF:
                yield OptimizerTensor(
                    parameter, nn.Parameter(parameter.detach().float()), target=parameter.detach()
                )
            else:
                yield OptimizerTensor(parameter, parameter)

    def _shards(self) -> Iterator[OptimizerTensor]:
        assert isinstance(self._gradients, GradientBuckets)
        for bucket in self._gradients.buckets():
            flat = _flatten(bucket)
            for entry in bucket.entries:
                self._bucket_of[id(entry.parameter)] = len(self._flat)
            self._flat.append((bucket, flat))
            for entry, shard in bucket.own_shards():
                here = shard.within(flat)
                is_master = self._masters and flat.dtype in HALF
                yield OptimizerTensor(
                    entry.parameter,
                    nn.Parameter(here.float() if is_master else here),
                    shard=shard,
                    target=here if is_master else None,
                    bucket_gradient=shard.within(bucket.buffer),
                    counts=bucket.reduction.counts,
                )


def _flatten(bucket: Bucket) -> Tensor:
    """Make a bucket's parameters views of one flat tensor with the layout of its gradients."""
    flat = torch.zeros_like(bucket.buffer, dtype=bucket.entries[0].parameter.dtype)
    for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
        parameter = entry.parameter
        view = flat[offset : offset + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat


def _state_of(stepped: OptimizerTensor, state: dict[str, object]) -> dict[str, object]:
    """Cut the optimizer's state of a whole parameter to the stepped tensor.

    The optimizer created the state in its constructor.
    """
    shape = stepped.parameter.shape
    converted: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape and shape:
            if stepped.shard is not None:
                value = value.reshape(-1)[stepped.shard.start : stepped.shard.stop].clone()
            value = value.to(stepped.value.dtype) if value.is_floating_point() else value
        converted[key] = value
    return converted
