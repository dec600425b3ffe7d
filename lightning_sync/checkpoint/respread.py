"""State for other ranks than those that saved it: what is owed to the parameters stays the same in sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sync.checkpoint.rank_state import RankState
from lightning_sync.reducer import Reducer
from lightning_sync.state import Cover, State


def owed(ranks: Iterable[RankState], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The sum over all ranks of what is not delivered yet, per parameter: flat, float64.

    Args:
        ranks: The states of all ranks, read once each.
        sizes: Elements of every parameter.
    """
    totals: dict[str, Tensor] = {}
    for state in ranks:
        for kind, covers in state.covers.items():
            for key, cover in covers.items():
                if cover.name not in totals:
                    totals[cover.name] = torch.zeros(sizes[cover.name], dtype=torch.float64)
                places, real = cover.elements()
                values = state.tensors[kind][key].reshape(-1).double()
                totals[cover.name].index_add_(0, places[real], values[real])
    return totals


@dataclass
class Gathered:
    """The reducers' states of all ranks that saved.

    Attributes:
        owed: See `owed`.
        replicated: Tensors that all ranks that had them held alike, ``{kind: {parameter: tensor}}``.
        local: Kinds of tensors that differ between ranks, though they are not owed: nobody else can take them over.
    """

    owed: dict[str, Tensor]
    replicated: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, ranks: Iterable[RankState], sizes: Mapping[str, int]) -> Gathered:
        """Gather them, holding one rank's state at a time."""
        gathered = cls({})

        def noting() -> Iterable[RankState]:
            for state in ranks:
                gathered._note(state)
                yield state

        gathered.owed = owed(noting(), sizes)
        return gathered

    def _note(self, state: RankState) -> None:
        for kind, tensors in state.tensors.items():
            covered = state.covers.get(kind, {})
            for key in tensors.keys() - covered.keys():
                held = self.replicated.setdefault(kind, {})
                if kind not in self.local and torch.equal(held.setdefault(key, tensors[key]), tensors[key]):
                    continue
                self.local.add(kind)
                held.clear()

    def shares(self, reducer: Reducer) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        """What this rank takes over, and what is lost, in words.

        Returns:
            ``{kind: {parameter: tensor}}`` for `Reducer.load_state_dict`: an even share of everything owed for the
            parameters, or the slices of parameters, that this rank serves, and the replicated tensors that fit.
        """
        taken: dict[str, dict[str, Tensor]] = {}
        homeless = set(self.owed)
        wrong_size: dict[str, int] = {}
        for state in reducer.states():
            state.declare()
            for param in state.params:
                home = _home(state, param.key)
                if param.name in self.owed and home is not None:
                    homeless.discard(param.name)
                    kind, cover = home
                    taken.setdefault(kind, {})[param.key] = _pack(cover, self.owed[param.name] / state.world_size)
                for kind, tensors in self.replicated.items():
                    if param.key in tensors and kind in state.arenas:
                        if state.arenas[kind].sizes.get(param.key) == tensors[param.key].numel():
                            taken.setdefault(kind, {})[param.key] = tensors[param.key]
                        else:
                            wrong_size[kind] = wrong_size.get(kind, 0) + 1
        lost = [f"{kind} of {n} parameters, whose size is another one now" for kind, n in sorted(wrong_size.items())]
        lost += [f"{kind}, which was each rank's own" for kind in sorted(self.local)]
        elsewhere = {p.name for p in reducer.params} - {p.name for state in reducer.states() for p in state.params}
        gone = sorted(homeless - elsewhere)
        if gone:
            lost.append(f"what was owed to {', '.join(gone)}, since no compressor in use keeps a residual for them")
        return taken, lost


def _home(state: State, key: str) -> tuple[str, Cover] | None:
    """The kind of state that can hold what is owed to all elements, if the compressor keeps one."""
    for kind, cover_of in state.undelivered.items():
        cover = cover_of(state, key)
        if cover.first == 0 and cover.stride == 1:
            return kind, cover
    return None


def _pack(cover: Cover, flat: Tensor) -> Tensor:
    places, real = cover.elements()
    packed = torch.zeros(len(places), dtype=flat.dtype)
    packed[real] = flat[places[real]]
    return packed
