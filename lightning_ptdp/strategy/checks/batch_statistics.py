"""Warnings of modules whose result depends on how a batch is divided."""

from __future__ import annotations

import warnings

from torch import nn

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.world.layout import ParallelLayout

__all__ = ["warn_of_balance_losses", "warn_of_batch_norm"]


def warn_of_batch_norm(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn of modules whose result depends on the number of microbatches or replicas."""
    local = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    kinds = (*local, nn.SyncBatchNorm) if config.has_microbatches else local
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if not names:
        return
    if config.has_microbatches:
        part, mend = "one microbatch", "num_microbatches=1 without a pipeline"
    elif layout.size("replica_sum") > 1:
        part, mend = "one replica's part", "Trainer(sync_batchnorm=True) on GPUs"
    else:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"{', '.join(names[:3])}{more} normalize over the batch, which here is {part}, so the "
        f"model differs slightly from the same model on one device. Use {mend}, or a "
        "normalization that does not depend on other samples",
        stacklevel=2,
    )


def warn_of_balance_losses(model: nn.Module, config: PTDPConfig, layout: ParallelLayout) -> None:
    """Warn if a Hugging Face mixture computes its load-balancing loss over fewer tokens.

    In one process that loss is computed over all tokens of the batch."""
    asked = any(
        getattr(getattr(module, "config", None), "output_router_logits", False)
        for module in model.modules()
    )
    replicas = layout.data_parallel_size * layout.context_parallel_size
    if asked and (config.has_microbatches or replicas > 1):
        warnings.warn(
            "output_router_logits=True computes the model's load-balancing loss from means "
            f"over the tokens of one forward, which here is a microbatch on one of {replicas} "
            "replicas. The mean of these losses is trained, as under DDP, and differs "
            "slightly from the loss of one process. Use num_microbatches=1 and one replica, "
            "or a GPTConfig with num_experts, whose loss is the same in every layout",
            stacklevel=2,
        )
