"""From what a user writes, a name or an object, to the route that is used."""

from __future__ import annotations

from lightning_sync.compressors.base import Compressor
from lightning_sync.compressors.exact import Exact
from lightning_sync.compressors.feedback import ErrorFeedback
from lightning_sync.compressors.route import Route, as_route


def with_feedback(compressor: Compressor) -> Compressor:
    """Wrap error feedback around what is biased and can keep what it does not send; the rest stays as it is."""
    compressor = compressor.rebuilt(with_feedback)
    return ErrorFeedback(compressor) if compressor.biased and compressor.remembers else compressor


def to_route(compressor: Compressor | Route, *, error_feedback: bool = True) -> Route:
    """The route of a compressor, with error feedback where it is needed."""
    route = as_route(compressor)
    if not error_feedback:
        return route
    return Route([(rule, with_feedback(c)) for rule, c in route.rules])


def is_exact(compressor: Compressor | Route | None) -> bool:
    """Whether this is no compression at all."""
    return compressor is None or compressor == Exact()
