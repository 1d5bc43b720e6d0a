"""A pipeline job for tests."""

from typing import Any

from torch import Tensor

from lightning_ptdp.forward.surroundings import Forward


class SumJob:
    """Sum of squares of a model's output over microbatches of different shapes."""

    def __init__(self, model: Any, batches: list[Tensor], *, training: bool) -> None:
        self.model, self.batches, self.training = model, batches, training
        self.losses: dict[int, float] = {}

    def signature(self, microbatch: int) -> Any:
        return self.training, tuple(self.batches[microbatch].shape)

    def begin(self, stage: int, microbatch: int) -> Forward:
        hook = "training_step" if self.training else "validation_step"
        return Forward(
            hook=hook, stage=stage, microbatch=microbatch, full_batch=self.batches[microbatch]
        )

    def forward(self, forward: Forward) -> Tensor:
        return self.model(forward.batch)

    def finish(self, forward: Forward, output: Tensor) -> Tensor | None:
        loss = output.square().sum()
        self.losses[forward.microbatch] = loss.item()
        return loss if self.training else None

    def before_gradients(self, stage: int, awaited: Any, *, last: bool) -> None:
        pass

    def gradient_complete(self, parameter: Tensor) -> None:
        pass

    def reduce(self, stage: int, *, last: bool) -> None:
        pass
