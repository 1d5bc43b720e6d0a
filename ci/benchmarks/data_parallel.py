"""Data parallelism at d = 2: our strategy beside what Lightning and torch have, in the same
processes, in turns.

Run: python ci/benchmarks/data_parallel.py [--rounds 6] [--steps 2] [--only 10]

The same GPT with AdamW on two gloo processes, a thread each. Whole optimizer states on every rank:
ours and Lightning's DDPStrategy.
Sharded ones: ours (``shard="optimizer"``), DDPStrategy with ZeroRedundancyOptimizer, and FSDP2
(which also shards parameters and gradients, and gathers twice a step). Sharded gradients: ours
(``shard="gradients"``) and FSDP2 that gathers once a step. Sharded parameters: ``sharded.py``. FSDP2 runs in a bare loop,
the others inside Trainer.fit. The peers run with the C library's usual settings; ours keeps freed
memory in the process.

How much of the reduction is hidden behind the backward: 1 - (what the step still waits for when its
backward is over) / (what the same reductions take with nothing beside them). What is left of them
over a slow link: ``slow_link.py``, run where hosts can be made."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import lightning.pytorch as L
import slow_link
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import QUIET, Comparison, compare, parse_options, report
from hosts import NoHosts, run_on_hosts
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from turns import ENOUGH, BareLoop, Contestant, Same, TrainerLoop, alternate, on_ranks

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data_parallel.bucket import GradientState
from lightning_ptdp.data_parallel.buckets import GradientBuckets
from lightning_ptdp.models import GPT, GPTConfig
from lightning_ptdp.world.layout import Sharding

SIZES = {
    "tiny": GPTConfig.gpt2(
        vocabulary_size=64,
        sequence_length=16,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        tie_embeddings=False,
    ),
    "10 M": GPTConfig.gpt2(
        vocabulary_size=8192,
        sequence_length=128,
        num_layers=8,
        hidden_size=256,
        num_heads=8,
        tie_embeddings=False,
    ),
    "50 M": GPTConfig.gpt2(
        vocabulary_size=8192,
        sequence_length=128,
        num_layers=13,
        hidden_size=512,
        num_heads=8,
        tie_embeddings=False,
    ),
}
BATCH, RATE = 8, 1e-4


def token_loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Lit(L.LightningModule):
    """The GPT; its optimizer is whole or torch's sharded one."""

    def __init__(self, config: GPTConfig, redundancy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.redundancy = GPT(config), redundancy

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return token_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.redundancy:
            return ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE
            )
        return torch.optim.AdamW(self.model.parameters(), lr=RATE)


def in_trainer(
    config: GPTConfig, batch: Tensor, strategy: Callable[[], Any], *, redundancy: bool = False
) -> Contestant:
    def fit(turns: L.Callback) -> None:
        trainer = L.Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=2,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        trainer.fit(
            Lit(config, redundancy), torch.utils.data.DataLoader(Same(batch), batch_size=None)
        )

    return TrainerLoop(fit)


def fsdp2(config: GPTConfig, batch: Tensor, *, reshards: bool) -> Contestant:
    model = Lit(config).model
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        token_loss(model, batch).backward()
        optimizer.step()

    return BareLoop(step)


def deepspeed(config: GPTConfig, batch: Tensor) -> Contestant | None:
    """Return DeepSpeed's ZeRO-3 engine, in a bare loop; None: it is not installed.

    It installs with ``pip install setuptools deepspeed --no-build-isolation``.
    """
    if importlib.util.find_spec("deepspeed") is None:
        if dist.get_rank() == 0:
            print("DeepSpeed is not installed and left out")
        return None
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as peer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    peer.init_distributed(dist_backend="gloo")
    model = Lit(config).model
    engine, *_ = peer.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": len(batch),
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(token_loss(engine, batch))
        engine.step()

    return BareLoop(step)


def least(seconds: float) -> float:
    """Return the minimum over the ranks: the last one to arrive waits only for the reductions."""
    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return float(value)


class Waits:
    """Times what is left of the reductions when the backward is over, and all of them with nothing
    beside."""

    def __init__(self) -> None:
        self.left: list[float] = []
        self.alone: list[float] = []
        self.watching = False
        finish = GradientBuckets.finish

        def timed(buckets: GradientBuckets, scale: Tensor | float | None = None) -> None:
            start = time.perf_counter()
            finish(buckets, scale)
            if self.watching:
                self.left.append(least(time.perf_counter() - start))
                dist.barrier()
                for bucket in buckets.buckets():
                    bucket.state = GradientState.ACCUMULATING
                start = time.perf_counter()
                finish(buckets)
                self.alone.append(least(time.perf_counter() - start))

        GradientBuckets.finish = timed  # type: ignore[method-assign]


def contestants(config: GPTConfig, batch: Tensor, *, shard: Sharding) -> dict[str, Contestant]:
    """Ours first."""
    found: dict[str, Contestant] = {}
    # popen: everyone is here already, and nobody has to start anything.
    found["ours"] = in_trainer(
        config,
        batch,
        lambda: PTDPStrategy(shard=shard, overlap_parameter_gather=shard != "none"),
    )
    if shard == "optimizer":
        found["DDP + ZeroRedundancyOptimizer"] = in_trainer(
            config, batch, DDPStrategy, redundancy=True
        )
        found["FSDP2"] = fsdp2(config, batch, reshards=True)
    elif shard == "gradients":
        found["FSDP2, gathering once"] = fsdp2(config, batch, reshards=False)
    elif shard == "parameters":
        found["FSDP2"] = fsdp2(config, batch, reshards=True)
        if (peer := deepspeed(config, batch)) is not None:
            found["DeepSpeed ZeRO-3"] = peer
    else:
        found["DDPStrategy"] = in_trainer(config, batch, DDPStrategy)
    return found


def measure(
    rank: int, _folder: str, size: str, shard: Sharding, rounds: int, steps: int
) -> tuple[dict[str, list[float]], float]:
    """Return the times of a step, and the hidden part of our reductions."""
    generator = torch.Generator().manual_seed(rank)
    config = SIZES[size]
    batch = torch.randint(
        0, config.vocabulary_size, (BATCH, config.sequence_length + 1), generator=generator
    )
    waits = Waits()
    engines = contestants(config, batch, shard=shard)
    times = alternate(engines, rounds=rounds, steps=steps)
    waits.watching = True
    engines["ours"].steps(max(steps, 3))
    return times, 1 - statistics.median(waits.left) / statistics.median(waits.alone)


def rows(size: str, *, shard: Sharding, rounds: int, steps: int) -> list[Comparison]:
    """Step time beside every peer of the same memory class; prints how much of the reduction was
    hidden."""
    times, hidden = on_ranks(measure, size, shard, rounds, steps)
    kind = "whole optimizer" if shard == "none" else f"sharded {shard}"
    print(
        f"{size}, {kind}: {hidden:.0%} of the reduction hidden behind the backward",
        flush=True,
    )
    ours = times.pop("ours")
    return [
        compare(name=f"step, {size}, {kind}", ours=ours, peer=peer, peer_name=name, unit="s")
        for name, peer in times.items()
    ]


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
    found: list[Comparison] = []
    for size in SIZES:
        if options.only in size:
            for shard in get_args(Sharding)[: 1 if options.smoke else -1]:
                found += rows(size, shard=shard, rounds=options.rounds, steps=options.steps)
    if not options.smoke:
        try:
            slow = argparse.Namespace(mbit=200, rounds=6, only="")
            run_on_hosts(slow_link.worker, slow, local=1)
        except NoHosts as error:
            print(f"The slow link is left out: {error}")
    report("Data parallelism, d = 2", found)


if __name__ == "__main__":
    main()
