#!/usr/bin/env bash
# Measures all figures of docs/explanation/performance.md, in about twelve minutes: bench/run_all.sh [DIR of the
# rivals [TRACE]]. Run it on an idle machine; the raw files note its load. The memory curve does not
# depend on the machine and takes minutes more: bench/core.py memory.
set -euo pipefail
cd "$(dirname "$0")/.."
rivals=${1:-bench/rivals/.venv}
VENV=${VENV:-.venv}
[ -x "$rivals/bin/python" ] || bench/rivals/install.sh "$rivals"
"$VENV/bin/python" bench/core.py latency
"$VENV/bin/python" bench/core.py plans
"$VENV/bin/python" bench/index_vs_dynamo.py --rivals "$rivals"
"$VENV/bin/python" bench/feed.py
# Compares with transformers, if TRANSFORMERS names an environment that has it (such as vLLM's).
"$VENV/bin/python" bench/tokens.py ${TRANSFORMERS:+--peer "$TRANSFORMERS"}
"$VENV/bin/python" bench/http/run.py --rivals "$rivals"
# The Mooncake conversation trace, if its path is given.
[ -z "${2:-}" ] || "$VENV/bin/python" bench/simulator.py "$2" --rivals "$rivals"
"$VENV/bin/python" bench/report.py
"$VENV/bin/python" bench/verdicts.py  # quotes some of these figures
