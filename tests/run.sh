#!/usr/bin/env bash
# Lint, types and tests, in .venv (made on first use). Arguments go to pytest:
#   ./tests/run.sh                    all but the long proofs
#   ./tests/run.sh -m slow            the long proofs
#   ./tests/run.sh tests/test_conf.py -k strict
set -euo pipefail
cd "$(dirname "$0")/.."
. recipes/venv.sh
install_into_venv test

bin=".venv/bin"
[ -d "$bin" ] || bin=".venv/Scripts"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"

selected=()
case " $* " in
*" -m"*) ;;
*) selected=(-m "not slow") ;;
esac
# One thread per process, as ranks have on a cluster: on busy cores threads that wait for each other cost ten times as much.
export OMP_NUM_THREADS=1
exec "$bin/python" -m pytest "${selected[@]+"${selected[@]}"}" "$@"
