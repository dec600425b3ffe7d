"""Which parameter takes which compressor."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_sync.checks import check_integer
from lightning_sync.compressors.base import Compressor
from lightning_sync.compressors.exact import Exact
from lightning_sync.state import ParamSpec

Rule = str | Callable[[ParamSpec], bool]


@dataclass(frozen=True)
class Where:
    """A rule for `Route`: holds for a parameter for which all of it holds.

    Args:
        name: Pattern for the parameter's name, as a shell would match it: ``"blocks.*.weight"``.
        role: Pattern for the class of the module that owns it: ``"Embedding"``, ``"Conv*"``, ``"*Norm*"``.
        min_numel: Smallest number of elements.
        max_numel: Largest number of elements; `None`: any.
        min_dims: Smallest number of axes: 2 leaves vectors out.
        max_dims: Largest number of axes; `None`: any.

    Raises:
        ValueError: for a number out of range, or a range that holds nothing.

    Example:
        >>> from lightning_sync.compressors import BF16, PowerSGD
        >>> route = Route([(Where(role="Embedding"), BF16()), (Where(min_numel=10_000, max_dims=2), PowerSGD(rank=2))])
    """

    name: str = "*"
    role: str = "*"
    min_numel: int = 0
    max_numel: int | None = None
    min_dims: int = 0
    max_dims: int | None = None

    def __post_init__(self) -> None:
        check_integer("Where", 0, min_numel=self.min_numel, min_dims=self.min_dims)
        for option, low in (("max_numel", self.min_numel), ("max_dims", self.min_dims)):
            if getattr(self, option) is not None:
                check_integer("Where", low, **{option: getattr(self, option)})

    def __call__(self, param: ParamSpec) -> bool:
        """Whether it holds for this parameter."""
        named = fnmatch.fnmatchcase(param.name, self.name) and fnmatch.fnmatchcase(param.role, self.role)
        sized = self.min_numel <= param.numel and (self.max_numel is None or param.numel <= self.max_numel)
        dims = len(param.shape)
        return named and sized and self.min_dims <= dims and (self.max_dims is None or dims <= self.max_dims)


@dataclass(frozen=True)
class Route:
    """An ordered list of rules; the first that matches decides.

    Args:
        rules: Pairs of a rule and a compressor (or its name). A rule is a pattern for the parameter's name, as a shell
            would match it (``"*.weight"``), a `Where`, or a function of its `ParamSpec`. A parameter that no rule
            matches, or that its compressor does not accept, travels exactly; so does one of complex numbers.

    Example:
        >>> from lightning_sync.compressors import BF16, PowerSGD
        >>> route = Route([("embed*", BF16()), (lambda p: p.numel > 10_000, PowerSGD(rank=2))])
    """

    rules: Sequence[tuple[Rule, Compressor]]

    def __post_init__(self) -> None:
        from lightning_sync.compressors import registry  # here: the registry knows Route

        if not all(isinstance(rule, (tuple, list)) and len(rule) == 2 for rule in self.rules):
            raise ValueError(f"Route(rules={self.rules!r}): expected pairs of a rule and a compressor.")
        pairs = [(rule, registry.build(compressor)) for rule, compressor in self.rules]
        for rule, compressor in pairs:
            if not isinstance(compressor, Compressor):
                raise TypeError(f"Route: the compressor of rule {rule!r} is {compressor!r}, not a Compressor.")
        object.__setattr__(self, "rules", tuple(pairs))  # names become compressors

    def assign(self, params: Sequence[ParamSpec]) -> list[tuple[Compressor, list[ParamSpec]]]:
        """The compressors in use, each with its parameters in registration order.

        Parameters whose states have different dtypes or devices are served apart, by the same compressor.
        """
        table: list[tuple[Compressor, list[ParamSpec]]] = []
        for param in params:
            chosen = self._choose(param)
            for compressor, members in table:
                if compressor == chosen and _alike(members[0], param):
                    members.append(param)
                    break
            else:
                table.append((chosen, [param]))
        return table

    def _choose(self, param: ParamSpec) -> Compressor:
        for rule, compressor in self.rules:
            matches = fnmatch.fnmatchcase(param.name, rule) if isinstance(rule, str) else rule(param)
            if matches:
                fits = param.dtype.is_floating_point and compressor.accepts(param)
                return compressor if fits else Exact()
        return Exact()


def _alike(a: ParamSpec, b: ParamSpec) -> bool:
    return a.state_dtype == b.state_dtype and a.device == b.device


def as_route(compressor: Compressor | Route) -> Route:
    """A compressor alone is a route of one rule: everything it accepts."""
    return compressor if isinstance(compressor, Route) else Route([("*", compressor)])
