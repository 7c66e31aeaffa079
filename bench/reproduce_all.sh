#!/usr/bin/env bash
# Reruns all studies of docs/research/reproduction.md and draws the planner's picture:
# bench/reproduce_all.sh [FLAG ...]. Each study gets every FLAG (--quick: small scenarios, nothing
# is written; --traces DIR). Some take minutes on two cores, UniBoost's clusters take hours.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
for study in reproduce/run sibyl/run libra/run star/run planner/run planner/goal uniboost/run agents/run overload/run churn/run capacity/run; do
    echo "$study.py" >&2
    "$VENV/bin/python" "bench/$study.py" "$@"
done
case " $* " in *" --quick "*) ;; *) "$VENV/bin/python" bench/planner/picture.py; "$VENV/bin/python" bench/verdicts.py ;; esac
