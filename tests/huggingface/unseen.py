"""One run of a drawn architecture in a drawn layout with drawn options, trained by an ordinary LightningModule under SGD."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.strategy import PTDPStrategy
from tests.huggingface.architectures import ARCHITECTURES, Samples, build
from tests.huggingface.habits import HABITS, Habit

__all__ = ["Run", "differences", "fit", "one_process", "refusal"]

_REFUSALS = (ValueError, L.utilities.exceptions.MisconfigurationException)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model in a layout.

    Attributes:
        architecture: Name of the architecture.
        options: Of the model's configuration.
        world_size: Number of processes.
        layout: Arguments of the strategy.
        batch: Samples a batch of all replicas together.
        steps: Optimizer steps.
        accumulate: Batches a step.
        clip: Limit of the gradients' norm.
        padded: Labels are ignored behind another length in each sample, and the step returns their number.
        hidden: A hidden state of the middle is in the loss.
        eager: Built in ``__init__``.
        lora: Options of an adapter of peft's around the model; none: no adapter.
        habit: Name of one of ``HABITS``; empty: none.
    """

    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    padded: bool = False
    hidden: bool = False
    eager: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    habit: str = ""

    @property
    def task(self) -> str:
        return ARCHITECTURES[self.architecture].task


class LitUnseen(Habit):
    """A typical user's module around a Hugging Face model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        early = run.eager or ARCHITECTURES[run.architecture].eager
        self.model: Any = self._built() if early else None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self._built()

    def _built(self) -> Any:
        model = build(self.run.architecture, **self.run.options)
        if not self.run.lora:
            return model
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(**self.run.lora, init_lora_weights="gaussian"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = self.model(**batch, output_hidden_states=True) if self.run.hidden else self.model(**batch)
        loss = output.loss
        if self.run.hidden:
            loss = loss + output.hidden_states[2].square().mean()
        self.log("train_loss", loss)
        if self.run.padded:
            shifted = batch["labels"][:, 1:] if self.run.task == "causal" else batch["labels"]
            return {"loss": loss, "num_tokens": (shifted != -100).sum()}
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _module(run: Run) -> LitUnseen:
    return type(run.habit, (HABITS[run.habit], LitUnseen), {})(run) if run.habit else LitUnseen(run)


class Losses(L.Callback):
    """Losses of every batch, the mean over all samples or labels, and the weights at the start."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.initial = trainer.strategy.gather_state_dict()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        weight = float(outputs.get("num_tokens", 1.0))
        group = trainer.strategy.mesh.group("replica_sum")
        loss = float(outputs["loss"]) if weight else 0.0  # a replica without labels has a mean of nothing
        sums = torch.tensor([loss * weight, weight], dtype=torch.float64)
        if group.size > 1:
            torch.distributed.all_reduce(sums, group=group.handle)
        self.losses.append(float(sums[0] / sums[1]) if sums[1] else 0.0)


def one_process(run: Run) -> Run:
    """The same training without parallelism; random numbers are drawn for each microbatch, as in the layout."""
    microbatches = run.layout.get("num_microbatches", 1) if run.habit == "draws" else 1
    return replace(run, world_size=1, layout={"num_microbatches": microbatches} if microbatches > 1 else {})


def _trainer(run: Run, callbacks: list[Any]) -> L.Trainer:
    return L.Trainer(
        strategy=PTDPStrategy(**run.layout, gradient_dtype="parameter"),
        accelerator="cpu",
        devices=run.world_size,
        max_steps=run.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def refusal(rank: int, run: Run) -> str | None:
    """Why the run is refused before a process is started; None if it is not."""
    _quiet()
    L.seed_everything(3, verbose=False)
    try:
        trainer, module = _trainer(run, []), _module(run)
        trainer.strategy.connect(module)
        trainer.strategy._lightning_module = module
        trainer.state.fn = "fit"
        trainer.strategy.check_before_launch(trainer, [])
    except _REFUSALS as error:
        return str(error)
    return None


def fit(rank: int, run: Run) -> dict[str, Any]:
    """Train; returns losses, what the module saw itself, initial and final weights of the whole model."""
    _quiet()
    L.seed_everything(3, verbose=False)
    losses, module = Losses(), _module(run)
    trainer = _trainer(run, [losses])
    data = Samples(run.task, run.batch * run.accumulate * run.steps, padded=run.padded)
    sampler = DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=run.batch // sampler.num_replicas, sampler=sampler))
    final = trainer.strategy.gather_state_dict()
    return {"losses": losses.losses, "seen": module.seen, "initial": losses.initial, "final": final}


def differences(found: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 1e-4) -> list[str]:
    """In what two runs differ, in words, the largest first.

    Models compute in float64, but losses of Hugging Face, norms and softmaxes in float32 (2^-24, 6e-8): gradients are the same to about
    1e-6 of themselves. A weight is compared by how far it went; what hardly moved (a bias of keys, to which a softmax is blind) by
    how far the furthest one of as many elements went.

    Args:
        found: Of ``fit``.
        expected: The same of one process.
        tolerance: Relative to the way that a weight went.
    """
    found_names, names = found["final"].keys(), expected["final"].keys()
    if found_names != names:
        return [f"other weights: {sorted(found_names ^ names)[:3]}"]
    result = [
        f"loss of batch {i}: {there!r} instead of {here!r}"
        for i, (there, here) in enumerate(zip(found["losses"], expected["losses"], strict=True))
        if not abs(there - here) <= tolerance * abs(here) * 0.1
    ][:1]
    result += [
        f"value {i} that the module saw: {there!r} instead of {here!r}"
        for i, (there, here) in enumerate(zip_longest(found["seen"], expected["seen"], fillvalue=math.nan))
        if not abs(there - here) <= tolerance * abs(here) * 0.1
    ][:1]
    ways = {name: (value - expected["initial"][name]).double() for name, value in expected["final"].items()}
    per_element = max((float(way.norm()) / max(way.numel(), 1) ** 0.5 for way in ways.values()), default=0.0)
    worst: list[tuple[float, str]] = []
    for name, way in ways.items():
        if not torch.equal(found["initial"][name], expected["initial"][name]):
            result.append(f"{name} starts differently")
        scale = max(float(way.norm()), 1e-3 * per_element * way.numel() ** 0.5, 1e-12)
        off = float((found["final"][name].double() - expected["final"][name].double()).norm()) / scale
        if not off <= tolerance:
            worst.append((off, f"{name} {off:.1e} of its way off"))
    return result + [text for _, text in sorted(worst, reverse=True)]
