"""Every benchmark runs and prints rows in the format of docs/benchmarks.md."""

import json
from pathlib import Path

import pytest

from tests.scripts import run_script

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "ci" / "benchmarks"
# gpu.py and first_hour.py have separate tests; rank_loss.py starts eight interpreters
NAMES = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if path.stem not in ("gpu", "first_hour", "rank_loss")
    and "__main__" in path.read_text(encoding="utf-8")
)
FIELDS = {"name", "ours", "peer", "peer_name", "ratio", "unit"}


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs(name):
    done = run_script(BENCHMARKS / f"{name}.py", ["--smoke"])
    if "namespaces cannot be made here" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows
    for row in rows:
        assert row.keys() == FIELDS
        assert all(isinstance(row[figure], int | float) for figure in ("ours", "peer", "ratio"))
