"""Data parallelism: gradient buckets, the sharded optimizer, and the gradient norm.

Gradients are stored in flat buckets and reduced during the backward. Optimizers step on shards. The
norm is computed over all ranks.
"""

from lightning_ptdp.data_parallel.bucket import HALF
from lightning_ptdp.data_parallel.deferred_step import reads_between_steps
from lightning_ptdp.data_parallel.elementwise import (
    Cut,
    GroupTrial,
    MixingOptimizerError,
    check_elementwise,
    constructed_state,
)
from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.data_parallel.gradients import Gradients
from lightning_ptdp.data_parallel.manual_optimization import (
    ManualGradients,
    ManualOptimizationError,
)
from lightning_ptdp.data_parallel.replica_buffers import ReplicaBuffers

__all__ = [
    "HALF",
    "Cut",
    "GradientStore",
    "Gradients",
    "GroupTrial",
    "ManualGradients",
    "ManualOptimizationError",
    "MixingOptimizerError",
    "ReplicaBuffers",
    "check_elementwise",
    "constructed_state",
    "reads_between_steps",
]
