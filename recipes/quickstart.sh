#!/usr/bin/env bash
# From a fresh clone to a trained byte model: two processes, int8 gradients, under three minutes of training on two cores.
# Arguments are overrides: ./recipes/quickstart.sh compressor=powersgd trainer.max_steps=200
set -euo pipefail
cd "$(dirname "$0")/.."
. recipes/venv.sh
install_into_venv digits

bin=".venv/bin"
[ -d "$bin" ] || bin=".venv/Scripts"
exec "$bin/python" -m lightning_sync.train strategy="${STRATEGY:-strict}" compressor="${COMPRESSOR:-int8}" \
    data=python_source model=byte_lm trainer.max_steps=400 "$@"
