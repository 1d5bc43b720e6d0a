#!/usr/bin/env bash
# All tests, a few files at a time: one more than there are cores, because ranks often wait for each other. One thread a process: the
# distributed tests run up to eight.
set -euo pipefail
export OMP_NUM_THREADS=1
python -m pytest --numprocesses "$(($(getconf _NPROCESSORS_ONLN) + 1))" --maxprocesses 4 --dist loadfile --durations=15
