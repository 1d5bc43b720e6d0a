#!/usr/bin/env bash
# The first command of the README, in a folder of its own; then what it must leave behind.
set -euo pipefail
folder="${1:?usage: ci/quickstart.sh FOLDER}"
mkdir -p "$folder"
cd "$folder"
export OMP_NUM_THREADS=1

ptdp fit --config gpt/nano

python - <<'PY'
import pathlib
import sqlite3

rows = sqlite3.connect("runs/mlflow.db").execute("select key, value from metrics order by timestamp").fetchall()
last = dict(rows)
for name in ("train/loss", "train/perplexity", "val/perplexity", "train/grad_norm", "system/tokens_per_s", "system/model_tflops_per_s", "train/learning_rate"):
    assert name in last, f"{name} was not logged"
limit = 8192 / 20
assert last["val/perplexity"] < limit, f"validation perplexity {last['val/perplexity']:.0f} is not below {limit:.0f}"
assert list(pathlib.Path("runs").glob("gpt-nano/*/checkpoints/last.ckpt/metadata.json")), "no checkpoint"
print(f"quick start: validation perplexity {last['val/perplexity']:.0f} (limit {limit:.0f})")
PY
