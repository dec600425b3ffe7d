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
exec "$bin/python" -m pytest "${selected[@]+"${selected[@]}"}" "$@"
