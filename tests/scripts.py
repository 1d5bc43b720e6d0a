"""Scripts in processes that are forked from the pool's server, which has imported torch and
Lightning: 6 s of imports less than ``processes.run``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.pool import in_new_process
from tests.processes import LIMIT


def run_script(
    path: Path, arguments: Sequence[str], *, limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as ``__main__``, within ``limit`` seconds (limits.py)."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = (Path(folder, name) for name in ("output", "errors"))
        part = partial(_run, [str(path), *arguments], str(output), str(errors))
        code = in_new_process(part, limit=limit)
        return subprocess.CompletedProcess(
            [str(path), *arguments], code, output.read_text(), errors.read_text()
        )


def _run(arguments: list[str], output: str, errors: str) -> None:
    for path, stream in ((output, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, stream)
        os.close(opened)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
