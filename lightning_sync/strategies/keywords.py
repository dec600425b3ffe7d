"""The keyword arguments that Lightning's DDPStrategy and torch's DistributedDataParallel take."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel


def meant_keywords(owner: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse unknown keywords; leave out those of DDP at their defaults, which a command line passes unasked.

    Args:
        owner: The strategy's class, whose own keywords are suggested for misspelt ones.
        kwargs: What is left of the keywords it was given.

    Raises:
        TypeError: naming the unknown keywords and what is accepted.
    """
    lightnings, torchs = (
        {n: p.default for n, p in inspect.signature(cls.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD}
        for cls in (DDPStrategy, DistributedDataParallel)
    )
    own = {"self", "module", "device_ids", "process_group"}
    unknown = sorted(
        n for n in kwargs if n not in lightnings and (n not in torchs or (n in own and kwargs[n] is not None))
    )
    if unknown:
        accepted = (lightnings.keys() | torchs.keys()) - own
        near = difflib.get_close_matches(unknown[0], accepted | _keywords_of(owner), n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise TypeError(
            f"{owner.__name__}: unknown argument {', '.join(unknown)}.{meant} Accepted, beside its own: "
            f"{', '.join(sorted(accepted))}."
        )
    return {n: v for n, v in kwargs.items() if n in lightnings or v != torchs[n]}


def _keywords_of(owner: type) -> set[str]:
    """The keywords of all constructors that the class goes through."""
    found = [inspect.signature(vars(c)["__init__"]) for c in owner.__mro__ if "__init__" in vars(c) and c is not object]
    return {n for signature in found for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
