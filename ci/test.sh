#!/usr/bin/env bash
# All tests. One thread a process: the distributed ones run up to eight. Those follow one another, and beside them
# run the others.
set -euo pipefail
export OMP_NUM_THREADS=1
python -m pytest -n 2 --dist loadgroup --durations=15
