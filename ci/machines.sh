#!/usr/bin/env bash
# The main job in environments of ordinary machines (ci/machines.py lists them). Arguments: names of cases; none: all.
set -euo pipefail
exec python "$(dirname "$0")/machines.py" "$@"
