#!/usr/bin/env bash
# Format, lint and types.
set -euo pipefail
ruff format --check .
ruff check .
mypy
