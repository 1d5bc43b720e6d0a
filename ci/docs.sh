#!/usr/bin/env bash
# What is published: the documentation, built without a warning (the API is read from the sources), and the package with its page.
set -euo pipefail
scratch="${1:-$(mktemp -d)}"
uv pip install --quiet -e ".[docs]"
zensical build --config-file mkdocs.yml --strict
test -s build/docs/api/pipeline/index.html
grep -q "PTDPStrategy" build/docs/api/index.html
python -m build --installer uv --outdir "$scratch" . > /dev/null
twine check --strict "$scratch"/*

# The files that the Dockerfile copies are enough to install the package.
mkdir "$scratch/image"
sed -n 's/^COPY //p' Dockerfile | while read -r copied; do
    (set -- $copied; target="${*: -1}"; cp -r "${@:1:$#-1}" "$scratch/image/$target")
done
python -m build --installer uv --wheel --outdir "$scratch/image/dist" "$scratch/image" > /dev/null

# The wheel carries the package, its types and the recipes: installed elsewhere, above the dependencies that are here, and used from there.
python -m venv "$scratch/elsewhere"
ptdp="$scratch/elsewhere/bin/ptdp"
"$scratch/elsewhere/bin/pip" install --quiet --no-deps "$scratch"/*.whl
here="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
there="$("$scratch/elsewhere/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$here" > "$there/zz-dependencies.pth"
cd "$scratch"
test -e "$there/lightning_ptdp/py.typed"
"$ptdp" recipes list > recipes.txt
grep -q "^gpt/nano " recipes.txt
"$ptdp" recipes show gpt/nano | cmp - "$there/lightning_ptdp/recipes/gpt/nano.yaml"
"$ptdp" plan --recipe gpt/nano --world 8 --device cpu --top 1 > plan.txt
grep -q "tensor_parallel_size" plan.txt
"$scratch/elsewhere/bin/python" -c 'import sys, lightning_ptdp; assert lightning_ptdp.__file__.startswith(sys.prefix)'
