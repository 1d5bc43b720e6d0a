"""Record of one training on one rank: what a callback sees between the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.nested import Nested, map_tensors
from lightning_ptdp.verification.batches import Captured
from lightning_ptdp.verification.watch import Seen, StepWatch, digest

__all__ = ["Held", "Record", "Recorder", "StepRecord", "make_logger"]

Held = list[tuple[tuple[int, ...], Tensor]]
"""(offset in the full tensor, value) of the rectangles that a rank holds."""


@dataclass
class StepRecord:
    """One optimizer step.

    Attributes:
        losses: (loss, tokens or 1) of each batch.
        microbatches: Losses of the last batch's microbatches, where this rank has them.
        gradients: Point of the step -> gradients that the optimizer's tensors have then.
        weights: Parameters after the step.
        buffers: Buffers after the step.
        logged: Values that ``self.log`` or the logger was given.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    microbatches: list[float] = field(default_factory=list)
    gradients: dict[str, dict[str, Held]] = field(default_factory=dict)
    weights: dict[str, Held] = field(default_factory=dict)
    buffers: dict[str, Held] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """One rank's training.

    Attributes:
        rank: Global rank.
        place: Rank and coordinates, in words.
        replica: Which replica it belongs to.
        peers: Equal for ranks that read the same batches.
        options: Parameter -> options of its group in the optimizer.
        start: Weights and buffers before the first step.
        steps: Optimizer steps.
        final: Metrics at the end.
        seen: Observations of the user's step.
        batches: Batches of the replica.
        read: Checksums of the training batches.
        counted: Whether the step returned ``num_tokens``.
        eps: Machine epsilon of the coarsest dtype of weights and arithmetic.
    """

    rank: int = 0
    place: str = ""
    replica: int = 0
    peers: str = ""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    start: StepRecord = field(default_factory=StepRecord)
    steps: list[StepRecord] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    batches: Captured | None = None
    read: list[str] = field(default_factory=list)
    counted: bool = False
    eps: float = 0.0


class Recorder:
    """Mixin of a Lightning callback that records a training and ends it after some steps.

    Args:
        folder: Each rank writes its record there when training ends.
        steps: Optimizer steps.
        watch: Watches the user's step.
        captures: Whether the batches are kept.
    """

    def __init__(self, folder: Path, *, steps: int, watch: StepWatch, captures: bool) -> None:
        self.folder, self.steps, self.watch, self.captures = folder, steps, watch, captures
        self.record = Record(seen=watch.seen)
        self.step = StepRecord()
        self.epochs: list[list[Nested]] = []
        self.loaders: list[list[Nested]] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.trainer, strategy = trainer, trainer.strategy
        at = strategy.layout.coordinates(strategy.global_rank)
        self.record.rank, self.record.replica = strategy.global_rank, strategy.layout.replica(strategy.global_rank)
        places = ", ".join(f"{name} {index}" for name, index in at.items() if strategy.layout.size(name) > 1)
        self.record.place = f"rank {self.record.rank}" + (f" ({places})" if places else "")
        self.record.peers = f"{self.record.replica} {at['context']}"
        capture = partial(self._capture, trainer)
        vars(strategy)["batch_to_device"] = _around(strategy.batch_to_device, before=capture)
        vars(module)["configure_gradient_clipping"] = _around(
            module.configure_gradient_clipping,
            before=lambda *_, **__: self._keep_gradients(strategy, "on_before_optimizer_step"),
            after=lambda: self._keep_gradients(strategy, "configure_gradient_clipping"),
        )

    def _capture(self, trainer: Any, batch: Nested, *_: object, **options: Any) -> None:
        if trainer.training:
            self.record.read.append(digest(batch))
            lists, index = self.epochs, trainer.current_epoch
        else:
            lists, index = self.loaders, options.get("dataloader_idx", 0)
        if self.captures:
            lists.extend([] for _ in range(index + 1 - len(lists)))
            lists[index].append(map_tensors(batch, lambda tensor: tensor.detach().to("cpu", copy=True)))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._keep_model(trainer.strategy, self.record.start)
        coarse = "16" in str(trainer.precision) or trainer.strategy.config.fp8 is not None
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        self.record.eps = max(torch.finfo(dtype).eps for dtype in dtypes | ({torch.bfloat16} if coarse else set()))
        for group, name, *_ in _optimized(trainer.strategy):
            self.record.options[name] = {
                key: value for key, value in group.items() if isinstance(value, (int, float, str, tuple))
            }

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.step.gradients.clear()
        self._keep_gradients(trainer.strategy, "the backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._keep_gradients(trainer.strategy, "on_after_backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: object) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            tokens = outputs.get("num_tokens")
            self.record.counted |= tokens is not None
            self.step.losses.append((float(outputs["loss"]), 1.0 if tokens is None else float(tokens)))
        self.step.microbatches = [float(loss) for loss in trainer.strategy.engine.microbatch_losses]
        if trainer.global_step == len(self.record.steps):
            return
        self._keep_model(trainer.strategy, self.step)
        self.step.logged |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.record.steps.append(self.step)
        self.step = StepRecord()
        trainer.should_stop = trainer.should_stop or len(self.record.steps) >= self.steps

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.record.final |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self.captures:
            length = trainer.num_training_batches
            self.record.batches = Captured(
                train=self.epochs, validation=self.loaders, length=length if isinstance(length, int) else None
            )
        torch.save(self.record, self.folder / f"{self.record.rank}.pt")

    def log(self, metrics: dict[str, float], *_: object, **__: object) -> None:
        """Keep values for the logger, which gets those of a step behind it."""
        values = {name: float(value) for name, value in metrics.items()}
        if self.trainer.validating or not self.record.steps:
            self.record.final |= values
        else:
            self.record.steps[-1].logged = {**values, **self.record.steps[-1].logged}

    def _keep_gradients(self, strategy: Any, point: str) -> None:
        last = next(reversed(self.step.gradients.values()), {})
        found = {}
        for _, name, tensor, placed in _optimized(strategy):
            if tensor.grad is None:
                continue
            held = _held(tensor.grad, placed)
            same = name in last and all(torch.equal(a, b) for (_, a), (_, b) in zip(last[name], held, strict=True))
            found[name] = last[name] if same else held
        self.step.gradients[point] = found

    def _keep_model(self, strategy: Any, step: StepRecord) -> None:
        trained = {record.name for record in strategy.parallel.records.values()}
        for name, (tensor, sharding) in strategy._model_tensors().items():
            (step.weights if name in trained else step.buffers)[name] = _held(tensor, sharding)


def make_logger(base: type, log: Callable[..., None]) -> Any:
    """Return a logger that writes nothing and passes its values to ``log``; ``base`` is Lightning's DummyLogger."""

    def log_metrics(self: object, metrics: dict[str, float], step: int | None = None) -> None:
        log(metrics)

    return type("VerificationLogger", (base,), {"log_metrics": log_metrics})()


def _optimized(strategy: Any) -> Iterator[tuple[dict[str, Any], str, Tensor, Any]]:
    """Yield (group, name, tensor, its position in the full parameter) of everything that the optimizer steps on."""
    names, placed = strategy._optimizer_records()
    for group in strategy.optimizers[0].param_groups:
        for tensor in group["params"]:
            if tensor in names:
                yield group, names[tensor], tensor, placed[names[tensor]]


def _held(tensor: Tensor, placed: Any) -> Held:
    return [(offset, view.detach().to("cpu", copy=True)) for offset, view in placed.held(tensor)]


def _around(
    function: Callable[..., Any], *, before: Callable[..., None], after: Callable[[], None] | None = None
) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = function(*args, **kwargs)
        if after is not None:
            after()
        return result

    return called
