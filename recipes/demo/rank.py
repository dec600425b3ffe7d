#!/usr/bin/env python3
"""One rank of the demo: `lightning_sync.train` over a link that is throttled in software.

LIGHTNING_SYNC_DEMO_MBIT is the rate of every rank's link in Mbit/s, LIGHTNING_SYNC_DEMO_PIDS a folder for process ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.base import Payload
from lightning_sync.train import main


def throttle(mbit: float) -> None:
    """Let every collective of this process end no sooner than a link of this rate could have carried its bytes.

    Each rank has a link that carries one collective after the other, as a network card would. What really travels goes
    over the loopback interface at once: this is a model of a slow link, not one.

    Args:
        mbit: Mbit per second that a rank can send.
    """
    plain = GroupWire.start
    link_free = 0.0

    def start(self: GroupWire, payloads: Sequence[Payload]) -> Callable[[], list[Payload]]:
        nonlocal link_free
        before = self.counters.sent.sent
        finish = plain(self, payloads)
        seconds = 8 * float(self.counters.sent.sent - before) / (mbit * 1e6)
        link_free = due = max(link_free, time.perf_counter()) + seconds

        def finish_late() -> list[Payload]:
            result = finish()
            with self.phase("wire"):
                time.sleep(max(0.0, due - time.perf_counter()))
            return result

        return finish_late

    GroupWire.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    throttle(float(os.environ["LIGHTNING_SYNC_DEMO_MBIT"]))
    rank = os.environ.get("LOCAL_RANK", "0")
    (Path(os.environ["LIGHTNING_SYNC_DEMO_PIDS"]) / rank).write_text(str(os.getpid()))
    main()
