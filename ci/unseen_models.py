"""Random Hugging Face architectures, layouts, options and habits, compared with one process.

A run must give the same losses and weights as one process, or be refused in one sentence. The
refusal must come before launch. For a habit, it may come when the module shows the habit.

::

    python ci/unseen_models.py --seed 7 --runs 300
    python ci/unseen_models.py --only falcon --runs 20
    python ci/unseen_models.py --table docs/models.md

A difference, or an error after the checks before launch, is printed with the options that repeat
it. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from marked_table import write_between_marks

from lightning_ptdp.models.plans import FAMILIES, find_plan
from lightning_ptdp.models.plans.families import ENCODER_DECODERS
from lightning_ptdp.verification import VerificationError
from lightning_ptdp.world.layout import Sharding
from tests.huggingface.architectures import ARCHITECTURES, build
from tests.huggingface.hook_mixins import HABITS
from tests.huggingface.round_trip import CIRCLE, differences_around
from tests.huggingface.unseen import Run, refusal, verified
from tests.pool import Pool, WorkerFailure

SCHEDULES = {1: ("gpipe", "1f1b", "zb_h1"), 2: ("interleaved_1f1b", "zb_v", "dualpipe_v")}
COUNTED = ("causal", "masked", "token class")
WHOLE_STATES = ("causal", "masked", "class", "token class", "image")
Draw = random.Random


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        kind: "equal", "refused", "different" or "late" (an error after the checks).
        text: Reason, unless the result is equal.
    """

    kind: str
    text: str = ""


def draw_run(draw: Draw, name: str) -> Run:
    """Draw a run of this architecture on two or four processes."""
    found = ARCHITECTURES[name]
    while True:
        t, p, c, d = (draw.choice((1, 1, 2, 2, 4)) for _ in range(4))
        if 1 < t * p * c * d <= 4:
            break
    if found.task not in COUNTED or draw.random() < 0.5:
        d, c = d * c, 1
    m = draw.choice((1, 2, 2, 4)) if p > 1 else draw.choice((1, 1, 2))
    v = draw.choice((1, 1, 2)) if p == 2 else 1
    layout: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_size": v,
        "context_parallel_size": c,
        "num_microbatches": m,
        "sequence_parallel": t > 1 and draw.random() < 0.4,
        "shard": draw.choice(get_args(Sharding)) if d > 1 else "none",
        "recompute": draw.choice(("none", "none", "full")),
    }
    if p > 1:
        layout["schedule"] = draw.choice(SCHEDULES[v])
    if c > 1:
        layout["context_parallel_attention"] = draw.choice(("ring", "all_to_all"))
    padded = found.task in COUNTED and draw.random() < 0.4
    # Under context parallelism, the loss of a step must be a mean over the labels of its slice. A
    # term over all tokens is not such a mean.
    hidden = found.task in WHOLE_STATES and not padded and c == 1 and draw.random() < 0.2
    options: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
    if found.task in ("causal", "masked") and draw.random() < 0.5:
        options["tie_word_embeddings"] = draw.random() < 0.5
    habit = draw.choice(sorted(HABITS)) if draw.random() < 0.5 else ""
    if habit == "measures" and (padded or c > 1):
        habit = ""  # the habit treats the loss, a mean over labels, as a mean over samples
    accumulate = draw.choice((1, 1, 2)) if not padded else 1
    return Run(
        architecture=name,
        options=options,
        world_size=t * p * c * d,
        layout=layout,
        global_batch=d * m * draw.choice((1, 2)),
        steps=3 * accumulate,
        accumulate=accumulate,
        clip=draw.choice((None, 0.5)),
        padded=padded,
        hidden=hidden,
        eager=draw.random() < 0.3,
        habit=habit,
    )


def compare(pool: Pool, run: Run) -> Outcome:
    """Run the checks, train if nothing is refused, and return the result."""
    try:
        refused = pool.run(refusal, world_size=1, args=(run,))[0]
    except WorkerFailure as failure:
        return Outcome("late", f"in the checks: {_last_line(failure)}")
    if refused is not None:
        return Outcome("refused", refused)
    try:
        report = verified(run)
    except VerificationError as error:
        return Outcome("refused" if run.habit and _is_refusal(error) else "late", str(error))
    return Outcome("equal") if report.equal else Outcome("different", str(report))


def _last_line(failure: WorkerFailure) -> str:
    """Return the most informative error, which is not from a rank that waited for another."""
    lines = [
        line
        for line in str(failure).splitlines()
        if line and line[0].isalpha() and ": " in line and "Error" in line.split(": ")[0]
    ]
    return max(
        lines,
        key=lambda line: ("Connection" not in line, -lines.index(line)),
        default=str(failure)[-500:],
    )


def _is_refusal(error: VerificationError) -> bool:
    """Return True if the strategy refused by name a fault that it can detect only at run time."""
    return any(name in str(error) for name in ("PartialModelError", "MisconfigurationException"))


def draw_runs(seed: int, names: list[str]) -> Iterator[tuple[str, Run]]:
    """Yield (options that repeat the run, run) forever.

    The architectures take turns in a random order."""
    index = 0
    while True:
        order = random.Random(f"{seed} {index // len(names)}").sample(names, len(names))
        yield (
            f"--seed {seed} --skip {index}",
            draw_run(Draw(f"{seed} {index}"), order[index % len(names)]),
        )
        index += 1


# ---- the table -----------------------------------------------------------------------------------


COLUMNS: dict[str, dict[str, Any]] = {
    "d": {},
    "t": {"tensor_parallel_size": 2},
    "t, SP": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "p": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "c": {"context_parallel_size": 2},
}
TABLE = """| model | class | plan | {columns} | folder |
|---|---|---|{rules}|---|
{rows}

{notes}"""


def measure(pool: Pool, names: list[str]) -> dict[str, list[Outcome]]:
    """Return the result of each architecture in each layout of the table."""
    found: dict[str, list[Outcome]] = {}
    for name in names:
        runs = [Run(architecture=name, world_size=2, layout=layout) for layout in COLUMNS.values()]
        found[name] = [compare(pool, run) for run in runs]
        for run, outcome in zip(runs, found[name], strict=True):
            if outcome.kind not in ("equal", "refused"):
                print(f"{outcome.kind}: {run}\n  {outcome.text}", flush=True)
    return found


def around(pool: Pool, names: list[str]) -> dict[str, Outcome]:
    """Return the result of training from one folder to another, for each architecture."""
    found: dict[str, Outcome] = {}
    for name in (name for name in names if name in CIRCLE):
        with tempfile.TemporaryDirectory() as folder:
            unlike = differences_around(pool, name, Path(folder))
        found[name] = Outcome("different", "; ".join(unlike[:3])) if unlike else Outcome("equal")
        print(
            f"{name}, from a folder to a folder: {found[name].kind} {found[name].text}", flush=True
        )
    return found


def table_of(found: dict[str, list[Outcome]], circles: dict[str, Outcome]) -> str:
    """Return a Markdown table of the results."""
    notes: dict[str, int] = {}
    rows = []
    for name, outcomes in found.items():
        cells = ["yes" if outcome.kind == "equal" else outcome.kind for outcome in outcomes]
        for column, outcome in enumerate(outcomes):
            if outcome.kind == "refused":
                cells[column] = f"[{notes.setdefault(_reason(outcome.text, name), len(notes) + 1)}]"
        rows.append(
            f"| {name} | `{ARCHITECTURES[name].model}` | {_plan_of(name)} | {' | '.join(cells)} | "
            f"{_circle(circles.get(name))} |"
        )
    listed = "\n".join(f"{number}. {text}" for text, number in notes.items())
    return TABLE.format(
        columns=" | ".join(COLUMNS),
        rules="|".join("---" for _ in COLUMNS),
        rows="\n".join(rows),
        notes=listed,
    )


def _reason(text: str, name: str) -> str:
    """Return a refusal without the text that all refusals share."""
    for opening in ("cannot run this model: ", "of this model: ", "into pipeline stages: "):
        text = text.partition(opening)[2] or text
    text = text.partition("; or use")[0].partition("; use ")[0].partition(". Use ")[0]
    if "no plan says which modules to shard" in text:
        text = "no plan says which modules to shard"
    return text.replace(ARCHITECTURES[name].model, "the model")


def _circle(outcome: Outcome | None) -> str:
    return "" if outcome is None else "yes" if outcome.kind == "equal" else outcome.kind


def _plan_of(name: str) -> str:
    model = build(name)
    if find_plan(model) is None:
        return "-"
    return (
        "ours"
        if type(model).__module__.split(".")[2] in (*FAMILIES, *ENCODER_DECODERS)
        else "declared"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--runs", type=int, default=None)
    parser.add_argument("--skip", type=int, default=0, help="runs that are drawn but not made")
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted(ARCHITECTURES),
        help="this architecture (may be repeated)",
    )
    parser.add_argument("--table", type=Path, help="write the table of what works into this page")
    options = parser.parse_args()
    names, deadline = options.only or list(ARCHITECTURES), time.monotonic() + options.limit_s
    if options.table is not None:
        with contextlib.closing(Pool()) as pool:
            found, circles = measure(pool, names), around(pool, names)
        write_between_marks(options.table, "unseen_models", table_of(found, circles))
        every = [
            outcome
            for outcomes in (*found.values(), list(circles.values()))
            for outcome in outcomes
        ]
        return int(any(outcome.kind not in ("equal", "refused") for outcome in every))
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    drawn = draw_runs(options.seed, names)
    with contextlib.closing(Pool()) as pool:
        for index, (again, run) in enumerate(drawn):
            if time.monotonic() > deadline or index - options.skip == options.runs:
                break
            if index < options.skip:
                continue
            outcome = compare(pool, run)
            counts[outcome.kind] += 1
            if outcome.kind == "refused":
                refused[outcome.text] += 1
            elif outcome.kind != "equal":
                print(f"{outcome.kind}: {again}: {run}\n  {outcome.text}", flush=True)
    for text, count in refused.most_common():
        print(f"refused {count} times: {text}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["different"] or counts["late"] else 0


if __name__ == "__main__":
    sys.exit(main())
