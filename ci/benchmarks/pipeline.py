"""Pipeline engines over their schedules' ideal: our runtime beside torch.distributed.pipelining, in
the same processes, in turns.

Run: python ci/benchmarks/pipeline.py [--quick] [--only NAME] [--rounds 5]

1. Stages that only sleep: 20 ms forward and 40 ms backward a rank and microbatch, split over the v
   chunks; where the schedule splits the backward, 20 ms for each half. So step time over the
   schedule's ideal (its simulation with these costs and free messages) is what the engine costs,
   and p = 8 fits on two cores. torch's ideal is that of the order in which torch computes. A second
   row has a bare loop over our schedule that only sleeps and sends: what gloo, timers and the cores
   cost by themselves, the floor.
2. What is kept for messages: receive buffers posted and not yet waited for, and sent tensors alive,
   in bytes, the most on any rank.
3. A real stack of GPT blocks, a step without optimizer. p = 4 has more processes than a small
   machine has cores.

A step is measured from the first rank's start to the last rank's end; both engines' gradients are
compared before. The sleeping stages leave most of the machine idle; where others use it meanwhile,
``chrt -f 10 python ci/benchmarks/pipeline.py --only …`` keeps them
out (and waiting: not for the GPT, please).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Comparison, compare, parse_options, report
from ledger import Ledger
from pipeline_engines import PEERS, Bare, Ours, Sizes, Torchs, ideal, torchs_schedule
from sleeping import SleepingBlock, Sleeps
from torch import Tensor, nn

from lightning_ptdp.models import GPTConfig
from lightning_ptdp.models.gpt import Block
from lightning_ptdp.schedule import Costs

FORWARD, INPUT, WEIGHT = 0.020, 0.020, 0.020  # seconds a rank and microbatch
SMALL, LARGE = (4, 16), (1024, 1024)  # float32 hidden states: 256 bytes, 4 MiB
# 6.3 M parameters in its blocks
GPT = GPTConfig.gpt2(num_layers=8, hidden_size=256, num_heads=8, sequence_length=128)

SLEEPING = [
    Sizes(schedule="1f1b", p=4, v=1, m=8),
    Sizes(schedule="interleaved_1f1b", p=4, v=2, m=8),
    Sizes(schedule="interleaved_1f1b", p=8, v=2, m=16),
    Sizes(schedule="zb_h1", p=4, v=1, m=8),
    Sizes(schedule="zb_v", p=4, v=2, m=8),
]
MESSAGES = [Sizes(schedule="interleaved_1f1b", p=p, v=2, m=32) for p in (2, 4)]
REAL = [
    Sizes(schedule=name, p=p, v=v, m=8)
    for p in (2, 4)
    for name, v in zip(PEERS, (1, 2, 1, 2), strict=True)
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Case that both engines run.

    Attributes:
        name: Of the rows.
        sizes: Of the schedule.
        blocks: Makes the whole model, the same on every call.
        batch: Makes the batch.
        costs: Of a stage that sleeps.
    """

    name: str
    sizes: Sizes
    blocks: Callable[[], list[nn.Module]]
    batch: Callable[[], Tensor]
    costs: Costs | None = None


@dataclass(frozen=True)
class Outcome:
    """Measurements of one rank.

    Attributes:
        ours: (start, end) of each step, on the clock that all processes share.
        peer: The same.
        bare: The same of the bare loop, for stages that sleep.
        ours_bytes: The most for (receives, sent tensors).
        peer_bytes: The same.
        ideals: Of our schedule and of torch's order, in seconds, for stages that sleep.
    """

    ours: list[tuple[float, float]]
    peer: list[tuple[float, float]]
    bare: list[tuple[float, float]]
    ours_bytes: tuple[int, int]
    peer_bytes: tuple[int, int]
    ideals: tuple[float, float] | None


def sleeping_case(sizes: Sizes, shape: tuple[int, ...] = SMALL, *, speed: float = 1.0) -> Case:
    """Stages that sleep the times above over ``speed``."""
    splits, unit = sizes.build().splits_backward, 1 / (sizes.v * speed)
    sleeps = Sleeps(
        forward=FORWARD * unit,
        backward=(INPUT if splits else INPUT + WEIGHT) * unit,
        weight=WEIGHT * unit if splits else 0.0,
    )
    return Case(
        name=f"{sizes}"
        if shape == SMALL
        else f"{sizes}, {torch.Size(shape).numel() * 4 >> 20} MiB",
        sizes=sizes,
        blocks=lambda: [SleepingBlock(sleeps) for _ in range(sizes.p * sizes.v)],
        batch=lambda: torch.zeros(sizes.m * shape[0], *shape[1:]),
        costs=Costs(**dataclasses.asdict(sleeps)),
    )


def gpt_case(sizes: Sizes, length: int) -> Case:
    """GPT blocks on one sequence of ``length`` tokens a microbatch."""

    def blocks() -> list[nn.Module]:
        torch.manual_seed(1)
        return [Block(GPT) for _ in range(GPT.num_layers)]

    return Case(
        name=f"GPT, {sizes}",
        sizes=sizes,
        blocks=blocks,
        batch=lambda: torch.randn(
            sizes.m,
            length,
            GPT.hidden_size,
            generator=torch.Generator().manual_seed(0),
        ),
    )


def measured(step: Callable[[], None]) -> tuple[float, float]:
    """When a step that all ranks start together started and ended here."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def watched(step: Callable[[], None]) -> tuple[int, int]:
    """The peaks of a step."""
    dist.barrier()
    with Ledger().watching() as ledger:
        step()
    return ledger.peak_received, ledger.peak_sent


def check_gradients(ours: Ours, peer: Torchs) -> None:
    """Both engines have done the same work."""
    assert len(ours.parameters) == len(peer.parameters)
    for left, right in zip(ours.parameters, peer.parameters, strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-7)


def worker(rank: int, store: str, case: Case, rounds: int, outcomes: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=case.sizes.p
    )
    blocks, batch = case.blocks(), case.batch()
    ours, peer = Ours(case.sizes, copy.deepcopy(blocks), batch), Torchs(case.sizes, blocks, batch)
    for engine in (ours, peer):  # shapes are learnt
        engine.step()
    check_gradients(ours, peer)
    gc.collect()
    gc.freeze()
    engines: list[Any] = (
        [peer, ours]
        if case.costs is None
        else [Bare(ours, case.costs, batch.chunk(case.sizes.m)[0]), peer, ours]
    )
    spans: list[list[tuple[float, float]]] = [[] for _ in engines]
    for turn in range(rounds):
        for index in range(len(engines)):
            chosen = (turn + index) % len(engines)
            spans[chosen].append(measured(engines[chosen].step))
    (*_, peer_spans, ours_spans), bare_spans = spans, spans[0] if case.costs is not None else []
    ours_bytes, (received, sent) = watched(ours.step), watched(peer.step)
    peer_bytes = max(received, peer.held_receive_bytes), sent
    ideals = None
    if case.costs is not None:
        ideals = (
            ideal(ours.schedule, case.costs),
            ideal(torchs_schedule(peer.schedule, ours.schedule), case.costs),
        )
    outcomes.put(Outcome(ours_spans, peer_spans, bare_spans, ours_bytes, peer_bytes, ideals))
    dist.barrier()
    dist.destroy_process_group()


def run(case: Case, rounds: int) -> list[Outcome]:
    """All ranks' outcomes."""
    outcomes = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.join(folder, "store"), case, rounds, outcomes)
        # what they put fits into the pipe
        mp.start_processes(worker, arguments, nprocs=case.sizes.p, start_method="fork")
    return [outcomes.get() for _ in range(case.sizes.p)]


def step_times(spans: Sequence[list[tuple[float, float]]]) -> list[float]:
    """From the first start to the last end, for each step."""
    return [
        max(end for _, end in step) - min(start for start, _ in step)
        for step in zip(*spans, strict=True)
    ]


def rows_of_times(case: Case, rounds: int) -> list[Comparison]:
    """Step time beside torch's; over the ideal, and beside the bare loop's too, where stages
    sleep."""
    outcomes = run(case, rounds)
    ours, peer = (
        step_times([outcome.ours for outcome in outcomes]),
        step_times([outcome.peer for outcome in outcomes]),
    )
    peer_name, ideals = f"torch {PEERS[case.sizes.schedule]}", outcomes[0].ideals
    if ideals is None:
        return [told(compare(name=case.name, ours=ours, peer=peer, peer_name=peer_name, unit="s"))]
    bare = [value / ideals[0] for value in step_times([outcome.bare for outcome in outcomes])]
    ours, peer = [value / ideals[0] for value in ours], [value / ideals[1] for value in peer]
    also = "" if abs(ideals[0] - ideals[1]) < 1e-6 else f", torch's {ideals[1] * 1e3:.0f} ms"
    peer_name = f"{peer_name}; ideal {ideals[0] * 1e3:.0f} ms{also}"
    return [
        told(compare(name=case.name, ours=ours, peer=peer, peer_name=peer_name, unit="x ideal")),
        told(
            compare(
                name=f"{case.name}, floor",
                ours=ours,
                peer=bare,
                peer_name="bare gloo loop",
                unit="x ideal",
            )
        ),
    ]


def told(row: Comparison) -> Comparison:
    """Printed at once: all rows together take minutes."""
    print(
        f"{row.name}: {row.ours:.3f}, {row.peer_name.partition(';')[0]} {row.peer:.3f} {row.unit}",
        flush=True,
    )
    return row


def rows_of_bytes(sizes: Sizes) -> list[Comparison]:
    """The most that any rank keeps for messages; torch's with the options that it has by
    default."""
    outcomes = run(sleeping_case(sizes, (64, 1024), speed=5.0), 1)
    rows = []
    for index, name in enumerate(("receive buffers", "sent tensors")):
        ours, peer = (
            max(getattr(o, field)[index] for o in outcomes) / 2**20
            for field in ("ours_bytes", "peer_bytes")
        )
        peer_name = f"torch {PEERS[sizes.schedule]}; a hidden state is 0.25"
        rows.append(
            compare(
                name=f"{name}, {sizes}", ours=[ours], peer=[peer], peer_name=peer_name, unit="MiB"
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each engine")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument(
        "--only",
        default="",
        help="only rows with this in their name: 'zb_v', 'GPT', 'MiB', 'buffers', …",
    )
    parser.add_argument(
        "--length", type=int, default=GPT.sequence_length, help="tokens of a GPT's sequence"
    )
    options = parse_options(parser, rounds=1, only="1f1b p=4 m=8", length=8)
    rounds = 2 if options.quick else options.rounds
    torch.set_num_threads(1)
    cases = [sleeping_case(sizes) for sizes in SLEEPING] + [sleeping_case(SLEEPING[1], LARGE)]
    cases += [gpt_case(sizes, options.length) for sizes in REAL]
    chosen = [case for case in cases if options.only in case.name]
    rows = [row for case in chosen for row in rows_of_times(case, rounds)]
    rows += [
        row
        for sizes in MESSAGES
        if options.only in f"receive buffers, sent tensors, {sizes}"
        for row in rows_of_bytes(sizes)
    ]
    report("Pipeline", rows)


if __name__ == "__main__":
    main()
