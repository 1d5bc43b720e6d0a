"""LightningModules of other packages, each compared with one process in several layouts.

::

    python ci/third_party.py
    python ci/third_party.py --only "timm ViT" --only "PyG GIN"
    python ci/third_party.py --table docs/models.md

Each layout of a module must give the same result as one process, or be refused with a named reason.
It is trained like a user's script, and then compared with one process by ``lightning_ptdp.verify``.
Packages that are not installed are skipped and listed. The exit code is 1 if a layout differs
without a warning, hangs, or ends with an error from outside this package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Without a driver, torch's default query for GPUs prevents a forked process from forking another
# one.
os.environ.update(CUDA_VISIBLE_DEVICES="", PYTORCH_NVML_BASED_CUDA_CHECK="1")

import lightning.pytorch as L
import torch
from marked_table import write_between_marks
from third_party_modules import MODULES, ThirdParty

from lightning_ptdp import PTDPError, verify
from lightning_ptdp.shims.lightning import NAMESPACES, lightning_names
from lightning_ptdp.strategy import strategy_class
from lightning_ptdp.verification import Report

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_ptdp"
STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "d2": {},
    "m2": {"num_microbatches": 2},
    "p2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "t2": {"tensor_parallel_size": 2},
}
FAILURES = ("different", "obscure", "hung")
"""Outcomes that are defects."""
EXPLAINING = ("engine", "strategy/checks/module_content.py")
"""Parts of the package whose warnings tell of a result that is not one process's."""


@dataclass(frozen=True)
class Outcome:
    """Result of a module in a layout.

    Attributes:
        kind: "equal", "refused" (before launch), "late" (refused by the ranks), "warned" (differs,
            with a warning), "different" (without a warning), "random" (draws other random numbers),
            "obscure" (another error) or "hung".
        text: The refusal, warning, error, or report of what differs.
    """

    kind: str
    text: str = ""


# ---- one layout of one module --------------------------------------------------------------------


def measure(module: Any, data: Any, layout: str, limit_s: float) -> Outcome:
    """Train in a layout, compare it with one process, and return the result.

    Training and comparison each have their own process and ``limit_s`` seconds."""
    trained: Outcome = call_in_child(partial(train, module, data, layout), limit_s)
    if trained.kind != "trained":
        return trained
    compared: Outcome = call_in_child(partial(compare, module, data, layout), limit_s)
    if compared.kind == "different" and trained.text:
        return Outcome("warned", trained.text)
    return compared


def train(module: Any, data: Any, layout: str) -> Outcome:
    """Train like a user's script.

    The text of the outcome holds the warnings about results that differ from one process."""
    namespace = namespace_of(module)
    names = lightning_names(namespace)
    with tempfile.TemporaryDirectory() as folder:
        told, launched = Path(folder) / "warnings", Path(folder) / "launched"
        warnings.simplefilter("always")
        warnings.showwarning = partial(_keep_warning, told)  # type: ignore[assignment]
        mark = names.LambdaCallback(setup=lambda *_, **__: launched.touch())
        try:
            trainer = names.Trainer(
                **_options(layout, names),
                strategy=strategy_class(namespace)(**LAYOUTS[layout], start_method="fork"),
                max_steps=STEPS,
                callbacks=[mark],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            trainer.fit(module, data)
        except Exception as error:
            return describe(error, traceback.format_exc(), launched=launched.exists())
        return Outcome("trained", told.read_text() if told.exists() else "")


def compare(module: Any, data: Any, layout: str) -> Outcome:
    """Compare the layout with one process."""
    namespace = namespace_of(module)
    strategy = strategy_class(namespace)(**LAYOUTS[layout])
    source = (
        {"datamodule": data} if hasattr(data, "train_dataloader") else {"train_dataloaders": data}
    )
    try:
        report = verify(
            module,
            strategy=strategy,
            steps=STEPS,
            **source,
            **_options(layout, lightning_names(namespace)),
        )
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return Outcome("obscure", f"in verify: {type(error).__name__}: {error}\n{notes}")
    return outcome_of(report)


def outcome_of(report: Report) -> Outcome:
    """Return the result that a comparison means."""
    # If batches cannot be joined, one process accumulates over them. In this case verify compares
    # the losses and logged values of single batches.
    accumulates = any("one process accumulates" in note for note in report.notes)
    differing = {each.kind for each in report.differences} - (
        {"loss", "logged value", "metric"} if accumulates else set()
    )
    if not differing:
        return Outcome("equal")
    if (
        any(cause.name == "random numbers" for cause in report.causes)
        and report.differences[0].kind != "random numbers"
    ):
        return Outcome(
            "random",
            "the step draws random numbers for a batch, which differ for each part of it. "
            f"{report}",
        )
    return Outcome("different", str(report))


def describe(error: Exception, text: str, *, launched: bool) -> Outcome:
    """Return the result of a training that ended with an error.

    ``text`` is the traceback of the error."""
    message = str(error)
    if type(error).__name__ == "ProcessRaisedException":
        name, _, message = last_error(message)
    else:
        name = type(error).__name__
    ours = isinstance(error, PTDPError) or raised_in_package(text)
    if ours and (
        isinstance(error, PTDPError)
        or name.endswith(("ValueError", "MisconfigurationException"))
        or "lightning_ptdp" in name
    ):
        return Outcome("late" if launched else "refused", message)
    return Outcome("obscure", f"{name}: {message}\n{text}")


def last_error(text: str) -> tuple[str, str, str]:
    """Return (name, ": ", message) of the last error in a traceback."""
    starts = [
        match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(?=(: |$))", text, re.MULTILINE)
    ]
    return text[starts[-1] :].strip().partition(": ") if starts else ("", "", text)


def raised_in_package(text: str) -> bool:
    """Return True if the last frame of a traceback is in this package."""
    frames = re.findall(r'^ *File "([^"]+)"', text, re.MULTILINE)
    return bool(frames) and Path(frames[-1]).is_relative_to(PACKAGE)


def namespace_of(module: Any) -> str:
    """Return the namespace of Lightning that a module belongs to."""
    origins = {base.__module__ for base in type(module).__mro__}
    return next(
        namespace
        for namespace in NAMESPACES
        if any(origin.startswith(namespace) for origin in origins)
    )


def _options(layout: str, names: Any) -> dict[str, Any]:
    return {"accelerator": "cpu", "devices": 1 if layout.startswith("m") else 2}


def _keep_warning(file: Path, message: Warning | str, *_: object, **__: object) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith("warnings.py"):
        frame = frame.f_back
    # a warning of torch about a call that the package intercepts
    if frame is None or frame.f_code.co_name == "__torch_function__":
        return
    origin = Path(frame.f_code.co_filename)
    if any(origin.is_relative_to(PACKAGE / part) for part in EXPLAINING):
        with file.open("a") as opened:
            opened.write(f"{message}\n")


def call_in_child(function: Callable[[], Any], limit_s: float) -> Any:
    """Call ``function`` in a forked process and return its result.

    If the process exceeds the limit or is lost, an ``Outcome`` is returned."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+b") as log:

        def answer() -> None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sender.send(function())

        child = context.Process(target=answer)
        child.start()
        sender.close()
        try:
            if receiver.poll(limit_s):
                return receiver.recv()
            return Outcome("hung", f"not finished after {limit_s:g} s")
        except EOFError:
            child.join()
            log.seek(0)
            return Outcome(
                "obscure", f"the process ended: {log.read().decode(errors='replace')[-2000:]}"
            )
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(child.pid).children(recursive=True):
                    process.kill()
            child.kill()
            child.join()


# ---- all layouts, and the table ------------------------------------------------------------------


def measure_all(third: ThirdParty, limit_s: float) -> dict[str, Outcome]:
    """Build a module and measure each layout of it."""
    L.seed_everything(3, verbose=False)
    module, data = third.build()
    return {layout: measure(module, data, layout, limit_s) for layout in LAYOUTS}


def measure_in_children(
    names: list[str], limit_s: float, workers: int
) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """Yield (module, its results), with ``workers`` modules at a time.

    Each module has its own process, which imports only the package of the module."""
    context = multiprocessing.get_context("fork")
    todo, done = context.SimpleQueue(), context.SimpleQueue()

    def work() -> None:
        while (name := todo.get()) is not None:
            result = call_in_child(
                partial(measure_all, MODULES[name], limit_s), 2 * limit_s * (len(LAYOUTS) + 1)
            )
            done.put((name, result if isinstance(result, dict) else dict.fromkeys(LAYOUTS, result)))

    for name in (*names, *[None] * workers):
        todo.put(name)
    children = [context.Process(target=work) for _ in range(workers)]
    for child in children:
        child.start()
    for _ in names:
        yield done.get()
    for child in children:
        child.join()


def show(name: str, outcomes: dict[str, Outcome]) -> None:
    """Print the results of a module. A defect is printed in full."""
    print(
        f"{name}: {', '.join(f'{layout} {outcome.kind}' for layout, outcome in outcomes.items())}"
    )
    for layout, outcome in outcomes.items():
        if outcome.text:
            print(
                f"  {layout} {outcome.kind}: "
                f"{outcome.text if outcome.kind in FAILURES else first_sentence(outcome.text)}"
            )
    sys.stdout.flush()


def first_sentence(text: str) -> str:
    """Return the first sentence as one line."""
    line = re.sub(
        r"^saving the checkpoint \S+ failed: rank \d+: ", "when saving, ", " ".join(text.split())
    )
    line = re.sub(r"^pipeline_parallel_size=\d+ cannot cut \w+: ", "", line)
    line = re.sub(r"^.* average statistics over", "batch normalization is over", line)
    line = re.sub(r" found in \w+$| found in \w+(?=[:;.] )", " found", line)
    ends = r"(?<=[^.])[.:;] (?=[A-Za-z])(?![^(]*\))|; "
    return re.split(ends, line, maxsplit=1)[0].rstrip(".")


def table_of(found: dict[str, dict[str, Outcome]]) -> str:
    """Return a Markdown table of the results."""
    notes: dict[str, int] = {}
    rows = []
    for name, outcomes in found.items():
        cells = []
        for outcome in outcomes.values():
            if outcome.kind in ("equal", *FAILURES):
                cells.append("yes" if outcome.kind == "equal" else outcome.kind)
                continue
            number = notes.setdefault(first_sentence(outcome.text), len(notes) + 1)
            cells.append(f"{outcome.kind} [{number}]")
        rows.append(f"| {name} | {MODULES[name].package} | {' | '.join(cells)} |")
    heading = [f"| module | package | {' | '.join(LAYOUTS)} |", f"|---|---|{'---|' * len(LAYOUTS)}"]
    return "\n".join(
        [*heading, *rows, "", *(f"{number}. {text}" for text, number in notes.items())]
    )


def is_installed(third: ThirdParty) -> bool:
    """Return True if all imports of a module are installed."""
    return all(
        importlib.util.find_spec(name.partition(".")[0]) is not None for name in third.imports
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=list(MODULES),
        metavar="NAME",
        help="this module (may be repeated)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=180.0,
        help="of the training and of the comparison of one layout",
    )
    parser.add_argument("--workers", type=int, default=1, help="modules at a time")
    parser.add_argument("--table", type=Path, help="write the table into this page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    names = options.only or list(MODULES)
    missing = {MODULES[name].package for name in names if not is_installed(MODULES[name])}
    installed = [name for name in names if MODULES[name].package not in missing]
    found: dict[str, dict[str, Outcome]] = {}
    for name, outcomes in measure_in_children(installed, options.limit_s, options.workers):
        found[name] = outcomes
        show(name, outcomes)
        if options.table is not None:
            ordered = {name: found[name] for name in installed if name in found}
            write_between_marks(options.table, "third_party", table_of(ordered))
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}")
    return int(
        any(
            outcome.kind in FAILURES for outcomes in found.values() for outcome in outcomes.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
