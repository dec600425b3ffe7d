"""Which options of the asynchronous mode make sense, alone and together."""

from __future__ import annotations

import torch

from lightning_sync.asynchronous.clocks import check_bound
from lightning_sync.asynchronous.rules import Rule
from lightning_sync.checks import check_choice, check_flags, check_integer, check_positive
from lightning_sync.periodic.outer import OuterFactory, build_outer


def check_options(
    owner: str,
    rule: Rule,
    *,
    sync_every: int,
    max_staleness: int | None,
    push: str,
    weight: float | None,
    outer_optimizer: OuterFactory | None,
    blocking: bool,
    buffers: str,
    warmup_steps: int,
    align_every: int | None,
    local_updates: str,
) -> None:
    """Refuse wrong values, and options that contradict each other; they are those of `AsyncStrategy`, named `owner`.

    Raises:
        ValueError, TypeError: naming the option and what to do.
    """
    check_integer(owner, 1, sync_every=sync_every)
    check_bound(owner, max_staleness)
    check_choice(owner, ("delta", "gradient"), push=push)
    if push == "gradient" and (sync_every != 1 or outer_optimizer is not None):
        raise ValueError(
            f"{owner}(push='gradient', sync_every={sync_every}, outer_optimizer={outer_optimizer!r}): every "
            "gradient is sent, and the module's own optimiser applies it; leave both out, or use push='delta'."
        )
    if push == "gradient" and warmup_steps:
        raise ValueError(
            f"{owner}(push='gradient', warmup_steps={warmup_steps}): the owners' optimisers would begin without the "
            "moments of the warm-up. Leave warmup_steps out, or use push='delta'."
        )
    if outer_optimizer is not None:
        build_outer(outer_optimizer, [torch.zeros(1)])
    check_choice(owner, ("average", "rank0"), buffers=buffers)
    check_choice(owner, ("fixed", "dynamic"), local_updates=local_updates)
    if local_updates == "dynamic" and sync_every == 1:
        raise ValueError(
            f"{owner}(local_updates='dynamic', sync_every=1): periods are cut down from sync_every, and 1 is the least "
            "(push='gradient' knows no other). Use a larger sync_every, or leave local_updates out."
        )
    if local_updates == "dynamic" and align_every is not None:
        raise ValueError(
            f"{owner}(local_updates='dynamic', align_every={align_every}): replicas of different speeds make "
            "different numbers of exchanges in the steps that all of them make. Leave one of them out."
        )
    check_positive(owner, weight=weight)
    if align_every is not None:
        check_integer(owner, 1, align_every=align_every)
        if rule.reads_first:
            raise ValueError(
                f"{owner}(align_every={align_every}, rule={rule!r}): under this rule a replica stays where it is when "
                "all meet, so they would only wait. Leave align_every out."
            )
    check_flags(owner, blocking=blocking)
    if push not in rule.pushes:
        raise ValueError(f"{owner}(rule={rule!r}) is for push={' or '.join(rule.pushes)}, not {push!r}.")
    if weight is not None and not rule.uses_weight:
        raise ValueError(f"{owner}(weight={weight!r}): {type(rule).__name__} has weights of its own.")
    if max_staleness is not None and rule.holds_back:
        raise ValueError(
            f"{owner}(max_staleness={max_staleness!r}): {type(rule).__name__} holds contributions back until "
            "others have come, so no bound on what is read can be kept. Leave one of them out."
        )
