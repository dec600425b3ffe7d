"""The keyword arguments that Lightning's DDPStrategy and torch's DistributedDataParallel take."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel


def meant_keywords(owner: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse unknown keywords; leave out those of DDP at their defaults, which a command line passes unasked."""
    lightnings, torchs = (
        {n: p.default for n, p in inspect.signature(cls.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD}
        for cls in (DDPStrategy, DistributedDataParallel)
    )
    own = {"self", "module", "device_ids", "process_group"}
    unknown = sorted(
        n for n in kwargs if n not in lightnings and (n not in torchs or (n in own and kwargs[n] is not None))
    )
    if unknown:
        accepted = ", ".join(sorted((lightnings.keys() | torchs.keys()) - own))
        raise TypeError(f"{owner}: unknown argument {', '.join(unknown)}. Accepted, beside its own: {accepted}.")
    return {n: v for n, v in kwargs.items() if n in lightnings or v != torchs[n]}
