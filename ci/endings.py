#!/usr/bin/env python
"""Endings of a training during a background save, with a count of lost checkpoints.

    python ci/endings.py --runs 200

Every run begins a save (``async_save=True``, slowed down). It ends during the save or just after
the save has begun. The cases combine:

- the way to end: return, ``sys.exit``, an exception, SIGTERM or one Ctrl-C;
- the place: in the middle of fit, in its last hooks, or after it;
- the ranks that end: all or one;
- the launcher: one process, or two ranks started by torchrun, Lightning's scripts, fork or spawn.

The exit code is 1 if a save that had begun is incomplete afterwards, or if a run hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptdp.callbacks import SaveOnSignal
from lightning_ptdp.checkpoint import CheckpointError, background, verify_checkpoint
from lightning_ptdp.strategy import PTDPStrategy

LAUNCHERS = ("one", "ranks", "fork", "popen", "torchrun", "spawn")
WAYS = ("return", "exit", "exception", "SIGTERM", "Ctrl-C", "Ctrl-C to one")
HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_train_end", "after fit")
_SLOW_S = 0.4
_JOINED_S = 300  # starting takes minutes on a machine with many busy processes
_BEGUN = "begun.txt"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        launcher: "one": a single process; "ranks": two ranks with environment variables like
            torchrun's; otherwise the start method of two ranks.
        way: Way in which the run ends.
        hook: Hook in which the run ends.
        on_ranks: Ranks that end, for the ways "exit" and "exception"; the first one receives a
            signal to a single rank.
        saves: Whether the callback ``SaveOnSignal`` is used.
    """

    launcher: str
    way: str
    hook: str
    on_ranks: tuple[int, ...] = (0, 1)
    saves: bool = False


class Ending(Exception):
    """An error in the user's code."""


class Ends(pl.Callback):
    """Callback that begins a save in the hook of the case and ends the run."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._at("on_train_batch_end", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            self._at("on_train_epoch_end", trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._at("on_train_end", trainer)

    def _at(self, hook: str, trainer: pl.Trainer) -> None:
        if hook == self._case.hook:
            end(self._case, trainer, self._folder)


def end(case: Case, trainer: pl.Trainer, folder: Path) -> None:
    """Save, record that the save has begun, and end the run."""
    trainer.save_checkpoint(folder / "begun.ckpt")
    if trainer.is_global_zero:
        (folder / _BEGUN).write_text("begun.ckpt")
    chosen = trainer.global_rank in case.on_ranks
    if case.way == "exit" and chosen:
        sys.exit(3)
    if case.way == "exception" and chosen:
        raise Ending
    if case.way == "SIGTERM" and trainer.global_rank == case.on_ranks[0]:
        os.kill(os.getpid(), signal.SIGTERM)
    if case.way == "Ctrl-C to one" and trainer.global_rank == case.on_ranks[0]:
        os.kill(os.getpid(), signal.SIGINT)
    if case.way == "Ctrl-C" and trainer.is_global_zero:  # like a terminal
        os.kill(os.getppid(), signal.SIGINT) if case.launcher == "torchrun" else os.killpg(
            0, signal.SIGINT
        )


def train(case: Case, folder: Path) -> None:
    """Train like a user's script."""
    write = background.save_rectangles

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(_SLOW_S)
        write(*args, **kwargs)

    background.save_rectangles = slow
    pl.seed_everything(1, verbose=False)
    two = case.launcher != "one"
    layout: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2} if two else {}
    if case.launcher in ("fork", "spawn", "popen"):
        layout["start_method"] = case.launcher
    trainer = pl.Trainer(
        strategy=PTDPStrategy(**layout, async_save=True, timeout_s=_JOINED_S),
        accelerator="cpu",
        devices=2 if two else 1,
        max_epochs=3,
        callbacks=[*([SaveOnSignal()] if case.saves else []), Ends(case, folder)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4))
    if case.hook == "after fit" and case.launcher not in ("fork", "spawn"):
        end(case, trainer, folder)


class Lit(pl.LightningModule):
    """A module with four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def cases(launchers: Sequence[str], seed: int) -> Iterator[Case]:
    """Yield cases forever, with every launcher, way and hook equally often."""
    draw = random.Random(seed)
    while True:
        for way, hook in draw.sample(list(itertools.product(WAYS, HOOKS)), len(WAYS) * len(HOOKS)):
            launcher = draw.choice(launchers)
            if hook == "after fit" and launcher in ("fork", "spawn"):
                hook = "on_train_end"
            on_ranks = draw.choice([(0, 1), (0,), (1,)]) if launcher != "one" else (0,)
            yield Case(
                launcher=launcher, way=way, hook=hook, on_ranks=on_ranks, saves=draw.random() < 0.5
            )


def begin(case: Case, folder: Path, environment: dict[str, str]) -> int:
    """Fork a process that trains and then ends like a Python process.

    The forked process does not repeat the imports of this process."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    gc.freeze()  # to collect the imported objects at exit takes longer than the training
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(folder / f"output-{environment.get('RANK', 0)}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [__file__, "--only", json.dumps(asdict(case)), str(folder)]
    if case.launcher == "torchrun":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            f"--master-port={free_port()}",
            *sys.argv,
        ]
        os.execv(sys.executable, command)
    torch.set_num_threads(1)
    train(case, folder)
    sys.exit()


def run(case: Case, folder: Path, limit_s: float) -> str:
    """Run a case and return the fault, or "". A run of more than ``limit_s`` seconds is a hang."""
    environments: list[dict[str, str]] = [{}]
    if case.launcher == "ranks":
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "GROUP_RANK": "0",
        }
        common |= {"TORCHELASTIC_RUN_ID": "endings", "LOCAL_WORLD_SIZE": "2"}
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [begin(case, folder, environment) for environment in environments]
    deadline, left = time.monotonic() + limit_s, set(processes)
    while left and time.monotonic() < deadline:
        left -= {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.02)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    for process in left:
        os.waitpid(process, 0)
    if left:
        return "it hangs"
    if not (folder / _BEGUN).exists():
        return "it ended before the save"
    try:
        verify_checkpoint(folder / (folder / _BEGUN).read_text())
    except CheckpointError as error:
        return f"LOST: {error}"
    return ""


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Run the cases and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--launchers",
        nargs="+",
        default=["one", "ranks", "fork"] * 8 + ["popen", "torchrun", "spawn"],
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=150.0,
        help="of a run; on a busy machine an import alone may take a minute",
    )
    parser.add_argument(
        "--only", nargs=2, metavar=("CASE", "FOLDER"), help="one case, in this process"
    )
    options = parser.parse_args()
    if options.only:
        train(Case(**json.loads(options.only[0])), Path(options.only[1]))
        return 0
    wrong, began, here = 0, time.monotonic(), os.getpid()
    for number, case in enumerate(
        itertools.islice(cases(options.launchers, options.seed), options.runs)
    ):
        folder = Path(tempfile.mkdtemp(prefix="endings-"))
        try:
            what = run(case, folder, options.limit_s)
            if what:
                wrong += 1
                print(f"{number}: {case}: {what}")
                for file in sorted(folder.glob("output-*")):
                    print(file.read_text(errors="replace")[-3000:])
            sys.stdout.flush()
        finally:
            if os.getpid() == here:  # forked processes leave by the same path
                shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.runs} runs in {time.monotonic() - began:.0f} s: {wrong} lost or hung")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
