"""What one rank tells the others about an exception, and the error that the others raise from it."""

import json
import traceback
from dataclasses import asdict, dataclass

import torch.distributed as dist

MESSAGE_LIMIT = 2_000
TRACEBACK_LIMIT = 16_000
NAME_LIMIT = 255


@dataclass(frozen=True)
class FailureRecord:
    """A failure as it travels through the store: plain text and numbers, of bounded length.

    Attributes:
        rank: The rank that failed.
        host: Name of the host that this rank runs on.
        step: Number of steps that the rank had begun.
        where: What it was doing, for example ``"reduction"`` or ``"training_step"``.
        type_name: Qualified name of the exception's type, for example ``"ValueError"`` or ``"torch.OutOfMemoryError"``.
        message: Text of the exception, at most 2,000 characters.
        traceback_text: Its traceback with causes, the last 16,000 characters.
        reporter: The rank that published the record. It differs from ``rank`` when a rank died without a word, and is
            -1 when nothing could be published, because the store is gone.
    """

    rank: int
    host: str
    step: int
    where: str
    type_name: str
    message: str
    traceback_text: str
    reporter: int

    @classmethod
    def of(
        cls, error: BaseException, rank: int, host: str, step: int, where: str, *, reporter: int | None = None
    ) -> "FailureRecord":
        """Describe an exception of this process. Never raises, even if the exception cannot be printed."""
        kind = type(error)
        type_name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = str(error)
        except Exception as unprintable:
            message = f"(its text cannot be made: {type(unprintable).__name__})"
        try:
            trace = "".join(traceback.format_exception(kind, error, error.__traceback__))
        except Exception as unprintable:
            trace = f"(its traceback cannot be made: {type(unprintable).__name__})"
        return cls(
            rank=rank,
            host=host[:NAME_LIMIT],
            step=step,
            where=where[:NAME_LIMIT],
            type_name=type_name[:NAME_LIMIT],
            message=message[:MESSAGE_LIMIT],
            traceback_text=trace[-TRACEBACK_LIMIT:],
            reporter=rank if reporter is None else reporter,
        )

    def to_json(self) -> str:
        """Return the record as one line of ASCII JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "FailureRecord":
        """Read a record written by ``to_json``.

        Raises:
            ValueError: If the text is not such a record: not JSON, a field missing, unknown or of another type.
        """
        try:
            fields = json.loads(text)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"a failure record in the store is not JSON: {text[:80]!r}") from error
        kinds = cls.__annotations__
        if not isinstance(fields, dict) or fields.keys() != kinds.keys():
            raise ValueError(f"a failure record in the store must have the fields {', '.join(kinds)}: {text[:80]!r}")
        for name, kind in kinds.items():
            if type(fields[name]) is not kind:
                raise ValueError(f"{name} in a failure record in the store must be {kind.__name__}: {text[:80]!r}")
        return cls(**fields)


class RemoteFailure(RuntimeError):  # noqa: N818 - says what happened elsewhere, not what went wrong here
    """The run has failed on some rank; raised on every other one, with what the failed rank said.

    Args:
        record: The failure. Its fields are attributes of the error too.
    """

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record)
        self.record = record
        self.rank = record.rank
        self.host = record.host
        self.step = record.step
        self.where = record.where
        self.type_name = record.type_name
        self.message = record.message
        self.traceback_text = record.traceback_text

    def __str__(self) -> str:
        r = self.record
        # What others say of a rank is what they last heard, up to a few seconds before.
        when = "failed at step" if r.reporter == r.rank else "failed; last heard of at step"
        text = f"rank {r.rank} (host {r.host}) {when} {r.step} in {r.where}: {r.type_name}: {r.message}"
        trace = r.traceback_text.rstrip()
        if not trace:
            return text
        return f"{text}\n\nTraceback of rank {r.rank}:\n{trace}"


def is_collective_error(error: BaseException) -> bool:
    """Whether an exception says no more than that a collective broke."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(s in text for s in ("gloo", "Connection closed by peer", "NCCL"))
