#!/usr/bin/env bash
# The main job and the quick tests on every interpreter that is installed, with the lowest declared versions, the lowest torch, and the
# newest releases. Prints the table of docs/quickstart.md.
#
# usage: ci/versions.sh [--full | --short] [--oldest] [--only-install] [--python VERSION] [--resolution lowest|torch|newest] [FOLDER]
#   --full        all tests instead of the quick ones
#   --short       the quick tests without the pure ones, which give the same with every version
#   --oldest      only the oldest interpreter
#   --only-install  make the environments; the next run with the same FOLDER uses them
#   --python      only the interpreter of this version, such as 3.12.1
#   --resolution  only this one
#   FOLDER        place of the environments and logs (default: a temporary folder)
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # as in .ci/run

tests=(-m quick)
oldest=""
only_install=""
only=""
resolutions="lowest torch newest"
scratch=""
while [ $# -gt 0 ]; do
    case "$1" in
        --full) tests=() ;;
        --short) tests=(-m "quick and not pure") ;;
        --oldest) oldest=1 ;;
        --only-install) only_install=1 ;;
        --python) only="${2:?--python needs a version}"; shift ;;
        --resolution) resolutions="${2:?--resolution lowest, torch or newest}"; shift ;;
        -*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
        *) scratch="$1" ;;
    esac
    shift
done
if [ -z "$scratch" ]; then
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
fi
mkdir -p "$scratch"
sources="$PWD/lightning_ptdp"  # the text of the main job; small, so that it is prepared at once
scratch="$(cd "$scratch" && pwd)"

uv="$(command -v uv || echo "$scratch/uv/bin/uv")"
if [ ! -x "$uv" ]; then
    python3 -m venv "$scratch/uv"
    "$scratch/uv/bin/pip" install --quiet uv
fi

# "VERSION PATH" of every interpreter that the package supports, the oldest first, each version once. Debian's own is looked for apart
# from PATH, where another one may hide it.
interpreters() {
    local minor candidate
    for minor in 11 12 13 14; do
        for candidate in "$(command -p -v "python3.$minor")" "$(command -v "python3.$minor")" \
            "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
            [ -x "$candidate" ] && "$candidate" -c 'import platform, sys; print(platform.python_version(), sys.executable)' 2>/dev/null
        done
    done | sort --version-sort --unique --key=1,1
}

torch="torch==$(sed -n 's/^ *"torch>=\([0-9.]*\).*/\1/p' pyproject.toml).*"

install() { # python, environment, resolution
    [ -e "$2/installed" ] && return
    "$uv" venv --quiet --clear --python "$1" "$2" || return
    local options=(".[test]")
    [ "$3" = lowest ] && options=(--resolution lowest-direct ".[test,hf,fp8,qlora]" "$torch")
    [ "$3" = torch ] && options=(".[test]" "$torch")
    "$uv" pip install --quiet --python "$2/bin/python" "${options[@]}" && touch "$2/installed"
}

job() ( # environment, folder
    mkdir -p "$2"
    cd "$2" && timeout 300 "$1/bin/ptdp" fit --config gpt/nano --trainer.max_steps 4 \
        --data.source "$sources" --data.vocabulary_size 512 --model.config.vocabulary_size 512 \
        --data.validation_samples 64
)

suite() ( # environment
    PATH="$1/bin:$PATH"
    python -m pytest "${tests[@]}" --numprocesses "$(($(getconf _NPROCESSORS_ONLN) + 1))" --maxprocesses 4 --dist loadfile
)

versions() { # environment
    "$1/bin/python" - <<'PY'
from importlib.metadata import version
print(" | ".join(version(name) for name in ("torch", "lightning", "transformers")))
PY
}

export OMP_NUM_THREADS=1
table="$scratch/table.md"
printf '| Python | resolution | torch | lightning | transformers | main job | tests |\n|---|---|---|---|---|---|---|\n' > "$table"
failed=0
while read -r -u 3 version python; do
    [ -n "$only" ] && [ "$only" != "$version" ] && continue
    for resolution in $resolutions; do
        name="$version-$resolution"
        log="$scratch/$name.log"
        environment="$scratch/$name"
        echo "== Python $version, $resolution (at $SECONDS s)"
        if ! install "$python" "$environment" "$resolution" > "$log" 2>&1; then
            tail -20 "$log"
            echo "| $version | $resolution | - | - | - | not installed | - |" >> "$table"
            failed=1
            continue
        fi
        [ -n "$only_install" ] && continue
        trained=right
        job "$environment" "$scratch/$name-job" >> "$log" 2>&1 || { trained=failed; failed=1; tail -20 "$log"; }
        suite "$environment" >> "$log" 2>&1 || { failed=1; grep -E '^(FAILED|ERROR)' "$log"; }
        passed="$(grep -E '[0-9]+ passed' "$log" | tail -1 | sed 's/ in .*//; s/=//g; s/^ *//')"
        echo "${passed:-no test passed}"
        echo "| $version | $resolution | $(versions "$environment") | $trained | ${passed:-none passed} |" >> "$table"
        rm -rf "$environment" "$scratch/$name-job"
    done
    [ -n "$oldest" ] && break
done 3< <(interpreters)
[ -n "$only_install" ] || cat "$table"
exit "$failed"
