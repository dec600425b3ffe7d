#!/usr/bin/env bash
# Without SLURM: run this on every node with the same HEAD, NODES and RUN. It restarts what fails from the newest checkpoint.
#   HEAD=10.0.0.1 NODES=2 RUN=first ./recipes/torchrun.sh strategy=diloco compressor=int8
# Alone on one machine, nothing has to be set.
set -euo pipefail

NODES=${NODES:-1}             # how many nodes run this
DEVICES=${DEVICES:-auto}      # processes per node; auto: its GPUs, without any its CPUs
HEAD=${HEAD:-localhost}       # address of one of the nodes, which the others can reach
PORT=${PORT:-29500}           # a port that is free there
RUN=${RUN:-torchrun}          # names the run and its directory; a second start with the same name goes on
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# GLOO_SOCKET_IFNAME=eth1     # if processes do not find each other: the interface that leads to HEAD, by name
exec python -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$DEVICES" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="$RUN" \
    -m lightning_sync.train run_dir="runs/$RUN" ckpt_path=newest trainer.enable_progress_bar=false \
    +callbacks.checkpoint.every_n_train_steps="${SAVE_EVERY:-500}" "$@"
