"""Time lost by the loss of a process at d = 2, beside torchft and beside checkpoints on the disk.

    python ci/benchmarks/rank_loss.py [--losses 4] [--gap-s 25] [--pause-s 0.25] [--seed 0]

Each engine trains the same GPT on two processes. A step sleeps, as if a GPU computed it. Random
processes are killed at the same times after the first step. Ours restarts both ranks from the
newest snapshot (``snapshot_every_n_steps=1``, torchrun). torchft's other replica continues alone,
and a new process replaces the lost one and receives its weights. Lightning's DDP restarts from its
newest checkpoint, one every ten steps (torchrun).

A loss costs the time in which the undisturbed engine would have trained the missing samples. A
step that is done twice, or that torchft discards, counts as lost.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from harness import QUIET, compare, parse_options, report

RANKS, BATCH, CHECKPOINT_EVERY = 2, 4, 10
ENGINES = ("ours", "torchft", "checkpoints")


def module(pause_s: float) -> Any:
    """Return the GPT, whose step sleeps."""
    from lightning_ptdp.models import GPTConfig, LitGPT

    class Sleeping(LitGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(pause_s)
            return super().training_step(batch, batch_idx)

    return Sleeping(
        GPTConfig.gpt2(
            vocabulary_size=512, sequence_length=64, num_layers=4, hidden_size=128, num_heads=4
        )
    )


def note(rank: int, step: int, samples: int) -> None:
    """Append a line: time, step that is complete, and its samples (0: discarded)."""
    with open(f"steps-{rank}.txt", "a", encoding="utf-8") as stream:
        stream.write(f"{time.time()} {step} {samples}\n")


def in_lightning(engine: str, pause_s: float) -> None:
    """Train one rank of torchrun until it is killed."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_ptdp import PTDPStrategy
    from lightning_ptdp.checkpoint import newest_checkpoint

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    Path(f"pid-{rank}").write_text(str(os.getpid()))

    class NoteSteps(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            note(rank, trainer.global_step, RANKS * BATCH)

    ids = torch.arange(64)
    data = [{"input_ids": ids, "labels": ids}] * 10**5
    taking = {"snapshot_every_n_steps": 1, "timeout_s": 30.0}
    ours = engine == "ours"
    saving = ModelCheckpoint("checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_last=True)
    options = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(
        strategy=PTDPStrategy(**taking) if ours else "ddp",
        accelerator="cpu",
        devices=RANKS,
        max_steps=10**5,
        callbacks=[NoteSteps()] if ours else [NoteSteps(), saving],
        **options,
    )
    last = newest_checkpoint(".") if ours else Path("checkpoints/last.ckpt")
    start = str(last) if last is not None and os.path.lexists(last) else None
    trainer.fit(
        module(pause_s), torch.utils.data.DataLoader(data, batch_size=BATCH), ckpt_path=start
    )


def in_torchft(rank: int, lighthouse: str, pause_s: float) -> None:
    """Train one replica until it is killed."""
    import torch
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    inner = module(pause_s)
    inner.configure_model()
    optimizer = torch.optim.AdamW(inner.parameters())

    def load(state: Any) -> None:
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=limit,
    )
    wrapped = OptimizerWrapper(manager, optimizer)
    ids = torch.arange(64).expand(BATCH, -1)
    while True:
        wrapped.zero_grad()
        time.sleep(pause_s)
        logits = inner.model(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        gradients = [parameter.grad for parameter in inner.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()  # torchft 0.2's DDP ends with an assertion after a loss
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        before = manager.current_step()
        wrapped.step()
        committed = manager.current_step() > before
        note(rank, manager.current_step(), manager.num_participants() * BATCH * committed)


@contextlib.contextmanager
def running(engine: str, folder: Path, pause_s: float) -> Iterator[None]:
    """Run an engine in a folder, with a process for each lost one."""
    script = [str(Path(__file__).resolve()), "--pause-s", str(pause_s), "--worker", engine]
    if engine != "torchft":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
        counts = [f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
        with subprocess.Popen(
            [sys.executable, *torchrun, *counts, *script],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=open(folder / "errors.txt", "wb"),
        ) as process:
            yield
            process.terminate()
        return
    from threading import Event, Thread

    from torchft._torchft import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    ended = Event()

    def keep(rank: int) -> None:
        while not ended.is_set():
            with open(folder / f"errors-{rank}.txt", "ab") as errors:
                command = [sys.executable, *script, "--rank", str(rank)]
                command += ["--lighthouse", server.address()]
                subprocess.run(
                    command, cwd=folder, check=False, stdout=subprocess.DEVNULL, stderr=errors
                )

    keepers = [Thread(target=keep, args=(rank,)) for rank in range(RANKS)]
    for keeper in keepers:
        keeper.start()
    yield
    ended.set()
    for rank in range(RANKS):
        kill(folder, rank)
    for keeper in keepers:
        keeper.join()
    server.shutdown()


def kill(folder: Path, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


@dataclass(frozen=True)
class Notes:
    """The notes of every rank: (time, step, samples)."""

    ranks: list[list[tuple[float, int, int]]]

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """Read the files that the ranks of an engine have written."""
        ranks = []
        for rank in range(RANKS):
            lines = (folder / f"steps-{rank}.txt").read_text(encoding="utf-8").splitlines()
            entries = [line.split() for line in lines]
            ranks.append([(float(at), int(step), int(samples)) for at, step, samples in entries])
        return cls(ranks)

    def samples(self, begin: float, end: float) -> int:
        """Return the samples of the steps that became complete for the first time."""
        firsts: dict[int, tuple[float, int]] = {}
        for moment, step, samples in sorted(chain(*self.ranks)):
            if samples:
                first, most = firsts.get(step, (moment, 0))
                firsts[step] = (first, max(most, samples))
        return sum(samples for moment, samples in firsts.values() if begin < moment <= end)

    def repeated(self) -> float:
        """Return the steps that were discarded or done again, in steps of all ranks."""
        again = 0
        for rows in self.ranks:
            highest = 0
            for _, step, samples in rows:
                again += not samples or step <= highest
                highest = max(highest, step)
        return again / RANKS


def measure(engine: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return the seconds and the steps that a loss costs, and the goodput."""
    draw = random.Random(options.seed)
    losses, gap_s = options.losses, options.gap_s
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(engine, folder, options.pause_s):
            begin = time.time()
            while not all((folder / f"steps-{rank}.txt").exists() for rank in range(RANKS)):
                if time.time() > begin + 120:
                    shown = "".join(file.read_text() for file in folder.glob("errors*.txt"))
                    raise SystemExit(f"{engine} does not begin:\n{shown[-3000:]}")
                time.sleep(0.1)
            time.sleep(2.0)
            begin = time.time()
            for _ in range(losses):
                time.sleep(gap_s)
                kill(folder, draw.randrange(RANKS))
            time.sleep(gap_s)
            end = time.time()
            notes = Notes.read(folder)
    rate = notes.samples(begin, begin + gap_s) / gap_s
    trained = notes.samples(begin, end)
    goodput = trained / (rate * (end - begin))
    return (1 - goodput) * (end - begin) / losses, notes.repeated() / losses, goodput


def main() -> None:
    """Measure the engines one after the other, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=4)
    parser.add_argument("--gap-s", type=float, default=25.0, help="between two losses")
    parser.add_argument("--pause-s", type=float, default=0.25, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    options = parse_options(parser, losses=1, gap_s=10.0)
    if options.worker == "torchft":
        in_torchft(options.rank, options.lighthouse, options.pause_s)
    elif options.worker:
        in_lightning(options.worker, options.pause_s)
    if options.worker:
        return
    engines = [name for name in ENGINES if name != "torchft" or importlib.util.find_spec(name)]
    if "torchft" not in engines:
        print("torchft is not installed and left out")
    figures = {}
    for engine in engines:
        seconds, steps, goodput = figures[engine] = measure(engine, options)
        print(f"{engine:<12} {seconds:6.1f} s, {steps:.1f} steps a loss, goodput {goodput:.3f}")
    rows = [
        compare(
            name="time lost by a loss",
            ours=[figures["ours"][0]],
            peer=[max(figures[peer][0], 1e-3)],
            peer_name=f"{peer} ({figures[peer][1]:.1f} steps again, goodput {figures[peer][2]:.2f})",
            unit="s",
        )
        for peer in engines[1:]
    ]
    report(f"Loss of one of two processes every {options.gap_s:g} s", rows)


if __name__ == "__main__":
    main()
