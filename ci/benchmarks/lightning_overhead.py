"""Overhead of the strategy with all sizes 1, against a plain PyTorch loop on the same model.

Run: python ci/benchmarks/lightning_overhead.py [--rounds 12] [--steps 4] Both loops run in one
process, a few steps each in turn; ours includes everything that Lightning does between two batches.
"""

from __future__ import annotations

import argparse
import time
import warnings

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from alternate import Alternate
from harness import QUIET, compare, parse_options, report

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import GPT, GPTConfig

BATCH = 8


def config_of(hidden: int) -> GPTConfig:
    return GPTConfig.gpt2(
        vocabulary_size=8192, sequence_length=128, num_layers=6, hidden_size=hidden, num_heads=8
    )


class PlainLoop:
    """forward, backward, AdamW: nothing else."""

    def __init__(self, config: GPTConfig) -> None:
        torch.manual_seed(1)
        self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def steps(self, count: int, batch: torch.Tensor) -> float:
        start = time.perf_counter()
        for _ in range(count):
            loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return (time.perf_counter() - start) / count


class Lit(L.LightningModule):
    """The same steps as a LightningModule."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = GPT(config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    options = parse_options(parser, rounds=1, steps=1, hidden=32)
    config = config_of(options.hidden)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    batch = torch.randint(0, config.vocabulary_size, (BATCH, config.sequence_length + 1))
    plain = PlainLoop(config)
    alternate = Alternate(lambda count: plain.steps(count, batch), steps=options.steps)
    trainer = L.Trainer(
        strategy=PTDPStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=(options.rounds + 1) * options.steps,
        callbacks=[alternate],
        **QUIET,
    )
    loader = torch.utils.data.DataLoader([batch] * trainer.max_steps, batch_size=None)
    trainer.fit(Lit(config), loader)
    row = compare(
        name="step, 6.9 M parameter GPT, one process",
        ours=alternate.ours[1:],
        peer=alternate.theirs[1:],
        peer_name="plain PyTorch loop",
        unit="s",
    )
    report("Overhead of Trainer(strategy='ptdp') with all sizes 1", [row])


if __name__ == "__main__":
    main()
