"""Share of the reductions in a step over a slow link: the step less the same step without them.

Run as root: python ci/benchmarks/slow_link.py [--mbit 200] [--rounds 6] [--only GPT];
data_parallel.py runs it too.

Two replicas on two hosts (``hosts.py``). The layers sleep as long as a backward of their share of
the model's products would take, and have their share of its parameters, so that the machine's load
does not move the figure: a GPT's head comes first in the backward and its embedding last, both
large; nearly all of VGG-16's parameters come before nearly all of its work."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from unittest import mock

import lightning.pytorch as L
import torch
import torch.distributed as dist
from harness import QUIET, Comparison, compare, report
from hosts import INIT_METHOD, start
from sleeping import SleepingBlock, Sleeps
from torch import Tensor, nn
from turns import BareLoop, Contestant, TrainerLoop

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data_parallel.bucket import Bucket, GradientState
from lightning_ptdp.data_parallel.buckets import GradientBuckets

_CONVOLUTIONS = [
    (64, 3, 224),
    (64, 64, 224),
    (128, 64, 112),
    (128, 128, 112),
    (256, 128, 56),
    (256, 256, 56),
    (256, 256, 56),
]
_CONVOLUTIONS += [
    (512, 256, 28),
    (512, 512, 28),
    (512, 512, 28),
    (512, 512, 14),
    (512, 512, 14),
    (512, 512, 14),
]
PROFILES: dict[str, list[tuple[float, float]]] = {
    "GPT": [(51.5, 0), *[(12.6, 12.6)] * 24, (51.5, 51.5)],
    "VGG-16": [
        *(
            (out * into * 9 / 1e6, out * into * 9 * size**2 / 1e6)
            for out, into, size in _CONVOLUTIONS
        ),
        *((million, million) for million in (102.8, 16.8, 4.1)),
    ],
}
"""By model, its layers in forward order: (millions of parameters, millions of products a token or
picture)."""
BACKWARD_S, FORWARD_S = 1.0, 0.1
BUCKETS = 22  # of 25 MiB, in a model of 140 M parameters


def layers(profile: str, *, megabytes: float) -> nn.Sequential:
    """Sleeping layers of a model that has so many MB of gradients."""
    parameters, work = (sum(column) for column in zip(*PROFILES[profile], strict=True))
    return nn.Sequential(
        *(
            SleepingBlock(
                Sleeps(forward=FORWARD_S * share / work, backward=BACKWARD_S * share / work),
                size=max(1, round(megabytes * 1e6 / 4 * size / parameters)),
            )
            for size, share in PROFILES[profile]
        )
    )


class Lit(L.LightningModule):
    """Layers, and SGD."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def ours(model: nn.Module, bucket_mb: float) -> Contestant:
    def fit(turns: L.Callback) -> None:
        trainer = L.Trainer(
            strategy=PTDPStrategy(bucket_mb=bucket_mb),
            accelerator="cpu",
            devices=1,
            num_nodes=2,
            max_steps=10**6,
            callbacks=[turns],
            **QUIET,
        )
        trainer.fit(
            Lit(model), torch.utils.data.DataLoader([torch.ones(1)] * 10**6, batch_size=None)
        )

    return TrainerLoop(fit)


def ddp(
    model: nn.Module, bucket_mb: float
) -> tuple[Contestant, nn.parallel.DistributedDataParallel]:
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.ones(1)).sum().backward()
        optimizer.step()

    return BareLoop(step), wrapped


@contextlib.contextmanager
def nothing_reduced() -> Iterator[None]:
    """Our buckets stay as they are."""

    def launch(buckets: GradientBuckets, bucket: Bucket) -> None:
        bucket.state = GradientState.REDUCING

    with mock.patch.object(GradientBuckets, "_launch", launch):
        yield


def exposed(profile: str, *, mbit: int, rounds: int) -> Comparison:
    """Seconds that the reductions add to a step, ours beside DDP's."""
    megabytes = mbit / 8 * BACKWARD_S  # the link is as busy as the processor
    bucket_mb = megabytes / BUCKETS
    mine = ours(layers(profile, megabytes=megabytes), bucket_mb)
    theirs, wrapped = ddp(layers(profile, megabytes=megabytes), bucket_mb)
    with_them: tuple[list[float], list[float]] = ([], [])
    without: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        with nothing_reduced(), wrapped.no_sync():
            for each, seconds in zip((mine, theirs), without, strict=True):
                seconds.append(each.steps(1))
        for each, seconds in zip((mine, theirs), with_them, strict=True):
            seconds.append(each.steps(1))
    # Whatever else the machine does only adds.
    left = [min(long) - min(short) for long, short in zip(with_them, without, strict=True)]
    name = f"exposed reduction, {profile}, {megabytes:.0f} MB, {mbit} Mbit/s"
    return compare(
        name=name, ours=left[:1], peer=left[1:], peer_name="DistributedDataParallel", unit="s"
    )


def worker(rank: int, options: argparse.Namespace) -> None:
    """One replica."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE="2", NODE_RANK=str(rank), GROUP_RANK=str(rank)
    )
    # everyone is here already
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=INIT_METHOD, rank=rank, world_size=2)
    rows = [
        exposed(name, mbit=options.mbit, rounds=options.rounds)
        for name in PROFILES
        if options.only in name
    ]
    if rank == 0:
        report("Data parallelism over a slow link", rows)
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # the Trainers' threads wait for a turn that does not come


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=200, help="of the link between the hosts")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--only", default="", help="only models with this in their name: 'GPT', 'VGG-16'"
    )
    start(parser, worker, local=1)


if __name__ == "__main__":
    main()
