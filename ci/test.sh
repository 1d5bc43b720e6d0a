#!/usr/bin/env bash
# All tests. One thread a process: the distributed ones run up to eight.
set -euo pipefail
export OMP_NUM_THREADS=1
python -m pytest --durations=15
