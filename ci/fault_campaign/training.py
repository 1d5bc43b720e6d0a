"""Training of a tiny GPT in one process of the fault campaign, from the start or a checkpoint."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fault_campaign.kinds import Trap, set_trap
from lightning_ptdp.checkpoint import checksums, memory_folders
from lightning_ptdp.data.loader import TokenLoader
from lightning_ptdp.data.stream import SampleStream
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.strategy import PTDPStrategy, rendezvous

__all__ = [
    "LAYOUTS",
    "SAVE_EVERY",
    "Attempt",
    "enter_node",
    "nodes_of",
    "train_rank",
    "world_size_of",
]

SAVE_EVERY, _VALIDATE_EVERY = 3, 2
_VOCABULARY, _LENGTH, _SAMPLES, _BATCH = 64, 16, 48, 8
_PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 4}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "d2": (2, {}),
    "p2": (2, _PIPELINE),
    "t2": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "d2 ZeRO": (2, {"shard": "optimizer"}),
    "e2": (2, {"expert_parallel_size": 2}),
    "c2": (2, {"context_parallel_size": 2}),
    "p2 v2": (2, {**_PIPELINE, "virtual_pipeline_size": 2}),
    "p2 d2 ZeRO": (4, {**_PIPELINE, "num_microbatches": 2, "shard": "optimizer"}),
    "d2 nodes": (2, {}),
    "t2 d2 nodes": (4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "c2 d2 nodes": (4, {"context_parallel_size": 2}),
}
_NODES = 2
_MEMORY = Path("/proc/self/cwd/shm")  # the same path on every node, another folder on each


def world_size_of(layout: str) -> int:
    """Return the number of processes of a layout."""
    return LAYOUTS[layout][0]


def nodes_of(layout: str) -> int:
    """Return the number of nodes of a layout."""
    return _NODES if layout.endswith("nodes") else 1


def enter_node(folder: Path, node: int, *, nodes: int = _NODES) -> None:
    """Let this process have the memory folder of a node; of one node, the machine's own."""
    memory_folders._ROOT = Path("/dev/shm")
    if nodes > 1:
        home = folder / f"node{node}"
        (home / "shm").mkdir(parents=True, exist_ok=True)
        os.chdir(home)
        memory_folders._ROOT = _MEMORY


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt, from the start of all ranks to their end.

    Attributes:
        layout: A key of ``LAYOUTS``.
        folder: Folder of the checkpoints.
        nodes: Folder in which each node has a folder instead of /dev/shm.
        resume: Checkpoint to continue from; None: start from the beginning.
        steps: Number of optimizer steps of the whole training.
        timeout_s: Option of the strategy.
        async_save: Option of the strategy. If True, writing is slowed down so that training
            continues during the save.
        snapshots: Whether the strategy takes a snapshot after every step.
        trap: Trap that loses one rank.
        clocks: By rank, seconds by which its clock is ahead, like the clock of another machine.
        environment: By rank, environment variables that torchrun, SLURM or Lightning would set.
    """

    layout: str
    folder: Path
    nodes: Path
    resume: Path | None
    steps: int
    timeout_s: float
    async_save: bool
    snapshots: bool
    trap: Trap | None
    clocks: Sequence[float]
    environment: Sequence[Mapping[str, str]]


class Tokens(SampleStream):
    """Stream of random tokens that are the same in every process."""

    def __init__(self) -> None:
        super().__init__(
            samples=_SAMPLES, sequence_length=_LENGTH, max_samples=None, fingerprint="random tokens"
        )
        self._rows = np.random.default_rng(7).integers(0, _VOCABULARY, (_SAMPLES, _LENGTH + 1))

    def __getitems__(self, visits: Sequence[int]) -> np.ndarray:
        return self._rows[np.asarray(visits) % _SAMPLES]

    def as_batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        tokens_bs = torch.from_numpy(rows)
        return {
            "input_ids": tokens_bs[:, :-1].contiguous(),
            "labels": tokens_bs[:, 1:].contiguous(),
        }


class _Tells(pl.Callback):
    """Callback that reports the progress of this rank to the campaign."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._tell("step", trainer.global_step)


def train_rank(rank: int, attempt: Attempt, pipe: Connection, log: Path) -> None:
    """Train as rank ``rank``.

    The rank reports, with times of ``time.monotonic``:

    - ("began", time) before it contacts the other ranks;
    - ("met", time) when rank 0 has answered it, or when it is rank 0 and begins to answer;
    - ("step", number) at each step;
    - ("finished", time) after training;
    - finally ("weights", digest) or ("error", (text, time))."""
    # Otherwise the kernel wakes a stopped rank when the shell that started the campaign ends.
    os.setsid()
    # Output, also from torch's C++ code, is shown only if the campaign finds a fault.
    with open(log, "wb", buffering=0) as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR2)
    warnings.simplefilter("ignore")
    os.environ.update(attempt.environment[rank])
    torch.set_num_threads(1)
    clock = time.time
    time.time = lambda: clock() + attempt.clocks[rank]
    try:
        _train(rank, attempt, lambda name, value: pipe.send((name, value)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", ("".join(traceback.format_exception_only(error)), time.monotonic())))
        sys.exit(1)


def _train(rank: int, attempt: Attempt, tell: Callable[[str, Any], None]) -> None:
    callbacks: list[pl.Callback] = [_Tells(tell)]
    _tell_of_meeting(tell)
    if attempt.async_save:
        _write_slowly()
    if attempt.trap is not None and attempt.trap.victim == rank:
        callbacks.append(set_trap(attempt.trap))
    world_size, options = LAYOUTS[attempt.layout]
    num_nodes = nodes_of(attempt.layout)
    if num_nodes > 1:
        enter_node(attempt.nodes, rank * num_nodes // world_size)
    pl.seed_everything(3, verbose=False)
    strategy = PTDPStrategy(
        **options,
        checkpoint_format="folder",  # also where one process holds the whole model
        timeout_s=attempt.timeout_s,
        async_save=attempt.async_save,
        snapshot_every_n_steps=1 if attempt.snapshots else None,
    )
    saving = {
        "every_n_train_steps": SAVE_EVERY,
        "save_top_k": 2,
        "monitor": "step",
        "mode": "max",
        "save_last": True,
    }
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size // num_nodes,
        num_nodes=num_nodes,
        max_steps=attempt.steps,
        val_check_interval=_VALIDATE_EVERY,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        callbacks=[*callbacks, ModelCheckpoint(attempt.folder, filename="{step}", **saving)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sizes = {
        "vocabulary_size": _VOCABULARY,
        "sequence_length": _LENGTH,
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
    }
    experts = (
        {"num_experts": 4, "mlp": "swiglu", "bias": False}
        if "expert_parallel_size" in options
        else {}
    )
    module = LitGPT(
        GPTConfig.gpt2(**sizes, **experts, dropout=0.1),
        AdamWConfig(learning_rate=5e-3, warmup_steps=5, decay_steps=100),
    )
    place = strategy.distributed_sampler_kwargs
    loaders = [
        TokenLoader(
            Tokens(),
            batch_size=_BATCH // place["num_replicas"],
            num_replicas=place["num_replicas"],
            replica_rank=place["rank"],
        )
        for _ in range(2)
    ]
    tell("began", time.monotonic())
    trainer.fit(module, *loaders, ckpt_path=attempt.resume)
    tell("finished", time.monotonic())
    tell("weights", _digest(strategy.gather_state_dict()))


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tell_of_meeting(tell: Callable[[str, Any], None]) -> None:
    meet = rendezvous._meet

    def told(*args: Any) -> None:
        tell("met", time.monotonic())
        meet(*args)

    rendezvous._meet = told


def _write_slowly() -> None:
    file: Any = checksums.SummingFile
    write = file.write

    def slow(*args: Any) -> None:
        time.sleep(0.001)
        write(*args)

    file.write = slow
