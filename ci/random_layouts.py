"""Random layouts and options, each compared with one process.

::

    python ci/random_layouts.py --seed 7 --limit-s 600

A layout must give the same losses, norms and weights as one process, or be refused by name. The
tests cover a fixed grid and vary one option at a time. This program combines options. The exit code
is 1 if an answer differs, or if an error is not a user error. Refusals are listed for review.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_ptdp.world.layout import Sharding
from tests.parity import assert_same, fit
from tests.pool import Pool, WorkerFailure
from tests.tiny_gpt import Run

SCHEDULES = {
    1: ("gpipe", "1f1b", "zb_h1"),
    2: ("interleaved_1f1b", "zb_v", "dualpipe_v"),
    3: ("interleaved_1f1b",),
}
Draw = random.Random


def draw_run(draw: Draw) -> Run:
    """Draw a run on two to eight processes."""
    while True:
        t, p, c, d = (draw.choice((1, 1, 2, 2, 4)) for _ in range(4))
        if 1 < t * p * c * d <= 8:
            break
    m = draw.randrange(1, 7) if p > 1 else draw.choice((1, 1, 2, 3))
    v = draw.choice((1, 1, 2, 2, 3)) if p > 1 else 1
    layout: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_size": v,
        "context_parallel_size": c,
        "num_microbatches": m,
        "bucket_mb": draw.choice((1e-3, 1e-2, None)),
    }
    if p > 1:
        layout["schedule"] = draw.choice(SCHEDULES[v])
    layout |= _tensor_options(draw) if t > 1 else {}
    layout |= _replica_options(draw, d) if d > 1 else {}
    layout |= _recomputation(draw, t)
    if c > 1:
        layout["context_parallel_attention"] = draw.choice(("ring", "all_to_all"))
    experts = 4 if draw.random() < 0.3 else None
    if experts is not None:
        layout["expert_parallel_size"] = draw.choice([e for e in (1, 2, 4) if c * d % e == 0])
    run = Run(
        world_size=t * p * c * d,
        layout=layout,
        layers=draw.randrange(p * v, p * v + 6) if p > 1 else draw.randrange(1, 5),
        llama=experts is not None or draw.random() < 0.4,
        experts=experts,
        precision="32-true"
        if experts is None
        else "64-true",  # in float32, rounding would decide the choice of experts
        accumulate=draw.choice((1, 1, 2, 3)),
        clip=draw.choice((None, 0.05)),
        global_batch=d * m * draw.choice((1, 1, 2, 3)),
        count_tokens=draw.random() < 0.8,
        validate_every=draw.choice((None, None, 1, 2)),
    )
    # All replicas receive the same number of samples, with some repeated. One process has a shorter
    # last batch instead.
    samples = (
        draw.choice((29, 3 * run.global_batch))
        if d == 1 and run.count_tokens
        else 3 * run.global_batch
    )
    run = replace(
        run,
        samples=max(samples, run.global_batch),
        steps=run.accumulate * draw.choice((3, 4)),
        ignore_padding=run.count_tokens,
    )
    if c == 1 and draw.random() < 0.25:
        return replace(run, layout={**layout, "keyed_dropout": True}, dropout=0.2)
    return replace(run, changing_lengths=c == 1 and draw.random() < 0.2)


def _tensor_options(draw: Draw) -> dict[str, Any]:
    return {"sequence_parallel": draw.random() < 0.5, "scatter_gather": draw.random() < 0.7}


def _replica_options(draw: Draw, d: int) -> dict[str, Any]:
    return {
        "shard": draw.choice(get_args(Sharding)),
        "overlap_parameter_gather": draw.choice((True, False)),
        "data_parallel_replicas": draw.choice((1, 1, 2, d)),
    }


def _recomputation(draw: Draw, t: int) -> dict[str, Any]:
    policy = draw.choice(("none", "none", "full", "selective"))
    options: dict[str, Any] = {"recompute": policy}
    if policy != "none" and draw.random() < 0.3:
        options["recompute_layers"] = draw.randrange(3)
    if policy == "full" and t > 1:
        options["distribute_saved_activations"] = draw.random() < 0.5
    return options


def compare(pool: Pool, run: Run) -> str | None:
    """Train in the layout and in one process, and return the refusal, if any.

    Raises:
        AssertionError: An answer differs, or a process failed.
    """
    try:
        ranks = pool.run(fit, world_size=run.world_size, args=(run,))
    except WorkerFailure as failure:
        refusals = [line for line in str(failure).splitlines() if line.startswith("ValueError: ")]
        if not refusals:
            raise
        return refusals[-1].removeprefix("ValueError: ")
    keyed = {"keyed_dropout": True} if run.dropout else {}
    expected = pool.run(fit, world_size=1, args=(replace(run, world_size=1, layout=keyed),))[0]
    for found in ranks:
        # Biases start at zero, and AdamW amplifies rounding errors of small values.
        assert_same(found, expected, tolerance=3e-5, weight_tolerance=5e-4)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0)
    options = parser.parse_args()
    draw, deadline = random.Random(options.seed), time.monotonic() + options.limit_s
    refused: Counter[str] = Counter()
    equal = different = 0
    with contextlib.closing(Pool()) as pool:
        while time.monotonic() < deadline:
            run = draw_run(draw)
            try:
                refusal = compare(pool, run)
            except AssertionError as error:
                different += 1
                print(f"different: {run}\n{str(error)[-2000:]}", flush=True)
                continue
            if refusal is None:
                equal += 1
            else:
                refused[refusal] += 1
    for refusal, count in refused.most_common():
        print(f"refused {count} times: {refusal}")
    print(f"{equal} layouts equal to one process, {refused.total()} refused, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
