#!/usr/bin/env bash
# Format, lint, types, and the size of the package.
set -euo pipefail
ruff format --check .
ruff check .
mypy
python ci/size.py
