"""Host time of one microbatch, where stages do next to nothing and messages arrive at once.

Run: python ci/benchmarks/host_time.py [--rounds 9] [--microbatches 64]

A GPU computes as fast as the host tells it what; this is what the telling takes beside the model's
own operations. Each stage multiplies 16 x 4 numbers by one; groups are torch's fake ones, whose
messages and collectives return at once. So one process is any rank of a pipeline. CPU seconds of
the process, so that other load does not count, divided by the microbatches:

- the runtime as a middle rank of p = 4 (1F1B, zero bubble), beside torch.distributed.pipelining on
  the same groups and blocks;
- the runtime without a pipeline, and Trainer(strategy="ptdp") with m microbatches, beside a bare
  loop and plain Lightning with accumulate_grad_batches=m.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers them
from harness import QUIET, Comparison, compare, parse_options, report
from pipeline_engines import PEERS, Job, Ours, Sizes, Stack, Torchs
from torch import Tensor, nn
from turns import ENOUGH, Same, TrainerLoop

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.pipeline.crossing import At, Form, TensorForm
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.schedule import build_schedule
from lightning_ptdp.world.mesh import Group

__all__ = ["measure"]

SHAPE, RANKS, RANK = (16, 4), 4, 1
Step = Callable[[], object]


class Scale(nn.Module):
    """Next to nothing, with a gradient for its input and one for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Lit(L.LightningModule):
    """The same as a module; it logs one value."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Stack([Scale()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class AllKnown(dict[Any, Form]):
    """Forms of all microbatches, known in advance, so that none is sent."""

    def get(self, key: Any, default: Any = None) -> Form:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: Any) -> Form:
        return Form(
            tensors=(TensorForm(SHAPE, torch.float32, differentiable=True, replicated=True),),
            output=At(0),
        )


def middle_rank(schedule: str, count: int) -> tuple[Step, Step]:
    """A step of ours, and of torch's, on rank 1 of 4."""
    sizes, batch = (
        Sizes(schedule=schedule, p=RANKS, v=1, m=count),
        torch.zeros(count * SHAPE[0], *SHAPE[1:]),
    )
    ours = Ours(sizes, [Scale() for _ in range(RANKS)], batch)
    ours.transport.known = AllKnown()
    torchs = Torchs(sizes, [Scale() for _ in range(RANKS)], batch)
    # Needed until torch 2.15: a stage asks its neighbours whether they know all shapes, and fake
    # groups deliver zeros, which means no.
    with mock.patch.object(dist, "recv", _answer_yes):
        torchs.step()
    return ours.step, torchs.step


def _answer_yes(vote: Tensor, *_: object, **__: object) -> None:
    vote.fill_(1)


def alone(count: int) -> tuple[Step, Step]:
    """A step of the runtime without a pipeline, and of a bare loop."""
    stack, microbatches = Stack([Scale()]), [torch.zeros(SHAPE) for _ in range(count)]
    runtime = PipelineRuntime(cut=None, transport=None, group=Group())
    schedule = build_schedule(
        "auto", pipeline_parallel_size=1, virtual_pipeline_size=1, num_microbatches=count
    )

    def bare() -> None:
        for microbatch in microbatches:
            stack(microbatch).mean().backward()

    return partial(runtime.run, schedule, Job(stack, microbatches)), bare


def trainer(strategy: Any, batch: Tensor, accumulated: int) -> Step:
    """A step of a Trainer."""

    def fit(turns: L.Callback) -> None:
        one = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=accumulated,
            max_steps=ENOUGH,
            log_every_n_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
        )
        one.fit(Lit(), torch.utils.data.DataLoader(Same(batch), batch_size=None))

    return partial(TrainerLoop(fit, barrier=lambda: None, batches=accumulated).steps, 1)


def in_turns(steps: Sequence[Step], rounds: int, count: int) -> list[list[float]]:
    """CPU microseconds of a microbatch, for each."""
    taken: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds + 1):
        for step, found in zip(steps, taken, strict=True):
            start = time.process_time()
            step()
            if turn:
                found.append((time.process_time() - start) / count * 1e6)
    return taken


def measure(rounds: int = 9, count: int = 64) -> list[Comparison]:
    """All rows; makes the default process group and takes it away."""

    def row(name: str, peer_name: str, steps: tuple[Step, Step]) -> Comparison:
        ours, peer = in_turns(steps, rounds, count)
        return compare(
            name=f"host, a microbatch: {name}", ours=ours, peer=peer, peer_name=peer_name, unit="us"
        )

    dist.init_process_group("fake", store=dist.HashStore(), rank=RANK, world_size=RANKS)
    rows = [
        row(
            f"runtime, rank {RANK} of {RANKS}, {name}",
            f"torch {PEERS[name]}",
            middle_rank(name, count),
        )
        for name in ("1f1b", "zb_h1")
    ]
    dist.destroy_process_group()
    rows.append(row("runtime, p=1", "bare loop", alone(count)))
    ours = trainer(
        PTDPStrategy(num_microbatches=count), torch.zeros(count * SHAPE[0], *SHAPE[1:]), 1
    )
    rows.append(
        row("Trainer, p=1", "plain Lightning", (ours, trainer("auto", torch.zeros(SHAPE), count)))
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=64)
    options = parse_options(parser, rounds=1, microbatches=4)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    report("What a microbatch costs the host", measure(options.rounds, options.microbatches))


if __name__ == "__main__":
    main()
