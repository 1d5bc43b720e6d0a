"""A step with Muon beside one with AdamW, at d = 2 with a sharded optimizer, in turns.

Run: python ci/benchmarks/muon.py [--rounds 4] [--only 50] [--batch 8]

The model and the loop are those of ``data_parallel.py``. Each rank orthogonalizes the matrices that
it owns, five iterations of three products each. For a matrix of m x n, m <= n, these are 5 (4 m^2 n
+ 2 m^3) operations, on each rank about 0.8 of the 6 N T operations of a step of the 50 M model (N)
with T = 1,024 tokens. They do not depend on the number of tokens."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from data_parallel import SIZES, Lit
from harness import QUIET, compare, parse_options, report
from lightning.pytorch import Callback, Trainer
from turns import ENOUGH, Contestant, Same, TrainerLoop, alternate, on_ranks

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import AdamWConfig
from lightning_ptdp.models.optimizer_setup import build_adamw, build_muon


class Optimized(Lit):
    """The GPT with Muon or AdamW."""

    def __init__(self, size: str, *, muon: bool) -> None:
        super().__init__(SIZES[size])
        self.build = build_muon if muon else build_adamw

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.build(self, AdamWConfig())


def trained(size: str, batch: torch.Tensor, *, muon: bool) -> Contestant:
    def fit(turns: Callback) -> None:
        trainer = Trainer(
            strategy=PTDPStrategy(shard="optimizer"),
            accelerator="cpu",
            devices=2,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        trainer.fit(
            Optimized(size, muon=muon), torch.utils.data.DataLoader(Same(batch), batch_size=None)
        )

    return TrainerLoop(fit)


def measure(
    rank: int, _folder: str, size: str, samples: int, rounds: int
) -> dict[str, list[float]]:
    """Return the times of a step with each optimizer."""
    config = SIZES[size]
    generator = torch.Generator().manual_seed(rank)
    shape = (samples, config.sequence_length + 1)
    batch = torch.randint(0, config.vocabulary_size, shape, generator=generator)
    engine = partial(trained, size, batch)
    engines = {"Muon": engine(muon=True), "AdamW": engine(muon=False)}
    return alternate(engines, rounds=rounds, steps=1, ours=engines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", default="50", help="only sizes with this in their name")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    options = parse_options(parser, rounds=1, only="tiny")
    rows = []
    for size in SIZES:
        if options.only in size:
            times = on_ranks(measure, size, options.batch, options.rounds)
            tokens = options.batch * SIZES[size].sequence_length
            rows.append(
                compare(
                    name=f"step, {size}, Muon, {tokens:,} tokens a rank",
                    ours=times["Muon"],
                    peer=times["AdamW"],
                    peer_name="AdamW",
                    unit="s",
                )
            )
    report("Muon, d = 2", rows)


if __name__ == "__main__":
    main()
