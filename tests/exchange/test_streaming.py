"""Memory of conversions, which hold a few tensors at a time, measured in a separate process."""

import json
import math
import threading
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from lightning_ptdp.checkpoint import (
    LocalRectangle,
    read_metadata,
    reshard_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.save import write_checkpoint
from lightning_ptdp.exchange import FAMILIES, convert
from lightning_ptdp.exchange.name_tables import Model
from lightning_ptdp.models import GPTConfig
from tests.pool import in_new_process

pytestmark = pytest.mark.thorough

CONFIG = GPTConfig.gpt2(
    vocabulary_size=512, sequence_length=32, num_layers=16, hidden_size=512, num_heads=8
)
LARGEST = 4 * CONFIG.hidden_size**2 * 4
# In each thread: tensors read, transposed and written, and as many again. Then the memory of Python
# and torch themselves.
THREADS = {"reshard": 2}
LIMITS = {threads: threads * 8 * LARGEST + 24 * 2**20 for threads in (1, 2)}


def _write(path):
    """Write a checkpoint whose values are created when they are written."""
    gpt2 = Model(FAMILIES[0], CONFIG)
    rectangles = [
        LocalRectangle(
            name=f"model/model.{name}",
            full_shape=shape,
            offset=(0,) * len(shape),
            values=torch.empty(shape, device="meta"),
            read=lambda offset, shape: torch.full(shape, float(sum(offset))),
        )
        for name, shape in gpt2.shapes().items()
    ]
    state = {"hyper_parameters": {"config": asdict(CONFIG)}}
    write_checkpoint(
        path,
        rectangles=rectangles,
        state=state,
        metadata={"aliases": {"model.head.weight": "model.wte.weight"}},
    )


def _anonymous_bytes():
    """Return this process's anonymous memory, which excludes pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) * 1024


@contextmanager
def _peak(peaks, name):
    """Record the peak memory of the block, less the memory before it.

    A model that is held in memory shows in hundreds of samples.
    """
    before, done = _anonymous_bytes(), threading.Event()
    peaks[name] = 0

    def sample():
        while not done.wait(0.002):
            peaks[name] = max(peaks[name], _anonymous_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        peaks[name] = max(peaks[name], _anonymous_bytes() - before)
        done.set()
        thread.join()


def measure(root):
    """Write the peaks of all conversions as JSON."""
    assert transformers.GPT2LMHeadModel, "imports are not part of a conversion"
    peaks = {}
    steps = {
        "write": lambda: _write(root / "ours"),
        "to Hugging Face": lambda: convert(root / "ours", root / "hf", shard_bytes=40_000_000),
        "from Hugging Face": lambda: convert(root / "hf", root / "back"),
        "reshard": lambda: reshard_checkpoint(
            root / "ours", root / "two", num_files=THREADS["reshard"], dtype=torch.bfloat16
        ),
        "to safetensors": lambda: convert(root / "ours", root / "x.safetensors", prefix="model."),
        "from safetensors": lambda: convert(
            root / "x.safetensors", root / "again", prefix="model."
        ),
        "verify": lambda: verify_checkpoint(root / "back"),
    }
    for name, step in steps.items():
        with _peak(peaks, name):
            step()
    (root / "peaks.json").write_text(json.dumps(peaks))


def test_memory_of_conversions(tmp_path):
    assert in_new_process(partial(measure, tmp_path)) == 0
    peaks = json.loads((tmp_path / "peaks.json").read_text())
    tensors = read_metadata(tmp_path / "back").tensors.values()
    size = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in tensors)
    assert size > 200_000_000 > 2 * max(LIMITS.values())
    assert max(math.prod(entry.shape) * entry.dtype.itemsize for entry in tensors) == LARGEST
    assert {name: peak for name, peak in peaks.items() if peak > LIMITS[THREADS.get(name, 1)]} == {}
