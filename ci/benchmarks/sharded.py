"""Sharded parameters: beside FSDP2 and DeepSpeed at d = 2, and beside a sharded optimizer under a
pipeline.

Run: python ci/benchmarks/sharded.py [--rounds 6] [--steps 2] [--only 10]

At d = 2 the GPTs and the loop are those of ``data_parallel.py``. FSDP2 gathers every block twice a
step, as ours does. DeepSpeed's ZeRO-3 takes part if it is installed. At p = 2, d = 2 (four
processes) with interleaved 1F1B, the peer is ``shard="optimizer"``, which keeps parameters and
gradients whole. The number of gathers is that of a chunk on a rank in a step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from data_parallel import BATCH, SIZES, Lit, rows
from harness import QUIET, Comparison, compare, parse_options, report
from lightning.pytorch import Callback, Trainer
from turns import ENOUGH, Same, TrainerLoop, alternate, on_ranks

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.schedule import ActionKind

PIPELINE: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "virtual_pipeline_size": 2,
    "num_microbatches": 4,
}
LEVELS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "by block": {"shard": "parameters", "reshard_after": "block"},
    "by chunk": {"shard": "parameters"},
    "by step": {"shard": "parameters", "reshard_after": "step"},
}


def trained(size: str, batch: torch.Tensor, options: dict[str, Any]) -> TrainerLoop:
    def fit(turns: Callback) -> None:
        trainer = Trainer(
            strategy=PTDPStrategy(**PIPELINE, **options),
            accelerator="cpu",
            devices=4,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        data = torch.utils.data.DataLoader(Same(batch), batch_size=None)
        trainer.fit(Lit(SIZES[size]), data)

    return TrainerLoop(fit)


def measure(rank: int, _folder: str, size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the times of a step at each level."""
    config = SIZES[size]
    generator = torch.Generator().manual_seed(rank % 2)
    batch = torch.randint(
        0, config.vocabulary_size, (BATCH, config.sequence_length + 1), generator=generator
    )
    engines = {name: trained(size, batch, options) for name, options in LEVELS.items()}
    return alternate(engines, rounds=rounds, steps=steps, ours=LEVELS)


def pipeline_rows(size: str, *, rounds: int, steps: int) -> list[Comparison]:
    """Return the step times under a pipeline beside those of a sharded optimizer."""
    times = on_ranks(measure, size, rounds, steps, ranks=4)
    peer = times.pop("optimizer")
    return [
        compare(
            name=f"step, {size}, p2 v2 d2, {name}{gathers(name)}",
            ours=ours,
            peer=peer,
            peer_name="shard='optimizer'",
            unit="s",
        )
        for name, ours in times.items()
    ]


def gathers(name: str) -> str:
    """Return how often a rank gathers its chunks in a step, if the schedule does."""
    config = PTDPStrategy(**PIPELINE, **LEVELS[name]).config
    program = config.build_schedule(PIPELINE["num_microbatches"]).programs[0]
    count = sum(action.kind is ActionKind.GATHER for action in program)
    return f" ({count} gathers)" if count else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--only", default="M", help="only sizes with this in their name: '10', '50'"
    )
    options = parse_options(parser, rounds=1, steps=1, only="tiny")
    measure: dict[str, Callable[[str], list[Comparison]]] = {
        "d2": lambda size: rows(
            size, shard="parameters", rounds=options.rounds, steps=options.steps
        ),
        "p2": lambda size: pipeline_rows(size, rounds=options.rounds, steps=options.steps),
    }
    found: list[Comparison] = []
    for size in SIZES:
        if options.only in size:
            for one in list(measure.values())[: 1 if options.smoke else None]:
                found += one(size)
    report("Sharded parameters", found)


if __name__ == "__main__":
    main()
