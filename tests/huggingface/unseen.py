"""A run of an architecture in a layout, trained by an ordinary LightningModule with SGD."""

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.verification import Report, verify
from tests.huggingface.architectures import ARCHITECTURES, Samples, build
from tests.huggingface.hook_mixins import HABITS
from tests.parity import Parity, Place, Result, Training, assert_weights_near

__all__ = ["Run", "check", "refusal", "verified"]

_REFUSALS = (ValueError, L.utilities.exceptions.MisconfigurationException)


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    """A model in a layout.

    Attributes:
        architecture: Name of the architecture.
        options: Options of the model's configuration.
        padded: Whether the last labels of each sample are ignored. The step then returns the number
            of the others.
        hidden: Whether a hidden state of a middle layer is part of the loss.
        eager: Whether the model is built in ``__init__``.
        lora: Options of a peft adapter around the model; empty: no adapter.
        habit: Name of one of ``HABITS``; empty: no habit.
    """

    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    global_batch: int = 4
    steps: int = 3
    padded: bool = False
    hidden: bool = False
    eager: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    habit: str = ""

    smallest: ClassVar[float] = 1e-3
    always_clips: ClassVar[bool] = False

    @property
    def task(self) -> str:
        return ARCHITECTURES[self.architecture].task

    def make_module(self) -> L.LightningModule:
        if not self.habit:
            return LitUnseen(self)
        return type(self.habit, (HABITS[self.habit], LitUnseen), {})(self)

    def make_data(self) -> Dataset:
        return Samples(self.task, self.global_batch * self.steps, padded=self.padded)

    def make_strategy(self) -> PTDPStrategy:
        return PTDPStrategy(**self.layout, gradient_dtype="parameter")


class LitUnseen(L.LightningModule):
    """A typical user's module around a Hugging Face model."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        early = run.eager or ARCHITECTURES[run.architecture].eager
        self.model: Any = self._built() if early else None

    def configure_model(self):
        if self.model is None:
            self.model = self._built()

    def _built(self) -> Any:
        model = build(self.run.architecture, **self.run.options)
        if not self.run.lora:
            return model
        import peft

        return peft.get_peft_model(
            model, peft.LoraConfig(**self.run.lora, init_lora_weights="gaussian")
        )

    def training_step(self, batch, batch_idx):
        output = (
            self.model(**batch, output_hidden_states=True)
            if self.run.hidden
            else self.model(**batch)
        )
        loss = output.loss
        if self.run.hidden:
            loss = loss + output.hidden_states[2].square().mean()
        self.log("train_loss", loss)
        if self.run.padded:
            shifted = batch["labels"][:, 1:] if self.run.task == "causal" else batch["labels"]
            return {"loss": loss, "num_tokens": (shifted != -100).sum()}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _options(run: Run) -> dict[str, Any]:
    """Return the Trainer's arguments."""
    return {
        "strategy": run.make_strategy(),
        "accelerator": "cpu",
        "devices": run.world_size,
        "accumulate_grad_batches": run.accumulate,
        "gradient_clip_val": run.clip,
    }


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def refusal(rank: int, run: Run) -> str | None:
    """Return the error that refuses the run before launch, or None."""
    _quiet()
    L.seed_everything(3, verbose=False)
    try:
        trainer, module = L.Trainer(**_options(run), logger=False), run.make_module()
        trainer.strategy.connect(module)
        trainer.strategy._lightning_module = module
        trainer.state.fn = "fit"
        trainer.strategy.check_before_launch(trainer, [])
    except _REFUSALS as error:
        return str(error)
    return None


def verified(run: Run) -> Report:
    """Compare a run with one process.

    Models compute in float64, but Hugging Face computes losses, norms and softmaxes in float32
    (2^-24, 6e-8). The relative difference of gradients is about 1e-6.

    Raises:
        VerificationError: A training failed.
    """
    L.seed_everything(3, verbose=False)
    options = _options(run)
    with torch.device("meta"):
        build(run.architecture, **run.options)  # import its modules before processes are forked
    replicas = options["strategy"].config.layout(run.world_size).num_replicas
    loader = DataLoader(run.make_data(), batch_size=run.global_batch // replicas)
    return verify(
        run.make_module(),
        train_dataloaders=loader,
        steps=run.steps // run.accumulate,
        limit_s=90.0,
        **options,
    )


def check(run: Run, place: Place, parity: Parity) -> None:
    """Assert that ``place`` trains like one process; rank 0 makes the checks before launch.

    Each parameter's change is compared too: under SGD it is the sum of its gradients. Hugging Face
    computes losses, norms and softmaxes in float32, so gradients differ by about 1e-6.
    """
    ranks = parity.check(run, place)
    expected = _changes(parity.result(run))
    length = torch.cat([change.flatten() for change in expected.values()]).norm()
    for found in ranks:
        assert_weights_near(_changes(found), expected, smallest=1e-3 * float(length))


def _changes(result: Result) -> dict[str, Tensor]:
    return {
        name: value - result["initial"][name]
        for name, value in result["final"].items()
        if value.is_floating_point()
    }
