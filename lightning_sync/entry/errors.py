"""One sentence instead of a traceback when the arguments of a run are to blame."""

from __future__ import annotations

import re

from hydra.errors import ConfigCompositionException, InstantiationException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


class UsageError(Exception):
    """An argument of the run is wrong; the message names it, its value, what is accepted and what to do.

    Args:
        message: One sentence.
        on_all: Whether every rank finds the same, so that it is enough if rank 0 says it. False for what one machine
            may lack and another have.
    """

    def __init__(self, message: str, on_all: bool = True) -> None:
        super().__init__(message)
        self.on_all = on_all


def concerns_all(error: Exception) -> bool:
    """Whether every rank finds the same error.

    Args:
        error: What Hydra, OmegaConf or the entry raised.

    Returns:
        False for what may be wrong with one machine only.
    """
    if isinstance(error, UsageError):
        return error.on_all
    return not isinstance(error, InstantiationException)


def sentence(error: Exception) -> str:
    """Put an error about the arguments into one line.

    Args:
        error: What Hydra, OmegaConf or the entry raised.

    Returns:
        The line, without a trailing newline.
    """
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice} is unknown; accepted: {', '.join(sorted(error.options))}."
    if isinstance(error, InstantiationException):
        return _instantiation(error)
    if isinstance(error, ConfigCompositionException) and (unknown := _unknown_key(error)):
        return unknown
    line = _one_line(error, error.__cause__)
    if isinstance(error.__cause__, OmegaConfBaseException):
        line += " (--cfg job prints all keys and their values)"
    return line


def _unknown_key(error: ConfigCompositionException) -> str | None:
    """The line about a key that is not there, or None if the error is another one."""
    cause = error.__cause__
    override = re.search(r"To append to your config use \+(.*)", str(error))
    if (
        override is None
        or not isinstance(cause, OmegaConfBaseException)
        or not isinstance(cause.parent_node, DictConfig)
    ):
        return None
    place = override.group(1).partition("=")[0].rpartition(".")[0]
    keys = [str(key) for key in cause.parent_node if not str(key).startswith("_") and key != "hydra"]
    inside = f" in {place}" if place else ""
    return (
        f"{override.group(1)} is unknown; accepted{inside}: {', '.join(keys) or 'no keys'} "
        f"(+{override.group(1)} passes on one that is not listed)."
    )


def _instantiation(error: InstantiationException) -> str:
    match = re.search(r"full_key: (\S+)", str(error))
    key = match.group(1) if match else "configuration"
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for cause in reversed(chain):
        if isinstance(cause, ModuleNotFoundError):
            return missing_package(key, cause)
    return f"{key}: {_one_line(chain[-1], None)}" if len(chain) > 1 else _one_line(error, None)


def missing_package(key: str, error: ModuleNotFoundError) -> str:
    """Say that a choice needs a package that is not installed.

    Args:
        key: The configuration key whose choice needs it.
        error: The failed import. Lightning raises it without a module name, and with a message of its own.

    Returns:
        One line.
    """
    return f"{key}: this choice needs a package that is not installed ({_one_line(error, None)}); choose another {key}."


def _one_line(error: BaseException, cause: BaseException | None) -> str:
    lines = str(error).splitlines()
    if isinstance(cause, OmegaConfBaseException):
        lines += str(cause).splitlines()
    kept = dict.fromkeys(line.strip() for line in lines if not re.match(r"\s*(full_key|object_type)[:=]", line))
    return " ".join(line for line in kept if line)
