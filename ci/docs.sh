#!/usr/bin/env bash
# The documentation, built without a warning; the API is read from the sources, so the package need not be imported.
set -euo pipefail
pip install --quiet -e ".[docs]"
site="${1:-build/docs}"
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir "$(realpath -m "$site")"
test -s "$site/api/pipeline/index.html"
grep -q "PTDPStrategy" "$site/api/index.html"
