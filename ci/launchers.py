"""One script with bitwise equal weights under every launcher that is installed.

usage: python ci/launchers.py [NAME …]   (default: all launchers)

The script (``ci/launched_script.py``) trains four ranks, t = 2 and p = 2: with ``python`` on one
machine, then in each case on two nodes of two ranks. Two nodes are two network namespaces, which
need root and iproute2. Ray and torchx are skipped, by name, if they are not installed. SLURM is in
``ci/slurm.sh``, which compares with the same ``python`` run. The exit code is 1 if any weight
differs from that of ``python`` in any bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

LIMIT_S = 300
SCRIPT = Path(__file__).with_name("launched_script.py")
ADDRESSES = ("10.213.11.1", "10.213.11.2")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def by_python(folder: Path) -> None:
    """Run the script alone; it starts its own ranks."""
    finish([start([sys.executable, str(SCRIPT), str(folder), "4", "1"], folder)])


def by_torchrun(folder: Path) -> None:
    """Run torchrun on two nodes."""
    with hosts() as names:
        common = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={ADDRESSES[0]}"]
        finish(
            [
                start(
                    [
                        *on(name),
                        *TORCHRUN,
                        *common,
                        "--master-port=29500",
                        f"--node-rank={node}",
                        str(SCRIPT),
                        str(folder),
                        "2",
                        "2",
                    ],
                    folder,
                )
                for node, name in enumerate(names)
            ]
        )


def by_trainjob(folder: Path) -> None:
    """Run torchrun with the variables of a Kubeflow TrainJob, as its pods do."""
    with hosts() as names:
        finish(
            [
                start(
                    [*on(name), *TORCHRUN, str(SCRIPT), str(folder), "auto", "2"],
                    folder,
                    PET_NNODES="2",
                    PET_NPROC_PER_NODE="2",
                    PET_NODE_RANK=str(node),
                    PET_MASTER_ADDR=ADDRESSES[0],
                    PET_MASTER_PORT="29500",
                )
                for node, name in enumerate(names)
            ]
        )


def by_torchx(folder: Path) -> None:
    """Run ``torchx run -s local_cwd dist.ddp``; its local scheduler has one node."""
    command = [sys.executable, "-m", "torchx.cli.main", "run", "--wait", "-s", "local_cwd"]
    job = ["dist.ddp", "-j", "1x4", "--script", str(SCRIPT), "--", str(folder), "4", "1"]
    finish([start([*command, *job], folder)])


def by_ray(folder: Path) -> None:
    """Run a ``TorchTrainer`` of Ray with four workers."""
    text = (
        "import ray, runpy, sys\n"
        "from ray.train import RunConfig, ScalingConfig\n"
        "from ray.train.torch import TorchTrainer\n"
        f"folder, script = {str(folder)!r}, {str(SCRIPT)!r}\n"
        "def run(config):\n"
        "    sys.argv = [script, folder, 'auto', '1']\n"
        "    runpy.run_path(script, run_name='__main__')\n"
        "ray.init(num_cpus=4, include_dashboard=False)\n"
        "TorchTrainer(run, scaling_config=ScalingConfig(num_workers=4),\n"
        "             run_config=RunConfig(storage_path=folder + '/ray', name='one')).fit()\n"
    )
    finish([start([sys.executable, "-c", text], folder)])


CASES: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "python": (by_python, ""),
    "torchrun": (by_torchrun, ""),
    "TrainJob": (by_trainjob, ""),
    "torchx": (by_torchx, "torchx"),
    "Ray": (by_ray, "ray"),
}
"""Launchers, and the library that each needs."""


class Skipped(Exception):
    """This machine cannot run a case."""


def start(command: Sequence[str], folder: Path, **env: str) -> subprocess.Popen[str]:
    """Start a command in its own session, with its output in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface(command)}
            | env,
            start_new_session=True,
            text=True,
        )


def interface(command: Sequence[str]) -> str:
    """Return the network interface over which the ranks of a command communicate."""
    return "eth0" if command[0] == "ip" else "lo"


def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for processes that must succeed, and end those that do not end."""
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    if any(codes):
        raise SystemExit(f"{processes[0].args} ended with {codes}")


def on(name: str) -> list[str]:
    """Return the prefix of a command that runs on a node."""
    return ["ip", "netns", "exec", name]


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
    """Make two namespaces that one link joins, and remove them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Skipped("network namespaces need root and iproute2")
    names = [f"ptdp-{os.getpid()}-{node}" for node in range(2)]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip(f"-netns {name} address add {address}/24 dev eth0")
            for link in ("eth0", "lo"):
                ip(f"-netns {name} link set {link} up")
        yield names
    finally:
        for name in names:
            ip(f"netns delete {name}", check=False)


def ip(command: str, *, check: bool = True) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *command.split()], check=check, capture_output=True, timeout=30)


def trained(folder: Path, name: str) -> dict[str, str]:
    """Return the weights that the script has written under a launcher, as hexadecimal text."""
    weights: dict[str, str] = json.loads((folder / name / "weights.json").read_text())
    return weights


def main(names: Sequence[str]) -> int:
    """Run the cases and return the exit code."""
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in dict.fromkeys(["python", *(names or CASES)]):
            run, library = CASES[name]
            try:
                if library and importlib.util.find_spec(library) is None:
                    raise Skipped(f"{library} is not installed")
                run(folder / name)
            except Skipped as reason:
                print(f"skipped  {name}: {reason}", flush=True)
                continue
            except SystemExit as error:
                print(
                    f"FAILED   {name}: {error}", (folder / name / "output.txt").read_text()[-3000:]
                )
                wrong += 1
                continue
            same = trained(folder, name) == trained(folder, "python")
            print(f"{'equal   ' if same else 'DIFFERS '} {name}", flush=True)
            wrong += not same
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
