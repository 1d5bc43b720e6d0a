"""Summing gradients over replicas: flat buckets reduced during the backward, and the norm over all ranks."""

from lightning_ptdp.data_parallel.buckets import BucketEntry, GradientBuckets
from lightning_ptdp.data_parallel.loose import LooseGradients
from lightning_ptdp.data_parallel.norm import global_norm

__all__ = ["BucketEntry", "GradientBuckets", "LooseGradients", "global_norm"]
