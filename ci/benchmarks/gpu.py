"""Everything that can only be measured on a GPU, in one command: ours beside plain Lightning and
Hugging Face, on one GPU.

Run: python ci/benchmarks/gpu.py [--budget 520] [--only TEXT] [--set compile=blocks] [--toy]
    [--first-hour FOLDER]

Each engine trains each model (gpu_cases.py, the most telling first) in a process of its own: random
tokens, the same precision and optimizer, gradients clipped. tokens/s, MFU with half of the
attention's square (causal) and with all of it, peak memory of tensors, and the share of the time in
which no kernel runs. A rank of PTD-P's 175B and 530B (arXiv 2104.04473) computes its layers of
t = 8 while collectives return at once: what the GPU does where communication and bubble cost
nothing. Last, what a microbatch costs the host (host_time.py). ``--set`` measures ours with further
options of the strategy too. No network, no data; without a GPU the sizes are toys."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# asking whether there is a GPU must not start CUDA: processes are forked
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path.append(str(Path(__file__).parents[2]))

import host_time
import torch
from first_hour import first_hour, write
from gpu_cases import CASES, PEERS, Case, Engine, Job, flops, jobs, toy
from gpu_engines import contestant, preload
from gpu_measure import Measured, measure
from harness import Comparison, compare, report

from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.planner import known_peak_flops

LEAST_S = 12.0
"""Less than this of the budget is not worth a start."""
HOST, HOST_S = "host, a microbatch", 30.0


@dataclass(frozen=True)
class Machine:
    """The GPU, as a process sees it that may use it; no name: there is none."""

    name: str = ""
    peak_flops: float | None = None


# ---- a process a job -----------------------------------------------------------------------------


def look(answer: Connection) -> None:
    """Send a description of the machine, or why this process cannot use the GPU."""
    try:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if name:
            torch.zeros(1, device="cuda")
    except RuntimeError as error:
        answer.send(str(error))
        return
    answer.send(Machine(name, known_peak_flops(name, "bf16")))


def run(answer: Connection, job: Job, on_gpu: bool) -> None:
    """Measure one job; the answer is what was measured, or why it could not be."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # an option may need what is not installed
    refusals = (ImportError, ValueError) if job.options else (ImportError,)
    try:
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        engine, model = contestant(job, device, quick=not on_gpu)
        answer.send(measure(engine, model(), on_gpu=on_gpu))
    except refusals as error:
        answer.send(f"left out: {error}")
    except BaseException as error:
        traceback.print_exc()
        answer.send(f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    answer.close()
    os._exit(0)  # a Trainer waits on a thread for steps that nobody will ask for


def tell_host_time(answer: Connection, on_gpu: bool) -> None:
    """Print the host's time for a microbatch."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    answer.send(host_time.measure(*(() if on_gpu else (1, 4))))
    answer.close()
    os._exit(0)


def beside(context: Any, target: Any, *args: Any, limit_s: float) -> Any:
    """The answer of a process, or None if there is none within the limit."""
    ours, theirs = context.Pipe(duplex=False)
    # no daemon: compilers start processes
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(limit_s) else None
    except EOFError:
        process.join(5.0)
        return f"failed: the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def start_method() -> tuple[Any, Machine]:
    """Return the start method of processes, and the machine: forked ones need no imports, unless
    CUDA cannot be used in them."""
    for name in ("fork", "spawn"):
        context = multiprocessing.get_context(name)
        machine = beside(context, look, limit_s=60.0)
        if isinstance(machine, Machine) and (machine.name or not torch.cuda.device_count()):
            return context, machine
    raise SystemExit(
        f"there are {torch.cuda.device_count()} GPUs, but no process can use them: {machine}"
    )


# ---- what to measure, and what it comes to -------------------------------------------------------


def measure_all(
    todo: Sequence[Job], budget_s: float, on_gpu: bool, context: Any
) -> Iterator[tuple[Job, Measured | str]]:
    """Run the jobs in order, as far as the budget goes."""
    end = time.monotonic() + budget_s
    for job in todo:
        left = end - time.monotonic()
        if left < LEAST_S:
            yield job, "not run: the budget is spent"
            continue
        if refused := refusal(job):
            yield job, f"left out: {refused}"
            continue
        limit = min(left, job.limit_s)
        yield (
            job,
            beside(context, run, job, on_gpu, limit_s=limit)
            or f"not run to its end: over {limit:.0f} s",
        )


def refusal(job: Job) -> str:
    """Why this version does not have the options; "" if it has them."""
    try:
        PTDPConfig(tensor_parallel_size=job.case.tensor, **{**job.case.options, **job.options})
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def line(job: Job, found: Measured | str, machine: Machine) -> str:
    """A row of the table."""
    if isinstance(found, str):
        return f"{job!s:<58}{found}"
    seconds = statistics.median(found.seconds)
    causal, full = (count / seconds / 1e12 for count in flops(job.case))
    peak = machine.peak_flops
    mfu = (
        "      -     -"
        if peak is None
        else f"{causal * 1e12 / peak:>7.1%}{full * 1e12 / peak:>6.1%}"
    )
    idle = "    -" if found.idle is None else f"{found.idle:>5.1%}"
    return (
        f"{job!s:<58}{seconds * 1e3:>9.1f}{job.case.tokens / seconds:>11,.0f}{causal:>8.1f}{full:>7.1f}{mfu}"
        f"{found.peak_bytes / 2**30:>8.2f}  {idle}"
    )


HEADER = f"{'model, engine':<58}{'ms/step':>9}{'tokens/s':>11}{'TFLOP/s':>8}{'full':>7}{'MFU':>7}{'full':>6}{'GiB':>8}   idle"


def rows(found: Sequence[tuple[Job, Measured]], machine: Machine) -> Iterator[Comparison]:
    """Ours beside each peer, and beside what a paper's GPUs reached of their peak."""
    plain = {(job.case.name, job.engine): one for job, one in found if not job.options}
    for job, one in found:
        case, name = job.case, str(job)
        if job.engine == "slice" and case.published is not None and machine.peak_flops is not None:
            theirs = flops(case)[1] / (case.published / 312 * machine.peak_flops)
            peer = (
                f"{case.published / 312:.0%} of the peak, as A100 in whole runs (arXiv 2104.04473)"
            )
            yield compare(
                name=name,
                ours=one.seconds,
                peer=[theirs] * len(one.seconds),
                peer_name=peer,
                unit="s",
            )
        if job.engine == "ptdp-hf" and case.published_tokens and "H100" in machine.name:
            theirs = case.tokens / case.published_tokens
            yield compare(
                name=name,
                ours=one.seconds,
                peer=[theirs] * len(one.seconds),
                peer_name=f"NeMo AutoModel, published: {case.published_tokens:,.0f} tokens/s",
                unit="s",
            )
        for engine, peer in peers_of(job):
            other = plain.get((case.name, engine))
            if other is not None:
                yield compare(
                    name=name, ours=one.seconds, peer=other.seconds, peer_name=peer, unit="s"
                )
            if other is not None and other.peak_bytes:
                ours, theirs = one.peak_bytes / 2**30, other.peak_bytes / 2**30
                yield compare(
                    name=f"{name}, memory", ours=[ours], peer=[theirs], peer_name=peer, unit="GiB"
                )


def peers_of(job: Job) -> list[tuple[Engine, str]]:
    """Whom a job of ours is compared with; nobody, if it is a peer's."""
    before: list[tuple[Engine, str]] = (
        [(job.engine, "ours without the option")] if job.options else []
    )
    others: dict[str, list[Engine]] = {
        "ptdp": ["lightning", "hf", "hf-compiled"],
        "ptdp-hf": ["hf"],
    }
    return before + [(engine, PEERS[engine]) for engine in others.get(job.engine, [])]


def parse_options(text: str) -> dict[str, Any]:
    """``a=b,c=1`` as options; values are JSON where they can be."""
    given = dict(part.split("=", 1) for part in text.split(","))
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all of it")
    parser.add_argument(
        "--only",
        default="",
        help="only rows with one of these (separated by |) in their name: '1B', 'slice', …",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE[,…]",
        help="ours with these options, too",
    )
    parser.add_argument("--toy", action="store_true", help="small sizes on the CPU")
    parser.add_argument(
        "--first-hour",
        type=Path,
        metavar="FOLDER",
        help="before the models: layouts beside a CPU's losses, waits, and saves (first_hour.py)",
    )
    options = parser.parse_args()
    began, hour = time.monotonic(), dict[str, Any]()
    if options.first_hour is not None:
        gpus = 0 if options.toy else torch.cuda.device_count()
        hour = first_hour(options.first_hour, gpus=gpus, budget_s=options.budget / 2)
    preload(CASES)
    context, machine = (
        (multiprocessing.get_context("fork"), Machine()) if options.toy else start_method()
    )
    cases: tuple[Case, ...] = CASES if machine.name else tuple(map(toy, CASES))
    wanted = jobs(cases, list(map(parse_options, options.set)))
    todo = [job for job in wanted if any(word in str(job) for word in options.only.split("|"))]
    peak = (
        ""
        if machine.peak_flops is None
        else f", peak {machine.peak_flops / 1e12:.0f} TFLOP/s by the data sheet"
    )
    print(
        f"{machine.name or 'CPU, toy sizes: no figure means anything'}{peak}, torch "
        f"{torch.__version__}\n{HEADER}",
        flush=True,
    )
    of_host = HOST_S if any(word in HOST for word in options.only.split("|")) else 0.0
    found: list[tuple[Job, Measured]] = []
    for job, one in measure_all(
        todo, options.budget - of_host - (time.monotonic() - began), bool(machine.name), context
    ):
        print(line(job, one, machine), flush=True)
        if isinstance(one, Measured):
            found.append((job, one))
    told = list(rows(found, machine))
    if of_host:
        of_host_time = beside(context, tell_host_time, bool(machine.name), limit_s=of_host)
        if isinstance(of_host_time, list):
            told += of_host_time
        else:
            print(f"{HOST}: {of_host_time or f'no answer in {of_host:.0f} s'}")
    if options.first_hour is not None:
        write(options.first_hour, {**hour, "models": list(map(asdict, told))})
    report(f"GPU: {machine.name or 'none'}", told)


if __name__ == "__main__":
    main()
