"""Pipeline, tensor, sequence and data parallel training (PTD-P) as a PyTorch Lightning strategy."""

from lightning_ptdp.layout import ParallelLayout
from lightning_ptdp.version import __version__

__all__ = ["ParallelLayout", "__version__"]
