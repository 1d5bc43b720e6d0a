"""Record of one training run on one rank, and the callback that fills it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.base.nested import Nested, batch_size, iterate_tensors, map_tensors
from lightning_ptdp.engine.microbatches import merge_outputs
from lightning_ptdp.shims.lightning import replace_once

Held = list[tuple[tuple[int, ...], Tensor]]
"""(offset in the full tensor, value) of the rectangles that a rank holds."""
Key = tuple[str, int, str]
"""(kind, step, hook after which a gradient is kept). The step before the first is -1."""
Pairs = list[tuple[float, float]]
"""(value, number of tokens or 1) of each batch of a step."""
_ROUNDING = torch.finfo(torch.float32).eps


@dataclass(kw_only=True)
class Captured:
    """Batches of one replica.

    Attributes:
        lists: ("train", epoch) or ("validation", loader) -> batches.
        length: Number of batches in a full training epoch; infinite if the loader has no length.
        parts: Number of batches that make up one batch of the layout.
    """

    lists: dict[tuple[str, int], list[Nested]] = field(default_factory=dict)
    length: float = math.inf
    parts: int = 1


@dataclass(kw_only=True)
class Record:
    """One rank's training.

    Attributes:
        place: Rank and coordinates, in words.
        replica: Number of the replica that the rank belongs to.
        context: Number of the part of the sequence that the rank reads.
        steps: Number of optimizer steps.
        tensors: Parameters or buffers by name.
        numbers: Losses, logged values and metrics by name.
        losses: Losses of the microbatches of the first step's last batch, if this rank has them.
        exact: ("batch" or "random numbers", identifier) -> checksum, equal on ranks that read the
            same samples; ("optimizer option", parameter) -> options of its group.
        random: Lines that draw random numbers with torch, and names of other generators in use.
        parameters: Lines of the step that read parameters of modules that are not being called.
        written: Attributes and buffers that a step changed.
        batches: Batches of the replica, if they are captured.
        counted: True if the step returned ``num_tokens``.
        eps: Machine epsilon of the coarsest dtype of weights and arithmetic.
    """

    place: str = ""
    replica: int = 0
    context: int = 0
    steps: int = 0
    tensors: dict[Key, dict[str, Held]] = field(default_factory=dict)
    numbers: dict[Key, dict[str, Pairs]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    exact: dict[tuple[str, str], str] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    batches: Captured = field(default_factory=Captured)
    counted: bool = False
    eps: float = 0.0


class Recorder:
    """Mixin of a Lightning callback that records a training and ends it after some steps.

    Args:
        record: The record that the hooks fill.
        steps: Number of optimizer steps.
        captures: True to record the batches.
        disturbed: True to change the initial weights by about the rounding of float32.
    """

    def __init__(self, record: Record, steps: int, *, captures: bool, disturbed: bool) -> None:
        self.record = record
        self.steps = steps
        self.captures = captures
        self.disturbed = disturbed
        self._tokens = 1.0
        self._gradients: dict[str, Held] = {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        rank = self._strategy.global_rank
        layout = self._strategy.layout
        self.record.place = f"rank {rank} ({self._strategy.mesh.where})"
        self.record.replica = layout.replica(rank)
        self.record.context = layout.coordinates(rank)["context"]
        replace_once(self._strategy, "batch_to_device", self._capture)
        replace_once(module, "configure_gradient_clipping", self._clip)

    def _capture(
        self, move: Callable[..., Nested], batch: Nested, *args: Any, **options: Any
    ) -> Nested:
        key = ("validation", options.get("dataloader_idx", 0))
        if self._trainer.training:
            key = ("train", self._trainer.current_epoch)
            self.record.exact["batch", str(self._trainer.fit_loop.total_batch_idx + 1)] = digest(
                batch
            )
        if self.captures:
            copy = map_tensors(batch, lambda tensor: tensor.detach().to("cpu", copy=True))
            self.record.batches.lists.setdefault(key, []).append(copy)
        return move(batch, *args, **options)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.disturbed:
            for parameter in module.parameters():
                parameter.data *= 1 + _ROUNDING * torch.rand_like(parameter)
        self._keep_model()
        dtypes = {
            parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()
        }
        if "16" in str(trainer.precision) or self._strategy.config.fp8 is not None:
            dtypes.add(torch.bfloat16)
        self.record.eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        for group, name, *_ in self._optimized():
            self.record.exact["optimizer option", name] = ", ".join(
                f"{key}={value!r}"
                for key, value in group.items()
                if isinstance(value, (int, float, str, tuple))
            )

    def on_after_backward(self, *_: object) -> None:
        self._keep_gradients("the backward")

    def on_before_optimizer_step(self, *_: object) -> None:
        self._keep_gradients("on_after_backward")

    def _clip(self, clip: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._keep_gradients("on_before_optimizer_step")
        clip(*args, **kwargs)
        self._keep_gradients("configure_gradient_clipping")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: object) -> None:
        record = self.record
        if isinstance(outputs, dict) and "loss" in outputs:
            record.counted |= "num_tokens" in outputs
            self._tokens = float(outputs.get("num_tokens", 1.0))
            losses = record.numbers.setdefault(("loss", record.steps, ""), {"": []})
            losses[""].append(
                (float(outputs["loss"]) * trainer.accumulate_grad_batches, self._tokens)
            )
        if record.steps == 0:
            record.losses = [float(loss) for loss in self._strategy.engine.optimization.losses]
        if trainer.global_step == record.steps:
            return
        record.steps += 1
        self._keep_model()
        self._keep_numbers("logged value", trainer.callback_metrics)
        trainer.should_stop |= record.steps >= self.steps

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._keep_numbers("metric", trainer.callback_metrics)
        self.record.batches.length = trainer.num_training_batches

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Keep the values of the logger, which receives those of a step after the step."""
        self._keep_numbers(
            "metric" if self._trainer.validating or not self.record.steps else "logged value",
            metrics,
        )

    def _keep_numbers(self, kind: str, values: Mapping[str, float]) -> None:
        weight = self._tokens if kind == "logged value" else 1.0
        numbers = self.record.numbers.setdefault((kind, self.record.steps - 1, ""), {})
        for name, value in values.items():
            numbers.setdefault(name, [(float(value), weight)])

    def _keep_gradients(self, point: str) -> None:
        gradients = {}
        for _, name, tensor, placement in self._optimized():
            if tensor.grad is not None:
                with self._strategy.engine.gradients.step.computing():
                    held = _held(tensor.grad, placement)
                last = self._gradients.get(name, held)
                same = all(torch.equal(a, b) for (_, a), (_, b) in zip(last, held, strict=True))
                gradients[name] = last if same else held
        self._gradients = self.record.tensors["gradient", self.record.steps, point] = gradients

    def _keep_model(self) -> None:
        trained = {managed.name for managed in self._strategy.parallel.parameters.values()}
        for name, (tensor, placement) in self._strategy.model_space.tensors().items():
            kind = "weight" if name in trained else "buffer"
            key = (kind if self.record.steps else "initial value", self.record.steps - 1, "")
            self.record.tensors.setdefault(key, {})[name] = _held(tensor, placement)

    def _optimized(self) -> Iterator[tuple[dict[str, Any], str, Tensor, Any]]:
        """Yield the optimizer's tensors: (group, name, tensor, position in the full parameter)."""
        names, placements = self._strategy.model_space.optimizer_records()
        for group in self._strategy.optimizers[0].param_groups:
            for tensor in group["params"]:
                if tensor in names:
                    yield group, names[tensor], tensor, placements[names[tensor]]


def _held(tensor: Tensor, placement: Any) -> Held:
    return [(offset, view.detach().to("cpu", copy=True)) for offset, view in placement.held(tensor)]


def digest(value: Nested) -> str:
    """Return the hash value of a batch's tensors, which is equal in all forked processes."""
    return str(
        hash(
            tuple(
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                for tensor in iterate_tensors(value)
            )
        )
    )


# ---- Captured batches of a layout's replicas, to replay in one process and in other layouts ------


def combine(replicas: Sequence[Captured], *, joined: bool) -> Captured:
    """Return the batches of all replicas, joined to one batch each or in sequence.

    Raises:
        ValueError, RuntimeError: The batches cannot be joined.
    """
    lists: dict[tuple[str, int], list[Nested]] = {}
    for key in replicas[0].lists:
        groups = zip(*(replica.lists.get(key, ()) for replica in replicas), strict=False)
        lists[key] = [batch for parts in groups for batch in ([_join(parts)] if joined else parts)]
    count = 1 if joined else len(replicas)
    return Captured(lists=lists, length=replicas[0].length * count, parts=count)


@dataclass(frozen=True)
class Replay:
    """A loader of captured batches.

    Attributes:
        batches: Function that returns the batches of an epoch.
        length: Number of these batches; infinite if it is unknown.
    """

    batches: Callable[[], Iterable[Nested]]
    length: Any

    def __len__(self) -> int:
        return self.length  # Infinity raises a TypeError, like any loader without a length.

    def __iter__(self) -> Iterator[Nested]:
        return iter(self.batches())


def _join(parts: Sequence[Nested]) -> Nested:
    if len(parts) == 1:
        return parts[0]
    sizes = [batch_size(part) for part in parts]
    merged = merge_outputs(parts, sizes, sizes)
    if batch_size(merged) != sum(sizes):
        raise ValueError("they have values other than tensors with the samples along dimension 0")
    return merged
