"""Habits of users' LightningModules, each a mixin over hooks that Lightning documents.

A run with a habit must train like a single process or be refused."""

import random
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

__all__ = ["HABITS"]

_RATE = 0.1


def _changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to the loss that a step returned."""
    return (
        {**output, "loss": change(output["loss"])} if isinstance(output, dict) else change(output)
    )


class Draws(L.LightningModule):
    """Uses random numbers of three generators in the step."""

    def training_step(self, batch, batch_idx):
        scale = random.uniform(0.5, 1.5) + float(np.random.beta(0.4, 0.4)) + float(torch.rand(()))
        return _changed(super().training_step(batch, batch_idx), lambda loss: loss * scale)


class Penalty(L.LightningModule):
    """Adds an L2 penalty over all parameters in the step."""

    def training_step(self, batch, batch_idx):
        penalty = 1e-3 * sum(parameter.square().sum() for parameter in self.parameters())
        return _changed(super().training_step(batch, batch_idx), lambda loss: loss + penalty)


class LayerRates(L.LightningModule):
    """A learning rate per parameter, by its position in the model; no momentum for vectors."""

    def configure_optimizers(self):
        groups = [
            {
                "params": [parameter],
                "lr": _RATE * 0.9**index,
                "momentum": 0.5 if parameter.ndim > 1 else 0.0,
            }
            for index, parameter in enumerate(self.parameters())
        ]
        return torch.optim.SGD(groups)


class NamedGroups(L.LightningModule):
    """Two groups by name, momentum, and a learning rate schedule per step."""

    def configure_optimizers(self):
        names = dict(self.named_parameters())
        slow = [
            parameter
            for name, parameter in names.items()
            if "norm" in name.lower() or name.endswith("bias")
        ]
        rest = [
            parameter
            for name, parameter in names.items()
            if not ("norm" in name.lower() or name.endswith("bias"))
        ]
        groups = [{"params": rest}] + ([{"params": slow, "lr": _RATE / 4}] if slow else [])
        optimizer = torch.optim.SGD(groups, lr=_RATE, momentum=0.9, nesterov=True)
        schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Adaptive(L.LightningModule):
    """AdamW with an epsilon that avoids steps from rounding errors of zero gradients."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)


class ClipsNorm(L.LightningModule):
    """Clips with torch's function in Lightning's hook and logs the norm."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3))


class ClipsValue(L.LightningModule):
    """Clips every element with torch's function in Lightning's hook."""

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)


class WatchesNorm(L.LightningModule):
    """Reads the norm of the gradient before each step of the optimizer."""

    def on_before_optimizer_step(self, optimizer):
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        self.log("norm", torch.nn.utils.get_total_norm(gradients))


class Freezes(L.LightningModule):
    """Trains neither embeddings nor vectors."""

    def configure_optimizers(self):
        for name, parameter in self.named_parameters():
            if "embed" in name or parameter.ndim < 2:
                parameter.requires_grad_(False)
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=_RATE)


class Averages(L.LightningModule):
    """An exponential average of the weights by Lightning's callback, which copies it into the
    module at the end."""

    def configure_callbacks(self):
        return [EMAWeightAveraging(decay=0.5)]


class Measures(L.LightningModule):
    """A metric of torchmetrics that is updated in the step and logged at the end of the epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.mean.update(output.detach(), weight=len(next(iter(batch.values()))))
        return output

    def on_train_epoch_end(self):
        self.log("mean", self.mean)


class Counts(L.LightningModule):
    """A buffer that a hook changes after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("batches", torch.zeros(()))

    def on_train_batch_end(self, *args):
        self.batches += 1


HABITS: MappingProxyType[str, type[L.LightningModule]] = MappingProxyType(
    {
        "adaptive": Adaptive,
        "averages": Averages,
        "clips norm": ClipsNorm,
        "clips value": ClipsValue,
        "counts": Counts,
        "draws": Draws,
        "freezes": Freezes,
        "layer rates": LayerRates,
        "measures": Measures,
        "named groups": NamedGroups,
        "penalty": Penalty,
        "watches norm": WatchesNorm,
    }
)
