#!/usr/bin/env bash
# What is published: the documentation, built without a warning (the API is read from the sources), and the package with its page.
set -euo pipefail
scratch="${1:-$(mktemp -d)}"
pip install --quiet -e ".[docs]"
zensical build --config-file mkdocs.yml --strict
test -s build/docs/api/pipeline/index.html
grep -q "PTDPStrategy" build/docs/api/index.html
python -m build --outdir "$scratch" . > /dev/null
twine check --strict "$scratch"/*
