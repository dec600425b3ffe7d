"""What the ranks of `test_watch_workers.py` run that needs no torch, so that they start fast on a busy machine."""

import time


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("boom")


def hang_on_one(rank, world_size):
    if rank == 1:
        print("I hang", flush=True)
        time.sleep(60)
