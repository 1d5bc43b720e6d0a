"""Comparison of values of which several ranks hold a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.base.errors import PTDPError
from lightning_ptdp.data_parallel import Gradients
from lightning_ptdp.parallel_model import ParallelModel
from lightning_ptdp.shims.lightning import LightningModule
from lightning_ptdp.world.mesh import ProcessMesh

_ROUNDING = MappingProxyType({"pipeline": 1e-5, "tensor": 1e-4, "replica_sum": 1e-5})
"""Relative differences that are rounding: tensor ranks compute their copies' gradients, and stages
and replicas receive the same sum.
"""
_REASONS = MappingProxyType(
    {
        "pipeline": "is kept by every pipeline stage (ParallelPlan.everywhere), but its values differ "
        "between them. A hook or the step changes it with weights that only one stage has, for example "
        "in an average of the model's weights (AveragedModel, EMA). Use pipeline_parallel_size=1",
        "tensor": "is whole on every tensor rank, but its values differ between them. If it is applied "
        "to the output of a column layer, a rank's gradient is only a part of the sum: declare its "
        "module as 'partial' in ParallelPlan(tensor=...). Otherwise, a hook or the step changes it with "
        "weights, gradients or random numbers of one rank only. Or use tensor_parallel_size=1",
        "replica_sum": "is the same on all replicas at the start, but its values differ between them. "
        "The step, a hook, a scheduler or the optimizer changes it with a replica's own samples, random "
        "numbers, metrics or gradients (torch.autograd.grad), for example to initialize it from the "
        "first batch. Compute the value from the samples of all replicas (self.manual_backward, "
        "self.all_gather, self.log(..., sync_dist=True)), or make it a buffer, which is broadcast",
    }
)


class UnequalCopiesError(PTDPError, RuntimeError):
    """A value that several ranks hold differs between them."""


@dataclass(eq=False, kw_only=True)
class CopyComparison:
    """Comparison of parameters and learning rates between ranks, before a few batches.

    Attributes:
        mesh: This rank's place and groups.
        parallel: The LightningModule, already reduced to this rank's part.
        gradients: Its gradients.
        device: This rank's device.
        shards_optimizer: Whether replicas receive each other's parameters after every step.
    """

    mesh: ProcessMesh
    parallel: ParallelModel
    gradients: Gradients
    device: torch.device
    shards_optimizer: bool

    def check(self, batch: int) -> None:
        """Compare the copies before some batches; collective.

        The comparison reads values from the device. Stages are compared at batches 1, 2, 4, 8 and
        so on, replicas and tensor ranks at 16, 256, 4096 and so on, and under manual optimization
        also at 1.

        Raises:
            UnequalCopiesError: Copies differ.
        """
        if not batch or batch & (batch - 1):
            return
        copies: dict[str, Mapping[str, Tensor]] = {"pipeline": self.parallel.kept}
        # Under manual optimization, the step itself may write gradients of its own samples.
        module: LightningModule = self.parallel.module
        if batch > module.automatic_optimization and batch.bit_length() % 4 == 1:
            copies["tensor"] = self.parallel.copied("tensor")
            # Experts differ between the ranks over which they are divided.
            of_replicas = {} if self.shards_optimizer else self.parallel.copied("expert")
            copies["replica_sum"] = {**of_replicas, **self._learning_rates()}
        for axis, tensors in copies.items():
            if tensors and self.mesh.group(axis).size > 1:
                self.gradients.parameters_needed()
                with self.parallel.computing():
                    self._compare(tensors, axis)

    def _learning_rates(self) -> dict[str, Tensor]:
        module: LightningModule = self.parallel.module
        optimizers = module.trainer.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rates = [group.get("lr") for group in groups]
        return {
            f"learning rate of parameter group {number}": torch.as_tensor(
                rate, dtype=torch.float64, device=self.device
            )
            for number, rate in enumerate(rates)
            if isinstance(rate, int | float | Tensor)  # Adafactor may compute its own
        }

    def _compare(self, tensors: Mapping[str, Tensor], axis: str) -> None:
        """Compare values of which all ranks of a group hold a copy; collective over the group.

        Raises:
            UnequalCopiesError: They differ. This happens with an average of the model's weights,
                which each stage forms with its own weights only, with gradients of which a tensor
                rank has a part, and with an initialization from the samples of one replica.
        """
        norms = [_norm(tensor.detach()) for tensor in tensors.values()]
        low = torch.stack(norms).to(self.device)
        high = low.clone()
        group = self.mesh.group(axis).handle
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        differs = (high - low > _ROUNDING[axis] * high).tolist()
        for name, differs_here in zip(tensors, differs, strict=True):
            if differs_here:
                raise UnequalCopiesError(f"'{name}' {_REASONS[axis]}")


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor as float64, of usual dtypes without a copy of the tensor."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).double()
    if tensor.element_size() < 4 or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    return torch.linalg.vector_norm(tensor).double()
