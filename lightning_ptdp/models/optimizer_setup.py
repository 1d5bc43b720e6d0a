"""AdamW with decay groups, alone or combined with Muon, and a learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_ptdp.base.option_types import Count, check_types
from lightning_ptdp.models.adamw_variants import HalfStateAdamW, MuonWithAdamW
from lightning_ptdp.shims.torch import unscale_before_step

Decay = Literal["cosine", "linear"]
"""Shape of the learning rate's decay."""
Matrices = Literal["adamw", "muon"]
States = Literal["float32", "bfloat16"]
_FUSED = ("cpu", "cuda")
_IN_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Optimizer and learning-rate schedule.

    Args:
        learning_rate: Peak learning rate.
        betas: Decay of the running mean and of the running square.
        eps: Value added to the root of the running square.
        weight_decay: Decoupled decay (arXiv 1711.05101) of parameters with two or more dimensions.
        warmup_steps: Optimizer steps of linear warm-up; the first step already has 1/warmup_steps
            of the peak.
        decay: Shape of the decay after the warm-up: "cosine" (GPT) or "linear" (BERT).
        decay_steps: Optimizer step, counted from 0, at which the decay ends; None: the Trainer's
            number of steps.
        min_lr_ratio: Learning rate at and after the end of the decay, divided by the peak.
        warmup_samples: Length of the warm-up in training samples instead of steps, for a global
            batch that ramps up. The warm-up has as many steps as these samples fill.
        decay_samples: ``decay_steps`` in training samples.
        matrices: Optimizer of the matrices of the blocks: "adamw", or "muon" (adamw_variants.py),
            which takes the same learning rate.
        states: Type of AdamW's running means: "float32", or "bfloat16" with stochastic rounding
            (adamw_variants.py), which takes half of the memory and is slower on a CPU.

    Raises:
        ValueError: A value is out of range; the message names the field.
    """

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: Count = 0
    decay: Decay = "cosine"
    decay_steps: int | None = None
    min_lr_ratio: float = 0.1
    warmup_samples: Count | None = None
    decay_samples: Count | None = None
    matrices: Matrices = "adamw"
    states: States = "float32"

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("learning_rate", "eps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas={self.betas} must be two numbers, each at least 0 and below 1, for "
                "example (0.9, 0.95)"
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio} must be between 0 and 1")
        if self.matrices == "muon" and self.states == "bfloat16":
            raise ValueError(
                "states='bfloat16' applies to AdamW, but matrices='muon'. Use states='float32' or "
                "matrices='adamw'"
            )
        for name, steps in (("warmup", self.warmup_steps or None), ("decay", self.decay_steps)):
            samples = getattr(self, f"{name}_samples")
            if samples is not None and steps is not None:
                raise ValueError(
                    f"{name}_samples={samples} and {name}_steps={steps} are both set. Set only "
                    "one of them"
                )
        if self.decay_steps is not None and self.decay_steps < max(self.warmup_steps, 1):
            raise ValueError(
                f"decay_steps={self.decay_steps} is less than "
                f"warmup_steps={self.warmup_steps}. Set decay_steps to the number of training "
                "steps (or None for the Trainer's), or use fewer warmup_steps"
            )


def decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Return two parameter groups: with weight decay and without.

    Matrices and embeddings decay. Biases and norm weights (one dimension) do not. The rule depends
    on one parameter at a time, so a pipeline stage groups its part of the model as one process
    would. Both groups always exist, even if one is empty: every rank must have the same number of
    groups.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_adamw(module: nn.Module, config: AdamWConfig) -> torch.optim.Optimizer:
    """Return AdamW over ``module``'s parameters in ``decay_groups``.

    With float32 states, it is torch's fused implementation on a GPU and on a CPU.
    """
    groups = decay_groups(module.named_parameters(), config.weight_decay)
    if config.states == "bfloat16":
        return HalfStateAdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    fused = all(p.device.type in _FUSED for group in groups for p in group["params"])
    optimizer = torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused or None
    )
    unscale_before_step(optimizer)  # else Lightning's mixed precision refuses to clip
    return optimizer


def build_muon(module: nn.Module, config: AdamWConfig) -> MuonWithAdamW:
    """Return Muon over the matrices of the numbered layers, and AdamW over the other parameters."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    in_blocks = {p for name, p in named if p.dim() == 2 and _IN_BLOCK.search(name)}
    rest = [(name, p) for name, p in named if p not in in_blocks]
    return MuonWithAdamW(
        [
            {"params": [p for _, p in named if p in in_blocks], "muon": True},
            *decay_groups(rest, config.weight_decay),
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def learning_rate_factor(
    step: int, *, warmup_steps: int, decay_steps: int, min_lr_ratio: float, decay: Decay = "cosine"
) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0), divided by the peak."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    height = 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_ratio + (1 - min_lr_ratio) * height


def build_schedule(
    optimizer: torch.optim.Optimizer, config: AdamWConfig, *, decay_steps: int
) -> LambdaLR:
    """Return the schedule of ``config``, to be stepped once per optimizer step."""
    # A partial instead of a closure: it can be pickled, and LambdaLR does not store its arguments
    # in checkpoints. A resumed run therefore follows its own configuration.
    factor = partial(
        learning_rate_factor,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        min_lr_ratio=config.min_lr_ratio,
        decay=config.decay,
    )
    return LambdaLR(optimizer, factor)


def configure_adamw(module: nn.Module, config: AdamWConfig, trainer: Any) -> dict[str, Any]:
    """Return the result of ``configure_optimizers``.

    It is AdamW with two decay groups, or with Muon for the matrices, and the schedule by step.

    Raises:
        ValueError: As for ``samples_as_steps`` and ``resolve_decay_steps``.
    """
    build = build_muon if config.matrices == "muon" else build_adamw
    optimizer = build(module, config)
    config = samples_as_steps(config, trainer)
    schedule = build_schedule(optimizer, config, decay_steps=resolve_decay_steps(config, trainer))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples_as_steps(config: AdamWConfig, trainer: Any) -> AdamWConfig:
    """Return ``config`` with its lengths in samples converted to steps.

    The Trainer's data module determines the number of steps.

    Raises:
        ValueError: The data module does not define the size of its steps, or the decay would end
            before the warm-up.
    """
    if config.warmup_samples is None and config.decay_samples is None:
        return config
    sizes = getattr(trainer.datamodule, "step_sizes", None)
    if sizes is None:
        raise ValueError(
            f"warmup_samples={config.warmup_samples} and decay_samples={config.decay_samples} "
            "need a data module that reports the number of samples per step, as "
            "TextDataModule does. Use warmup_steps and decay_steps"
        )

    def steps(samples: int) -> int:
        return sizes.steps(samples) // trainer.accumulate_grad_batches

    if config.warmup_samples is not None:
        config = replace(config, warmup_steps=steps(config.warmup_samples), warmup_samples=None)
    if config.decay_samples is not None:
        config = replace(config, decay_steps=steps(config.decay_samples), decay_samples=None)
    return config


def resolve_decay_steps(config: AdamWConfig, trainer: Any) -> int:
    """Return the step at which the decay of the learning rate ends.

    It is that of the configuration, or else the Trainer's last step.

    Raises:
        ValueError: Neither is known.
    """
    if config.decay_steps is not None:
        return config.decay_steps
    steps = trainer.estimated_stepping_batches
    if math.isinf(steps):
        raise ValueError(
            "optimizer.decay_steps=None uses the Trainer's number of steps, but training has "
            "no end. Set optimizer.decay_steps, or the Trainer's max_steps or max_epochs"
        )
    loader = trainer.train_dataloader
    if (
        hasattr(loader, "steps_of_epochs")
        and trainer.max_epochs not in (None, -1)
        and trainer.limit_train_batches == 1.0
    ):
        # Lightning assumes that all epochs are as long as the first one; in a ramp-up, later epochs
        # have fewer steps.
        epochs = -(-loader.steps_of_epochs(trainer.max_epochs) // trainer.accumulate_grad_batches)
        steps = min(steps, epochs)
    return int(steps)
