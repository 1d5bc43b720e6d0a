"""Time from the start of a script to the end of its first training step, with four processes.

    python ci/benchmarks/start.py [--rounds 5] [--ranks 4] [--starts popen fork]

The script trains a small GPT; ours beside Lightning's DDPStrategy, each with processes that run the
script again (popen) and with forked ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Comparison, compare, parse_options, report

SCRIPT = """
import sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as L
import torch
from lightning_ptdp import PTDPStrategy
from lightning_ptdp.models import GPTConfig, LitGPT

ours, start, ranks = sys.argv[1] == "ours", sys.argv[2], int(sys.argv[3])
if ours:
    strategy = PTDPStrategy(start_method=start)
else:
    strategy = "ddp" if start == "popen" else "ddp_fork"
config = GPTConfig.gpt2(
    vocabulary_size=256, sequence_length=32, num_layers=4, hidden_size=64, num_heads=4
)
ids = torch.arange(32)
data = torch.utils.data.DataLoader([{"input_ids": ids, "labels": ids}] * 4 * ranks, batch_size=4)
trainer = L.Trainer(
    strategy=strategy, accelerator="cpu", devices=ranks, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(LitGPT(config), data)
"""


def seconds(script: Path, engine: str, start: str, ranks: int) -> float:
    """Run the script once."""
    began = time.perf_counter()
    command = [sys.executable, str(script), engine, start, str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def row(script: Path, start: str, options: argparse.Namespace) -> Comparison:
    """Alternate the engines."""
    times: dict[str, list[float]] = {"ours": [], "DDPStrategy": []}
    for _ in range(options.rounds):
        for engine, taken in times.items():
            taken.append(seconds(script, engine, start, options.ranks))
    return compare(
        name=f"script with one step, {options.ranks} processes, {start}",
        ours=times["ours"],
        peer=times["DDPStrategy"],
        peer_name="DDPStrategy",
        unit="s",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--starts", nargs="+", default=["popen", "fork"])
    options = parse_options(parser, rounds=1, ranks=2, starts=["popen"])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        report("Start", [row(script, start, options) for start in options.starts])


if __name__ == "__main__":
    main()
