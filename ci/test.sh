#!/usr/bin/env bash
# All tests. One thread a process: the distributed ones run up to eight. Two files at a time, as most tests keep less than a core busy.
set -euo pipefail
export OMP_NUM_THREADS=1
python -m pytest -n 2 --dist loadfile --durations=15
