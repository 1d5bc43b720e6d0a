"""What a pipeline is given to do in tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class SumJob:
    """The sum of squares of a model's output over microbatches of different shapes."""

    def __init__(self, model: Any, batches: list[Tensor], *, training: bool) -> None:
        self.model, self.batches, self.training = model, batches, training
        self.losses: dict[int, float] = {}

    def signature(self, microbatch: int) -> Any:
        return self.training, tuple(self.batches[microbatch].shape)

    def forward(self, stage: int, microbatch: int) -> Tensor:
        return self.model(self.batches[microbatch])

    def finish(self, microbatch: int, output: Tensor) -> Tensor | None:
        loss = output.square().sum()
        self.losses[microbatch] = loss.item()
        return loss if self.training else None

    def before_last_gradients(self, stage: int, awaited: Any) -> None:
        pass

    def gradient_complete(self, parameter: Tensor) -> None:
        pass

    def reduce(self, stage: int) -> None:
        pass
