"""Data parallelism: gradient buckets, the sharded optimizer, and the gradient norm.

Gradients are stored in flat buckets and reduced during the backward. Optimizers step on shards. The
norm is computed over all ranks.
"""

from lightning_ptdp.data_parallel.bucket import HALF, GradientState
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.data_parallel.elementwise import (
    Cut,
    GroupTrial,
    MixingOptimizerError,
    check_elementwise,
    constructed_state,
)
from lightning_ptdp.data_parallel.gradient_store import GradientStore
from lightning_ptdp.data_parallel.gradient_sums import global_norm
from lightning_ptdp.data_parallel.gradients import Gradients
from lightning_ptdp.data_parallel.manual_optimization import (
    ManualGradients,
    ManualOptimizationError,
)
from lightning_ptdp.data_parallel.optimizer_parameters import OptimizerParameters, overlaps_gather
from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.data_parallel.replica_buffers import ReplicaBuffers
from lightning_ptdp.data_parallel.unbucketed_gradients import UnbucketedGradients

__all__ = [
    "HALF",
    "Cut",
    "GradientBuckets",
    "GradientState",
    "GradientStore",
    "Gradients",
    "GroupTrial",
    "ManualGradients",
    "ManualOptimizationError",
    "MixingOptimizerError",
    "OptimizerParameters",
    "Reduction",
    "ReplicaBuffers",
    "UnbucketedGradients",
    "check_elementwise",
    "constructed_state",
    "global_norm",
    "overlaps_gather",
]
