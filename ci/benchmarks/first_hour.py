"""The first hour on a machine with GPUs: what only hardware can show, as one JSON file and one page.

Run: python ci/benchmarks/gpu.py --first-hour FOLDER [--budget 520]

Every part runs in a process of its own with a time limit, so that one that hangs costs only itself:

- *layouts*: each layout that fits the GPUs trains a small GPT in float32. The losses are compared
  with those of a CPU, and the time and the memory of setting the groups up are noted.
- *waits*: where the host waits for the GPU in steady steps (``torch.cuda.set_sync_debug_mode``). A
  wait inside a schedule is an error.
- *saves*: a checkpoint of GPT-2 355M beside ``torch.save`` of the same state.

Then ``gpu.py`` measures its models with the rest of the budget. Without a GPU the parts run on the
CPU with one device, and no figure means anything."""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[2]))

import lightning.pytorch as L
import torch
from gpu_engines import RATE
from harness import QUIET
from turns import Same

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import AdamWConfig, GPTConfig, LitGPT
from lightning_ptdp.pipeline.program_observers import StepObserver
from lightning_ptdp.schedule import Schedule

__all__ = ["PARTS", "first_hour", "page", "run", "write"]

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one, m4": {"num_microbatches": 4},
    "one, m4, recomputed": {"num_microbatches": 4, "recompute": "full"},
    "d2": {"devices": 2},
    "d2, ZeRO-1": {"devices": 2, "shard": "optimizer"},
    "t2": {"devices": 2, "tensor_parallel_size": 2},
    "t2, sequence": {"devices": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "c2": {"devices": 2, "context_parallel_size": 2},
    **{
        f"p2, {name}": {"devices": 2, "pipeline_parallel_size": 2, "num_microbatches": 4, **options}
        for name, options in {
            "1F1B": {},
            "GPipe": {"schedule": "gpipe"},
            "interleaved": {"virtual_pipeline_size": 2},
            "ZB-H1": {"schedule": "zb_h1"},
            "ZB-V": {"schedule": "zb_v", "virtual_pipeline_size": 2},
            "DualPipeV": {"schedule": "dualpipe_v", "virtual_pipeline_size": 2},
        }.items()
    },
    "t2 p2": {
        "devices": 4,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "num_microbatches": 4,
    },
}
STEPS, STEADY = 6, 10
Part = Callable[[str, bool], Mapping[str, Any]]


def config(*, small: bool) -> GPTConfig:
    """A GPT of four layers, or the 355M one."""
    sizes = (
        {"num_layers": 4, "hidden_size": 64, "num_heads": 4}
        if small
        else {"num_layers": 24, "hidden_size": 1024, "num_heads": 16}
    )
    vocabulary, length = (512, 64) if small else (50257, 1024)
    return GPTConfig.gpt2(vocabulary_size=vocabulary, sequence_length=length, **sizes)


def train(
    strategy: PTDPStrategy,
    callback: L.Callback,
    *,
    on_gpu: bool,
    devices: int = 1,
    steps: int = STEPS,
    **trainer: Any,
) -> L.Trainer:
    """Train the small GPT on the same 16 samples in every step."""
    L.seed_everything(1, verbose=False)
    shape, drawn = (16, 65), torch.Generator().manual_seed(1)
    ids = torch.randint(512, shape, generator=drawn)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    fitting = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices,
        max_steps=steps,
        callbacks=[callback],
        **QUIET,
        **{"precision": "32-true", **trainer},
    )
    adamw = AdamWConfig(learning_rate=10 * RATE, decay_steps=10**6)
    fitting.fit(
        LitGPT(config(small=True), adamw),
        torch.utils.data.DataLoader(Same(batch), batch_size=None),
    )
    return fitting


class Losses(L.Callback):
    """Losses of the steps; seconds and memory before the first one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._began, self.setup_s, self.outside_mib = time.perf_counter(), 0.0, 0.0

    def on_train_start(self, *_: Any) -> None:
        self.setup_s = time.perf_counter() - self._began
        if torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()
            self.outside_mib = (total - free - torch.cuda.memory_reserved()) / 2**20

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def layouts(name: str, on_gpu: bool) -> Mapping[str, Any]:
    """Train in one layout, and on one process of a CPU."""
    options = dict(LAYOUTS[name])
    devices = options.pop("devices", 1)
    found = Losses()
    trainer = train(PTDPStrategy(**options), found, on_gpu=on_gpu, devices=devices)
    if not trainer.is_global_zero:
        return {}
    return {
        "losses": found.losses,
        "setup_s": round(found.setup_s, 2),
        "memory outside of torch, MiB": round(found.outside_mib),
    }


def waits(name: str, on_gpu: bool) -> Mapping[str, Any]:
    """Count the host's waits in steady steps, by the line that waits."""
    options = {"num_microbatches": 4} if name == "m4" else {}
    places: collections.Counter[str] = collections.Counter()

    def note(message: Any, *_: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if f"{os.sep}torch{os.sep}" not in f[0]]
            frame = frames[-3] if len(frames) > 2 else frames[-1]
            places[f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"] += 1

    class Steady(L.Callback, StepObserver):
        steady = False

        def on_train_batch_start(
            self, trainer: L.Trainer, module: Any, batch: Any, at: int
        ) -> None:
            if at in (3, 3 + STEADY):
                self.steady = at == 3
                self._react("warn" if self.steady else "default")
            if at == 3:
                trainer.strategy.observers.add(self)

        def began(self, schedule: Schedule) -> None:
            self._react("error")  # stops the run at a wait between the actions of a schedule

        def ended(self) -> None:
            self._react("warn")

        def _react(self, mode: str) -> None:
            if on_gpu and (self.steady or mode == "default"):
                torch.cuda.set_sync_debug_mode(mode)

    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        train(
            PTDPStrategy(**options),
            Steady(),
            on_gpu=on_gpu,
            steps=4 + STEADY,
            precision="bf16-mixed",
        )
    return {"in steps": STEADY, "places": dict(places.most_common())}


def saves(name: str, on_gpu: bool) -> Mapping[str, Any]:
    """Save a model and its optimizer, beside ``torch.save``."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=PTDPStrategy(checkpoint_format=name),  # type: ignore[arg-type]
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            max_steps=1,
            **QUIET,
        )
        sizes = config(small=not on_gpu)
        ids = torch.randint(512, (2, sizes.sequence_length))
        data = torch.utils.data.DataLoader(Same({"input_ids": ids, "labels": ids}), batch_size=None)
        module = LitGPT(sizes, AdamWConfig(learning_rate=RATE, decay_steps=10**6))
        trainer.fit(module, data)
        seconds: dict[str, list[float]] = {"ours": [], "torch.save": []}
        state = [module.state_dict(), trainer.optimizers[0].state_dict()]
        for turn in range(3):
            start = time.perf_counter()
            trainer.save_checkpoint(Path(folder) / f"ours-{turn}.ckpt")
            middle = time.perf_counter()
            torch.save(state, Path(folder) / f"theirs-{turn}.pt")
            seconds["ours"].append(round(middle - start, 3))
            seconds["torch.save"].append(round(time.perf_counter() - middle, 3))
        return {"seconds": seconds}


PARTS: Mapping[str, tuple[Part, tuple[str, ...], float]] = {
    "layouts": (layouts, tuple(LAYOUTS), 90.0),
    "waits": (waits, ("m1", "m4"), 60.0),
    "saves": (saves, ("folder", "file"), 90.0),
}
"""Function, cases, and the limit of each case in seconds."""


def cases(gpus: int) -> Iterator[tuple[str, str, str]]:
    """Yield part, case, and why it cannot run here; "" if it can."""
    for part, (_, names, _) in PARTS.items():
        for name in names:
            needed = LAYOUTS[name].get("devices", 1) if part == "layouts" else 1
            yield part, name, f"needs {needed} GPUs" if needed > max(1, gpus) else ""


def run(part: str, name: str, limit_s: float, *, on_gpu: bool) -> Mapping[str, Any]:
    """Run a case in a process group of its own, which is killed after the limit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, part, name, str(file), *(["--gpu"] if on_gpu else [])]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
            return {"failed": f"over {limit_s:.0f} s", "output": _end(output)}
        if process.returncode or not file.exists():
            return {"failed": f"exit code {process.returncode}", "output": _end(output)}
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _end(output: bytes) -> str:
    return "\n".join(output.decode(errors="replace").splitlines()[-12:])


def first_hour(folder: Path, *, gpus: int, budget_s: float) -> dict[str, Any]:
    """Run all parts, write ``first-hour.json`` and ``first-hour.md`` after each, and return all."""
    end = time.monotonic() + budget_s
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if gpus else "CPU, toy sizes",
        "gpus": gpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    on_cpu = run("layouts", "one, m4", PARTS["layouts"][2], on_gpu=False)
    for part, name, refused in cases(gpus):
        left = min(PARTS[part][2], end - time.monotonic())
        if refused or left < 10:
            one: dict[str, Any] = {"left out": refused or "the budget is spent"}
        else:
            one = dict(run(part, name, left, on_gpu=gpus > 0))
        if "losses" in one and "losses" in on_cpu:
            pairs = zip(one["losses"], on_cpu["losses"], strict=True)
            one["difference from a CPU"] = max(abs(a / b - 1) for a, b in pairs)
        found.setdefault(part, {})[name] = one
        write(folder, found)
        print(f"{part}, {name}: {_brief(one)}", flush=True)
    return found


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Write all that was found so far."""
    (folder / "first-hour.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / "first-hour.md").write_text(page(found), encoding="utf-8")


def _brief(one: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in one.items() if key not in ("losses", "output")}
    return ", ".join(f"{key}: {value}" for key, value in shown.items())


def page(found: Mapping[str, Any]) -> str:
    """Return all that was found as a page: a table for each part."""
    head = f"{found['gpus']} x {found['machine']}, torch {found['torch']}, CUDA {found['cuda']}"
    lines = ["# First hour", "", head]
    for part in PARTS:
        lines += ["", f"## {part.capitalize()}", "", "| case | found |", "|---|---|"]
        lines += [f"| {name} | {_brief(one)} |" for name, one in found.get(part, {}).items()]
    lines += ["", "## Models", "", "| what | ours | peer | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['ours']:.4g} {row['unit']} | {row['peer']:.4g}, {row['peer_name']} | "
        f"{row['ratio']:.3f} |"
        for row in found.get("models", [])
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one case, for ``run``."""
    parser = argparse.ArgumentParser(description="One case of gpu.py --first-hour.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = PARTS[options.part][0](options.name, options.gpu)
    if found:
        options.file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
