"""The planner's expectation of a step on this machine, beside the step: seconds and bytes of
layouts of two GPTs and a Llama.

Run: python ci/benchmarks/planner.py [--steps 4] [--only a]

First ``ptdp doctor --calibrate`` for 1, 2 and 4 processes, then ``ptdp bench`` of each layout with
what that measured; nine minutes on two cores that do nothing else. "ours" is what was expected and
"peer" what was measured, so that 1 is right."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import TINY_TEXT, Comparison, parse_options, report, run_ptdp

from lightning_ptdp.doctor import calibration

LENGTH = 256
T, P, SP = (
    f"--trainer.strategy.{name}"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel")
)
MODELS = {  # a recipe, h, l, heads, samples of a microbatch
    "a": ("gpt/nano", 256, 6, 8, 4),
    "b": ("gpt/nano", 512, 8, 8, 2),
    "c": ("gpt/llama-nano", 384, 6, 6, 4),
}
LAYOUTS: dict[str, tuple[int, int, dict[str, int]]] = {  # processes, microbatches, degrees
    "one": (1, 4, {}),
    "t2": (2, 4, {T: 2}),
    "p2": (2, 4, {P: 2}),
    "d2": (2, 2, {}),
    "t2 p2": (4, 4, {T: 2, P: 2}),
    "p2 d2": (4, 2, {P: 2}),
}


def bench(model: str, layout: str, steps: int, folder: Path, more: list[str]) -> dict[str, Any]:
    recipe, h, layers, heads, samples = MODELS[model]
    devices, microbatches, degrees = LAYOUTS[layout]
    options: dict[str, object] = {
        "--warmup": 1,
        "--steps": steps,
        "--trainer.devices": devices,
        "--model.config.hidden_size": h,
        "--model.config.num_layers": layers,
        "--model.config.num_heads": heads,
        "--model.config.sequence_length": LENGTH,
        "--data.sequence_length": LENGTH,
        "--data.micro_batch_size": samples,
        "--data.num_microbatches": microbatches,
        "--trainer.strategy.num_microbatches": microbatches,
        "--trainer.strategy.virtual_pipeline_size": 1,
        T: 1,
        P: 1,
    }
    if T not in degrees:
        options[SP] = "false"
    given = [word for pair in (options | degrees).items() for word in pair]
    words = ["bench", "--config", recipe, "--json", *given, *more]
    (result,) = json.loads(run_ptdp(words, folder))
    return dict(result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="abc", help="models (default abc)")
    given = parse_options(parser, steps=1, only="a")
    if given.smoke:
        calibration._ROUNDS, calibration._BUDGET_S = 1, 0.0
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folders = {
            devices: Path(root, str(devices)) for devices in ((1,) if given.smoke else (1, 2, 4))
        }
        for devices, folder in folders.items():
            folder.mkdir()
            run_ptdp(["doctor", "--calibrate", "--devices", devices], folder)
        for model in given.only:
            for layout, (devices, *_) in LAYOUTS.items():
                if devices not in folders:
                    continue
                more = TINY_TEXT if given.smoke else []
                found = bench(model, layout, given.steps, folders[devices], more)
                figures = (
                    ("time", found["predicted_s"], found["median_s"], "s"),
                    ("memory", found["predicted_bytes"], max(found["peak_memory_bytes"]), "bytes"),
                )
                for what, expected, measured, unit in figures:
                    name = f"{model} {layout}, {what}"
                    ratio = expected / measured
                    row = Comparison(
                        name=name,
                        ours=expected,
                        peer=measured,
                        peer_name="measured",
                        ratio=ratio,
                        unit=unit,
                    )
                    rows.append(row)
    report("What the planner expects, beside what is measured", rows)


if __name__ == "__main__":
    main()
