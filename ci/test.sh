#!/usr/bin/env bash
# All tests, a few files at a time. One thread a process: the distributed ones run up to eight.
set -euo pipefail
export OMP_NUM_THREADS=1
python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --durations=15
