"""Training a 10 M parameter GPT over a pipeline of two, ours inside Trainer.fit and
torch.distributed.pipelining in a bare loop.

Run: python ci/benchmarks/end_to_end.py [--rounds 8] [--steps 3] Two gloo processes hold both
engines and run a few steps of each in turn, in the same order. Ours pays for Lightning's loop,
logging and the agreed loss; the peer for nothing but its schedule and the optimizer."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from alternate import Alternate
from harness import QUIET, compare, parse_options, report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import GPT, GPTConfig

MICROBATCHES, MICRO_BATCH, LENGTH = 8, 2, 128
SPLIT = (5, 3)  # the head costs as much as two or three blocks; both engines cut at the same layer


def config_of(hidden: int) -> GPTConfig:
    return GPTConfig.gpt2(
        vocabulary_size=8192,
        sequence_length=LENGTH,
        num_layers=8,
        hidden_size=hidden,
        num_heads=8,
        tie_embeddings=False,
    )


class Half(nn.Module):
    """One stage of the same GPT for the peer, cut by hand."""

    def __init__(self, whole: GPT, stage: int) -> None:
        super().__init__()
        self.first = stage == 0
        if self.first:
            self.wte, self.wpe = whole.wte, whole.wpe
            self.blocks = whole.blocks[: SPLIT[0]]
        else:
            self.blocks = whole.blocks[SPLIT[0] :]
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x)
        return x if self.first else self.head(self.norm(x))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TorchPipeline:
    """The peer: Schedule1F1B and AdamW."""

    def __init__(self, rank: int, config: GPTConfig) -> None:
        torch.manual_seed(1)
        self.rank, self.module = rank, Half(GPT(config), rank)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        stage = PipelineStage(
            self.module, rank, 2, torch.device("cpu"), group=dist.new_group([0, 1])
        )
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=token_loss)

    def steps(self, count: int, batch: Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            if self.rank == 0:
                self.schedule.step(batch[:, :-1].contiguous())  # torch 2.11 compares strides
            else:
                self.schedule.step(target=batch[:, 1:])
            self.optimizer.step()
        dist.barrier()
        return (time.perf_counter() - start) / count


class Lit(L.LightningModule):
    """Ours: an ordinary module."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = token_loss(self.model(batch[:, :-1]), batch[:, 1:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def worker(rank: int, store: str, hidden: int, rounds: int, steps: int, results: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    config = config_of(hidden)
    shape = (MICROBATCHES * MICRO_BATCH, LENGTH + 1)
    batch = torch.randint(0, config.vocabulary_size, shape, generator=generator)
    peer = TorchPipeline(rank, config)
    alternate = Alternate(lambda count: peer.steps(count, batch), steps=steps, barrier=dist.barrier)
    trainer = L.Trainer(
        strategy=PTDPStrategy(
            pipeline_parallel_size=2, num_microbatches=MICROBATCHES, partition=SPLIT
        ),
        accelerator="cpu",
        devices=2,
        max_steps=(rounds + 1) * steps,
        callbacks=[alternate],
        **QUIET,
    )
    trainer.fit(
        Lit(config), torch.utils.data.DataLoader([batch] * trainer.max_steps, batch_size=None)
    )
    if rank == 0:
        results.put((alternate.ours[1:], alternate.theirs[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    options = parse_options(parser, rounds=1, steps=1, hidden=32)
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        arguments = (store, options.hidden, options.rounds, options.steps, results)
        mp.start_processes(worker, arguments, nprocs=2, start_method="fork")
    ours, peer = results.get()
    tokens = MICROBATCHES * MICRO_BATCH * LENGTH
    print(
        f"tokens/s: ours {tokens / sorted(ours)[len(ours) // 2]:,.0f}, peer "
        f"{tokens / sorted(peer)[len(peer) // 2]:,.0f}"
    )
    name = "step, 10.6 M parameter GPT, p=2, m=8"
    report(
        "End to end",
        [
            compare(
                name=name,
                ours=ours,
                peer=peer,
                peer_name="torch.distributed.pipelining 1F1B",
                unit="s",
            )
        ],
    )


if __name__ == "__main__":
    main()
