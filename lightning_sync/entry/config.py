"""Checks a run's configuration and fills in what depends on the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_sync.entry.errors import UsageError
from lightning_sync.entry.jobs import NEWEST
from lightning_sync.entry.ranks import Ranks

DEFAULT_STEPS = 1000


def check_arguments(cfg: DictConfig) -> None:
    """Check the values that Lightning would trip over later, or not at all.

    Args:
        cfg: The composed configuration.

    Raises:
        UsageError: If one has the wrong type or range, or ``ckpt_path`` does not exist.
    """
    _check_integer("seed", cfg.seed, low=0)
    for key in ("max_steps", "max_epochs"):
        _check_limit(f"trainer.{key}", cfg.trainer.get(key))
    for key, low in (("accumulate_grad_batches", 1), ("log_every_n_steps", 0)):
        _check_integer(f"trainer.{key}", cfg.trainer.get(key), low)
    for name in ("run_dir", "ckpt_path"):
        if cfg[name] is not None and not isinstance(cfg[name], str):
            raise UsageError(f"{name}={cfg[name]}: accepted: a path or null.")
    if cfg.ckpt_path not in (None, "last", NEWEST) and not Path(cfg.ckpt_path).exists():
        raise UsageError(
            f"ckpt_path={cfg.ckpt_path}: there is no such file; accepted: a checkpoint, newest, last, or null.",
            on_all=False,
        )


def settle(cfg: DictConfig, ranks: Ranks, run_dir: Path, choices: Mapping[str, str]) -> None:
    """Write into the configuration what was found out about this machine, and join its groups.

    Args:
        cfg: The composed configuration, changed in place.
        ranks: The ranks of the run.
        run_dir: The directory of the run.
        choices: The choice of every group, for messages.

    Raises:
        UsageError: If a compressor or aggregator is given twice, or to a strategy that takes none.
    """
    cfg.run_dir = str(run_dir)
    cfg.trainer.accelerator = ranks.accelerator
    cfg.trainer.devices = ranks.devices
    cfg.trainer.num_nodes = ranks.num_nodes
    if cfg.trainer.max_steps is None and cfg.trainer.max_epochs is None and cfg.trainer.max_time is None:
        cfg.trainer.max_steps = DEFAULT_STEPS
    if cfg.trainer.max_steps is None:
        cfg.trainer.max_steps = -1
    _hand_over(cfg, "compressor", "none", choices)
    _hand_over(cfg, "aggregator", "mean", choices)


def _hand_over(cfg: DictConfig, group: str, neutral: str, choices: Mapping[str, str]) -> None:
    """Put the choice of a group where it belongs: a precision plugin that holds one, else the strategy."""
    choice = choices.get(group) or neutral
    plugins = [node for node in cfg.trainer.get("plugins") or [] if isinstance(node, DictConfig) and group in node]
    holders = [("trainer.plugins", node) for node in plugins]
    if not holders and group in cfg.strategy:
        holders = [("strategy", cfg.strategy)]
    # Nothing has to be handed over for the neutral choice: without a compressor DDP's own exact mean runs.
    if choice == neutral:
        return
    if not holders:
        raise UsageError(
            f"{group}={choice}: strategy={choices.get('strategy')} takes no {group}; accepted with it: "
            f"{group}={neutral}. Choose strategy=strict to use one."
        )
    for place, holder in holders:
        if holder[group] is not None:
            raise UsageError(
                f"{group}={choice} is given beside {place}.{group}={holder[group]}; give only one of them."
            )
        holder[group] = cfg[group]


def _check_limit(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < -1 or value == 0):
        raise UsageError(f"{key}={value}: accepted: a whole number from 1, -1 for no limit, or null.")


def _check_integer(key: str, value: Any, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise UsageError(f"{key}={value}: accepted: a whole number from {low}, or null.")
