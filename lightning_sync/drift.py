"""The drift alarm: replicas that must be equal are compared, bit by bit, every few steps.

What is compared is a hash of every tensor. It is taken on the training thread, between two steps, where nothing else
writes to parameters (inside a step a user's code may, for example to a target network); comparing it over the network
happens on a thread and a process group of its own, while training goes on.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sync.comm.groups import abandon
from lightning_sync.comm.worker import wait_in_slices

_ROW = 2**14
# Elements hashed at a time: in a CPU's cache, and on other devices a bound on the memory that is needed for a moment.
_BLOCK_CPU, _BLOCK = 2**16, 2**22
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class DriftError(Exception):
    """Ranks whose parameters must be equal hold different bits.

    Args:
        step: Steps that were done when they were compared.
        name: The first parameter or buffer that differs.
        ranks: The ranks that differ from most others (from the first, where no majority exists).
        others: How many more tensors differ.
    """

    def __init__(self, step: int, name: str, ranks: Sequence[int], others: int = 0) -> None:
        super().__init__(step, name, tuple(ranks), others)
        self.step, self.name, self.ranks, self.others = step, name, tuple(ranks), others

    def __str__(self) -> str:
        more = f" ({self.others} more tensors differ)" if self.others else ""
        return (
            f"after step {self.step}, {self.name!r} is not the same on all ranks that must be equal: rank "
            f"{', '.join(map(str, self.ranks))} holds other bits than the rest{more}. Something changed it on some "
            "ranks only: code under `if rank == 0`, random numbers or data that differ, an operation that is not "
            "deterministic, memory that fails. Resume from the last checkpoint; drift_check_every=0 turns this off."
        )


def _multipliers(count: int, salt: int) -> Tensor:
    """Odd int64 numbers: their lowest 33 bits never repeat, so that two swapped elements show; the rest is mixed."""
    place = torch.arange(count, dtype=torch.int64)
    mixed = (place + salt) * -7046029254386353131
    mixed ^= mixed >> 29
    mixed *= -4658895280553007687
    mixed ^= mixed >> 32
    return (mixed << 33) | ((2 * place + 1) & 0x1FFFFFFFF)


class Hasher:
    r"""Hashes of tensors' bits, as int64 on their device.

    With b the bits of the elements as integers, in rows of 16,384, all modulo 2^64:

    .. math::
        h = \sum_c M_c \sum_i m_i b_{ci}

    m and M are odd, so a single element that differs always shows; any other difference is missed once in about 2^31
    to 2^64 cases. NaN is bits like any other. The same tensor gives the same hash on every device.

    Args:
        longest: Elements of the largest tensor to come.
    """

    def __init__(self, longest: int) -> None:
        self._rows = 4 * longest // _ROW + 1  # a complex element of 16 bytes counts as four
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """The hash of one tensor, a scalar; the host does not stop."""
        bits = _bits(tensor.detach())
        if bits.device not in self._tables:
            tables = (_multipliers(_ROW, 1), _multipliers(self._rows, 2))
            self._tables[bits.device] = (tables[0].to(bits.device), tables[1].to(bits.device))
        inner, outer = self._tables[bits.device]
        whole = bits.numel() // _ROW * _ROW
        at_once = (_BLOCK_CPU if bits.device.type == "cpu" else _BLOCK) // _ROW
        sums = [(rows * inner).sum(1) for rows in bits[:whole].view(-1, _ROW).split(at_once)] if whole else []
        rest = bits[whole:]
        sums.append((rest * inner[: rest.numel()]).sum().view(1))
        rows = torch.cat(sums) if len(sums) > 1 else sums[0]
        return (rows * outer[: rows.numel()]).sum()


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers, in logical order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).contiguous().view(_INTS[tensor.element_size()])


def first_difference(names: Sequence[str], ranks: Sequence[int], table: Tensor, step: int) -> DriftError | None:
    """What hashes ``[ranks, names]`` say: `None` if all rows are equal, else the error that tells."""
    unequal = (table != table[0]).any(0).nonzero().view(-1).tolist()
    if not unequal:
        return None
    column = table[:, unequal[0]].tolist()
    usual = Counter(column).most_common(1)[0][0]  # of equally many, the one that the lowest rank holds
    odd = [rank for rank, value in zip(ranks, column, strict=True) if value != usual]
    return DriftError(step, names[unequal[0]], odd, len(unequal) - 1)


@dataclass
class _Check:
    """Hashes on their way, and what became of them."""

    step: int
    hashes: Tensor
    ready: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class DriftAlarm:
    """Compares tensors over the ranks of a group, off the critical path.

    Every rank of the group calls `begin` and `settle` at the same steps. A comparison is one all-gather of 8 bytes;
    only if that shows a difference, a second one finds where.

    Args:
        named: What must be equal, by name, in the same order on all ranks.
        ranks: The ranks of the group, in its order, as errors shall name them.
        group: A gloo group that nothing else uses, since it is used from the alarm's thread.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._names = [name for name, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._ranks = list(ranks)
        self._group = group
        self._hash = Hasher(max((t.numel() for t in self._tensors), default=0))
        self._digest = Hasher(len(self._tensors))
        self._pending: _Check | None = None
        self._queue: queue.SimpleQueue[_Check | None] = queue.SimpleQueue()
        self._given_up = False
        self._thread = threading.Thread(target=self._loop, name="lightning_sync-drift", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Hash everything now, and start to compare. Between two of these there must be a `settle`."""
        assert self._pending is None
        hashes, ready = _to_host([self._hash(t) for t in self._tensors])
        self._pending = _Check(step, hashes, ready)
        self._queue.put(self._pending)

    def settle(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until what was begun is compared; a step later it is, and nothing waits.

        Args:
            check: Called every 0.1 s while waiting; what it raises ends the wait.

        Raises:
            DriftError: on all ranks of the group, if the tensors were not equal.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not pending.done.wait(0.1):
            check()
        if pending.error is not None:
            raise pending.error

    def close(self, *, broken: bool = False) -> None:
        """End the thread and give up the group, which is not destroyed: after a failure a collective may hang in it."""
        self._given_up = broken
        self._queue.put(None)
        self._thread.join(timeout=1.0 if broken else 5.0)
        if broken:
            abandon(self._group)
        elif not self._thread.is_alive() and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _loop(self) -> None:
        while (check := self._queue.get()) is not None:
            try:
                check.ready()
                check.error = self._compare(check)
            except BaseException as error:  # carried to the training thread
                check.error = error
            check.done.set()

    def _compare(self, check: _Check) -> DriftError | None:
        digests = self._gather(self._digest(check.hashes).view(1))
        if bool((digests == digests[0]).all()):
            return None
        return first_difference(self._names, self._ranks, self._gather(check.hashes), check.step)

    def _gather(self, values: Tensor) -> Tensor:
        rows = [torch.empty_like(values) for _ in self._ranks]
        work = dist.all_gather(rows, values, group=self._group, async_op=True)
        if work is not None and not wait_in_slices(work, lambda: self._given_up):
            raise RuntimeError("given up")  # the run has failed elsewhere: nobody asks any more
        return torch.stack(rows)


def _to_host(hashes: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """The hashes in host memory, and a function that returns once they are there. CUDA does not stop (not run yet)."""
    host = torch.empty(len(hashes), dtype=torch.int64, pin_memory=any(h.is_cuda for h in hashes))
    events = []
    for device in {h.device for h in hashes}:
        places = [i for i, h in enumerate(hashes) if h.device == device]
        stacked = torch.stack([hashes[i] for i in places])
        if device.type != "cuda" or len(places) < len(hashes):
            host[places] = stacked.cpu()
        else:
            host.copy_(stacked, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

    def ready() -> None:
        for event in events:
            event.synchronize()

    return host, ready
