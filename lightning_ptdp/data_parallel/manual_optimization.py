"""Gradients under manual optimization, averaged after every ``manual_backward``.

A module with manual optimization may run several backwards in a step, each for different
parameters. After each of them, every replica averages the gradients of all parameters that are
trainable at that moment (``toggle_optimizer`` limits them)::

    manual_backward(generator's loss)    average the generator's gradients
    manual_backward(critic's loss)       average the critic's gradients

Gradients that were averaged before are equal on all replicas, so averaging them again does not
change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.data_parallel.gradient_sums import flattened
from lightning_ptdp.world.mesh import Group

_BUCKET_BYTES = 25 << 20


class ManualOptimizationError(PTDPError, RuntimeError):
    """A step of manual optimization does something that replicas cannot follow."""


@dataclass(eq=False)
class ManualGradients:
    """Gradients of one replica under manual optimization.

    Attributes:
        module: The LightningModule.
        group: The replicas.
        device: Device of the tensors in collectives.
    """

    module: nn.Module
    group: Group
    device: torch.device
    _hooks: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = field(default_factory=dict)
    _follows: bool = False
    _unseen: bool = False

    @contextlib.contextmanager
    def backward(self, *, accumulates: bool) -> Iterator[None]:
        """Average the gradients after the backward in this context, unless ``accumulates``."""
        self._watch()
        self._follows = True
        try:
            yield
        finally:
            self._follows = False
        if not accumulates:
            self._average(
                [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            )

    def check(self) -> None:
        """Check that every backward of the step was a ``manual_backward``.

        Raises:
            ManualOptimizationError: One was not, so the replicas would diverge.
        """
        self._watch()
        if self._unseen:
            raise ManualOptimizationError(
                "loss.backward() in manual optimization does not average gradients over the "
                "replicas, so their weights would diverge. Call self.manual_backward(loss) instead"
            )

    def close(self) -> None:
        """Detach from the parameters."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}

    def _watch(self) -> None:
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _: Tensor) -> None:
        self._unseen |= not self._follows

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        lacking = [parameter.grad is None for parameter in parameters]
        found = torch.tensor([float(not lacks) for lacks in lacking])
        counts = found.to(self.device, non_blocking=True)
        dist.all_reduce(counts, group=self.group.handle)
        # Read the counts only if needed: a parameter that no replica used keeps None, so that its
        # optimizer skips it.
        used = (
            {p for p, count in zip(parameters, counts.tolist(), strict=True) if count}
            if any(lacking)
            else set(parameters)
        )
        for bucket in _buckets(parameters):
            gradients = [_dense(parameter) for parameter in bucket]
            flat, means = flattened(gradients)
            dist.all_reduce(flat.div_(self.group.size), group=self.group.handle)
            for parameter, gradient, mean in zip(bucket, gradients, means, strict=True):
                gradient.copy_(mean)
                if parameter.grad is None and parameter in used:
                    parameter.grad = gradient


def _dense(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.layout is not torch.strided:
        raise ManualOptimizationError(
            "a sparse gradient cannot be averaged over replicas. Use Embedding(sparse=False)"
        )
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of parameters of one dtype and limited size, the same on all replicas."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (
            parameter.dtype != bucket[0].dtype or size + parameter.nbytes > _BUCKET_BYTES
        ):
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
