#!/usr/bin/env bash
# No root, no GPU, under three minutes on a laptop: three ways to synchronise four processes over a slow link, which is
# throttled in software; then one process is killed, the run resumes to the same bits, and a report shows all of it.
# Arguments: ./recipes/demo.sh --mbit 20 --steps 150 --output runs/demo
set -euo pipefail
cd "$(dirname "$0")/.."
. recipes/venv.sh
install_into_venv report

bin=".venv/bin"
[ -d "$bin" ] || bin=".venv/Scripts"
exec "$bin/python" recipes/demo/race.py "$@"
