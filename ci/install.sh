#!/usr/bin/env bash
# The package with its test dependencies, as the README says.
set -euo pipefail
pip install --quiet uv
uv pip install --quiet -e ".[test]"
