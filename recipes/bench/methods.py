"""The methods that can be measured side by side: a name, and a function that makes a Lightning strategy.

A third party's method is a few lines in a file of its own, given by `--plugin my_methods.py`:

    from lightning.pytorch.strategies import DDPStrategy
    from methods import method

    @method("ddp50")
    def ddp50():
        return DDPStrategy(bucket_cap_mb=50)
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as powersgd
from hooked import HookedDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

_OURS = re.compile(
    r"(?P<mode>[a-z_]+)(?P<options>\([^()]*\))?"
    r"(?::(?P<compressor>[A-Za-z_]\w*)(?P<call>\(.*\))?)?(?:@(?P<bucket>\d+(?:\.\d+)?))?"
)
ONE_BUCKET_MB = 1000
ACCEPTED_CALL = "write (key=value, ...) with plain values, e.g. (rank=2)"

Maker: TypeAlias = Callable[[], Strategy]


@dataclass(frozen=True)
class Method:
    """One way to keep replicas together, as it is measured.

    Attributes:
        name: Name on the command line and in the table.
        make: Makes the strategy, in every rank, after the fork.
        alone: True if every rank trains by itself, so that the Trainer knows of one process only.
        period: Steps from one exchange to the next. Warm-up and measured steps are made multiples of it, and the mean
            step is compared instead of the median.
    """

    name: str
    make: Maker
    alone: bool = False
    period: int = 1


METHODS: dict[str, Method] = {}


def method(name: str, *, alone: bool = False, period: int = 1) -> Callable[[Maker], Maker]:
    """Register the decorated function, which takes nothing and returns a fresh strategy, as a method.

    Args:
        name: Name on the command line; must be new.
        alone: As in `Method`.
        period: As in `Method`.

    Raises:
        ValueError: The name is taken, or the period is below 1.
    """
    if name in METHODS:
        raise ValueError(f"method name={name!r} is taken. Names in use: {', '.join(METHODS)}.")
    if period < 1:
        raise ValueError(f"method {name!r} has period={period!r}; accepted: 1 or more steps.")

    def register(make: Maker) -> Maker:
        METHODS[name] = Method(name, make, alone, period)
        return make

    return register


@method("none", alone=True)
def compute_alone() -> Strategy:
    """Every rank computes and nobody talks: what a step takes with a free network."""
    return SingleDeviceStrategy(device="cpu")


@method("ddp")
def ddp() -> Strategy:
    """DDP as it comes: buckets of 25 MB, the first to be ready 1 MB."""
    return DDPStrategy()


@method("ddp5")
def ddp_small_buckets() -> Strategy:
    """DDP with buckets of 5 MB, which hide more of the transfer behind the backward pass."""
    return DDPStrategy(bucket_cap_mb=5)


@method("ddp5-fp16")
def ddp_fp16() -> Strategy:
    """DDP with torch's fp16 hook and buckets of 5 MB."""
    return HookedDDPStrategy(default_hooks.fp16_compress_hook, bucket_cap_mb=5)


def _bf16_hook(_state, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotation that is a string
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(sent, async_op=True).get_future()
    return reduced.then(lambda future: bucket.buffer().copy_(future.value()[0]))


@method("ddp5-bf16")
def ddp_bf16() -> Strategy:
    """The same in bf16. torch's bf16 hook refuses gloo, so this is its arithmetic, as its fp16 hook does it."""
    return HookedDDPStrategy(_bf16_hook, bucket_cap_mb=5)


def _torch_powersgd(rank: int) -> Strategy:
    # One bucket: the hook chains reductions from callbacks, and those of several buckets can meet in another order on
    # another rank, which hangs or aborts on gloo.
    return HookedDDPStrategy(
        powersgd.powerSGD_hook,
        lambda: powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2),
        bucket_cap_mb=ONE_BUCKET_MB,
    )


@method("torch-powersgd1")
def torch_powersgd_rank_1() -> Strategy:
    """DDP with torch's PowerSGD hook of rank 1, in one bucket, from the third step on."""
    return _torch_powersgd(1)


@method("torch-powersgd4")
def torch_powersgd_rank_4() -> Strategy:
    """DDP with torch's PowerSGD hook of rank 4, in one bucket, from the third step on."""
    return _torch_powersgd(4)


class AveragedStrategy(DDPStrategy):
    """Local steps and torch's periodic averaging of the whole model, as post-local SGD does after its warm-up.

    Args:
        period: Steps from one averaging to the next.
        dtype: What parameters are sent as; None for their own.
    """

    def __init__(self, period: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._period, self._dtype, self._steps = period, dtype, 0
        self._averager: PeriodicModelAverager | None = None

    def configure_ddp(self) -> None:
        """Leave the model as it is: after its warm-up the hook of post-local SGD sends nothing between hosts."""
        self._averager = PeriodicModelAverager(period=self._period, warmup_steps=0)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, then average if it is time."""
        output = super().optimizer_step(*args, **kwargs)
        assert self.model is not None
        assert self._averager is not None
        if self._dtype is None:
            self._averager.average_parameters(self.model.parameters())
        elif self._steps % self._period == 0:  # the averager counts from 0 as well
            flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).to(self._dtype)
            dist.all_reduce(flat.div_(dist.get_world_size()))
            offset = 0
            for p in self.model.parameters():
                p.data.copy_(flat[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        self._steps += 1
        return output


@method("post-local8", period=8)
def post_local() -> Strategy:
    """torch's periodic model averaging every 8 steps."""
    return AveragedStrategy(8)


@method("post-local8-bf16", period=8)
def post_local_bf16() -> Strategy:
    """The same with bf16 on the wire, which torch does not offer."""
    return AveragedStrategy(8, torch.bfloat16)


def find(name: str) -> Method:
    """The method of a name: a registered one, or one of ours.

    Ours are `MODE` or `MODE(key=value, ...)` with a registered name of `lightning_sync` and literal values, then
    `:COMPRESSOR` with a compressor's registered name or `:Class(key=value, ...)`, then `@MB` for another bucket size.
    Modes that begin with a strict warm-up are measured without it.

    Raises:
        ValueError: There is no such method.
    """
    if name in METHODS:
        return METHODS[name]
    match = _OURS.fullmatch(name)
    package = importlib.import_module("lightning_sync")  # late: the other methods work without it
    modes = importlib.import_module("lightning_sync.strategies").NAMES
    if match is None or match["mode"] not in modes:
        raise ValueError(
            f"method={name!r} is unknown. Accepted: {', '.join(METHODS)}, strict, strict:COMPRESSOR, "
            f"strict:Class(key=value), the same with {', '.join(m for m in modes if m != 'strict')}, options as in "
            "diloco(sync_every=8), @MB for the bucket size, and what a --plugin registers."
        )
    arguments = None if match["call"] is None else _literals(match["call"])
    options = {} if match["options"] is None else _literals(match["options"])
    preset = modes[match["mode"]][1]
    if "warmup_steps" in preset:
        options.setdefault("warmup_steps", 0)
    period = options.get("sync_every", preset.get("sync_every", 1))
    make = lambda: _ours(package, match["mode"], options, match["compressor"], arguments, match["bucket"])  # noqa: E731
    return Method(name, make, period=period)


def _ours(
    package: Any,
    mode: str,
    options: dict[str, Any],
    compressor: str | None,
    arguments: dict[str, Any] | None,
    bucket_mb: str | None,
) -> Strategy:
    options = dict(options)
    if compressor is not None:
        options["compressor"] = compressor if arguments is None else getattr(package, compressor)(**arguments)
    if bucket_mb is not None:
        options["bucket_cap_mb"] = float(bucket_mb)
    made: Strategy = package.strategy(mode, **options)
    return made


def _literals(call: str) -> dict[str, Any]:
    try:
        parsed = ast.parse(f"f{call}", mode="eval").body
        if isinstance(parsed, ast.Call) and not parsed.args and all(keyword.arg for keyword in parsed.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in parsed.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"compressor arguments {call!r} are not accepted ({error}): {ACCEPTED_CALL}.") from error
    raise ValueError(f"compressor arguments {call!r} are not accepted: {ACCEPTED_CALL}.")


def load_plugin(file: Path) -> None:
    """Run a file that registers methods.

    Raises:
        ValueError: There is no such Python file.
    """
    spec = importlib.util.spec_from_file_location(f"bench_plugin_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"plugin={str(file)!r} is not a Python file.")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
