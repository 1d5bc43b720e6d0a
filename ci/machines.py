"""The main job in forty environments of ordinary machines.

usage: ci/machines.sh [NAME …]   (default: all cases)

In each environment, the job must train, or say in at most five lines why it cannot. Each case is a
shell line that runs ``$FIT``, the main job for two steps. A case passes if it ends with exit code
0, or with another code, at most five lines of errors and no traceback. A case may name words that
its output must contain. Cases that need root, network or mount namespaces are skipped, by name, if
the machine does not allow them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 180
ODD = "it's [a] {b} %41 #1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One environment.

    Attributes:
        line: Shell line. ``$FIT`` is the main job, and ``$HERE`` is the case's empty folder.
        needs: Commands that must succeed for the case to be possible.
        refused: Words of the one sentence that must refuse the job; "" if the job must train.
    """

    line: str
    needs: tuple[str, ...] = ()
    refused: str = ""


MOUNTS = "unshare --mount true"
NETWORK = "unshare --net true"
IS_ROOT = 'test "$(id -u)" = 0'


def mounted(setup: str, job: str = "$FIT") -> str:
    """Return a line that runs ``setup`` and the job in a separate mount namespace."""
    return f"unshare --mount --propagation private sh -c '{setup}; exec {job}'"


CASES = {
    "plain": Case(line="$FIT"),
    # Language, encoding and time.
    "locale C": Case(line="env -u LANG LC_ALL=C $FIT"),
    "locale that is not installed": Case(line="env LC_ALL=xx_YY.UTF-8 $FIT"),
    "ASCII output": Case(
        line="env LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii $FIT"
    ),
    "Latin-1 output": Case(line="env PYTHONIOENCODING=latin-1 $FIT"),
    "time zone that does not exist": Case(line="env TZ=Nowhere/Never $FIT"),
    # Environment variables.
    "no HOME": Case(line="env -u HOME $FIT"),
    "HOME that does not exist": Case(line="env HOME=/nonexistent $FIT"),
    "no USER": Case(line="env -u USER -u LOGNAME $FIT"),
    "almost empty environment": Case(line='env -i PATH="$PATH" PYTHONPATH="$PYTHONPATH" $FIT'),
    "OMP_NUM_THREADS=64": Case(line="env OMP_NUM_THREADS=64 $FIT"),
    "no OMP_NUM_THREADS": Case(line="env -u OMP_NUM_THREADS $FIT"),
    "CUDA_VISIBLE_DEVICES empty": Case(line="env CUDA_VISIBLE_DEVICES= $FIT"),
    "MASTER_ADDR left over": Case(line="env MASTER_ADDR=localhost MASTER_PORT=29517 $FIT"),
    "proxy variables": Case(
        line="env http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 $FIT"
    ),
    "TERM unknown": Case(line="env -u COLUMNS TERM=unknown $FIT"),
    # Interpreter.
    "python -O": Case(line="env PYTHONOPTIMIZE=1 $FIT"),
    "warnings shown": Case(line="env PYTHONWARNINGS=default $FIT"),
    "unbuffered": Case(line="env PYTHONUNBUFFERED=1 $FIT"),
    "no byte code": Case(line="env PYTHONDONTWRITEBYTECODE=1 $FIT"),
    "development mode": Case(line="env PYTHONDEVMODE=1 $FIT"),
    # Folders.
    "odd working directory": Case(
        line=f'mkdir "{ODD}" && cd "{ODD}" && cp -r ../ptdp-data . && $FIT'
    ),
    "long working directory": Case(
        line='d="$(printf "%0120d/%0120d" 1 2)"; mkdir -p "$d" && cd "$d" && $FIT'
    ),
    "working directory behind a link": Case(
        line="mkdir real && ln -s real link && cd link && $FIT"
    ),
    "read-only HOME": Case(
        line=mounted(
            "mkdir -p $HERE/home; mount -t tmpfs -o ro none $HERE/home", "env HOME=$HERE/home $FIT"
        ),
        needs=(IS_ROOT, MOUNTS),
    ),
    "read-only working directory": Case(
        line=mounted("mount -t tmpfs -o ro none $HERE; cd $HERE"),
        needs=(IS_ROOT, MOUNTS),
        refused="cannot be written",
    ),
    "TMPDIR of 64 KiB": Case(
        line=mounted(
            "mkdir -p $HERE/t; mount -t tmpfs -o size=64k none $HERE/t", "env TMPDIR=$HERE/t $FIT"
        ),
        needs=(IS_ROOT, MOUNTS),
    ),
    "TMPDIR that does not exist": Case(line="env TMPDIR=/nonexistent $FIT"),
    # Shared memory, files, memory, processors.
    "/dev/shm of 1 MiB": Case(
        line=mounted("mount -o remount,size=1m /dev/shm"), needs=(IS_ROOT, MOUNTS)
    ),
    "/dev/shm read-only": Case(
        line=mounted("mount -t tmpfs -o ro none /dev/shm"),
        needs=(IS_ROOT, MOUNTS),
        refused="needs semaphores",
    ),
    "64 open files": Case(line="ulimit -n 64; $FIT", refused="open files"),
    "256 open files": Case(line="ulimit -n 256; $FIT"),
    "no core dumps, small stack": Case(line="ulimit -c 0; ulimit -s 1024; $FIT"),
    "one core": Case(line="taskset -c 0 $FIT"),
    "nice 19": Case(line="nice -n 19 $FIT"),
    # Network and users.
    "no loopback interface": Case(
        line="unshare --net $FIT", needs=(IS_ROOT, NETWORK), refused="loopback"
    ),
    "only a loopback interface": Case(
        line="unshare --net sh -c 'ip link set lo up; exec $FIT'", needs=(IS_ROOT, NETWORK, "ip -V")
    ),
    "unknown host name": Case(
        line="unshare --uts sh -c 'hostname no-such-host; exec $FIT'",
        needs=(IS_ROOT, "unshare --uts true", "hostname"),
    ),
    "user other than root": Case(
        line="chmod -R a+rwX . && setpriv --reuid 65534 --regid 65534 --clear-groups env "
        "HOME=/nonexistent $FIT",
        needs=(
            IS_ROOT,
            "setpriv --reuid 65534 --regid 65534 --clear-groups env $PYTHON -c 'import torch'",
        ),
    ),
    # Output and neighbours.
    "output into a pipe that closes": Case(line="set -o pipefail; $FIT 2>&1 | head -1"),
    "no standard output": Case(line="$FIT >&-"),
    "no standard input": Case(line="$FIT <&-"),
    "full disk under the output": Case(line="$FIT > /dev/full", needs=("test -e /dev/full",)),
    "two runs at once": Case(line="$FIT & first=$!; $FIT; second=$?; wait $first && exit $second"),
}


def possible(case: Case, environment: dict[str, str]) -> str | None:
    """Return the first command that the case needs and that fails here, or None."""
    for command in case.needs:
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, check=False
        )
        if done.returncode:
            return command
    return None


def run(case: Case, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a case in its folder and return its exit code and its standard error or output.

    The exit code is -1 if the case exceeded the time limit."""
    output = folder.with_suffix(".log")
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", case.line],
            cwd=folder,
            env={**environment, "HERE": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    return code, output.read_text(errors="replace")


def judge(case: Case, code: int, output: str) -> str:
    """Return "" if the case passed, else the reason for the failure."""
    lines = output.strip().splitlines()
    if code == -1:
        return f"still running after {LIMIT_S} s"
    if "Traceback" in output:
        return "traceback"
    if not case.refused:
        return "" if code == 0 else f"exit code {code}"
    if code == 0:
        return "it was not refused"
    if len(lines) > 5:
        return f"refused in {len(lines)} lines"
    return "" if case.refused in output else f"refused without {case.refused!r}"


def main(names: list[str]) -> int:
    """Run the cases, print the table, and return 1 if a case failed, else 0."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 2
    ptdp = shutil.which("ptdp")
    assert ptdp is not None, "install the package first"
    root = Path(tempfile.mkdtemp(prefix="machines-"))
    root.chmod(0o755)
    job = f"{ptdp} fit --config gpt/nano --trainer.max_steps 2 --trainer.limit_val_batches 1"
    environment = {
        **os.environ,
        "FIT": job,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    prepared = root / "prepared"
    prepared.mkdir()
    subprocess.run(
        [ptdp, "prepare", "--config", "gpt/nano"],
        cwd=prepared,
        env=environment,
        check=True,
        capture_output=True,
    )
    passed = skipped = 0
    chosen = names or list(CASES)
    for number, name in enumerate(chosen, 1):
        case = CASES[name]
        missing = possible(case, environment)
        if missing is not None:
            skipped += 1
            print(f"{number:3}  skipped  {name}: {missing} fails here", flush=True)
            continue
        folder = root / f"case{number}"
        shutil.copytree(prepared, folder)
        started = time.monotonic()
        code, output = run(case, folder, environment)
        problem = judge(case, code, output)
        passed += not problem
        print(
            f"{number:3}  {'FAILED ' if problem else 'right  '}  {name} "
            f"({time.monotonic() - started:.0f} s) {problem}",
            flush=True,
        )
        if problem:
            print(
                "\n".join(f"       | {line[:160]}" for line in output.strip().splitlines()[-6:]),
                flush=True,
            )
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    print(f"{passed} of {len(chosen) - skipped} right, {skipped} skipped")
    return int(passed + skipped < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
