#!/usr/bin/env bash
# The first command of the README, in a folder of its own; then what it must leave behind.
set -euo pipefail
folder="${1:?usage: ci/quickstart.sh FOLDER}"
mkdir -p "$folder"
cd "$folder"
export OMP_NUM_THREADS=1

ptdp fit --config gpt/nano
