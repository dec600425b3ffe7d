"""A compressor that would send more than plain bf16 through a network interface says so, with both numbers."""

import warnings
from typing import Any

import pytest
import torch

import lightning_sync as ls
from lightning_sync.comm.counters import Counters
from lightning_sync.comm.groups import Wires
from lightning_sync.comm.topology import Topology
from lightning_sync.comm.wire import GroupWire
from lightning_sync.compressors.resolve import to_route
from lightning_sync.reducer import Reducer
from lightning_sync.state import ParamSpec

PARAMS = [ParamSpec(f"layer{i}.weight", (512, 512), torch.float32, torch.device("cpu")) for i in range(4)]
FULL = 4 * sum(p.numel for p in PARAMS)


def reducer(compressor: Any, nodes: int, per_node: int, two_level: bool) -> Reducer:
    topology = Topology(0, tuple(node for node in range(nodes) for _ in range(per_node)))

    def wire(view: Topology) -> GroupWire:
        return GroupWire(None, view, Counters())  # type: ignore[arg-type]

    inner = (wire(topology.intra()), wire(topology.inter())) if two_level else (None, None)
    return Reducer(PARAMS, to_route(compressor), Wires(wire(topology), *inner))


@pytest.mark.parametrize(
    ("nodes", "per_node", "two_level", "share", "bf16", "warns"),
    [
        (2, 1, False, 0.25, 0.5, False),
        (4, 1, False, 0.375, 0.75, False),
        (2, 2, False, 0.5, 0.75, False),
        (2, 4, False, 1.0, 0.875, True),
        (2, 8, False, 2.0, 0.9375, True),
        (2, 8, True, 0.25, 0.9375, False),
    ],
)
def test_int8_against_bf16_per_interface(
    nodes: int, per_node: int, two_level: bool, share: float, bf16: float, warns: bool
) -> None:
    """Shares of the float32 gradient; int8's scales add 4/256."""
    made = reducer(ls.BlockInt8(), nodes, per_node, two_level)
    assert made.interface_bytes() == pytest.approx(FULL * share * 260 / 256, rel=1e-3)
    assert made.bf16_interface_bytes() == pytest.approx(FULL * bf16)
    strategy = ls.StrictStrategy(compressor="int8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy._say_bytes(made)
    texts = [str(w.message) for w in caught if "plain bf16 would send" in str(w.message)]
    assert bool(texts) is warns
    if warns:
        assert f"{made.interface_bytes():,}" in texts[0]
        assert f"{made.bf16_interface_bytes():,}" in texts[0]
        assert "two_level=True" in texts[0]


@pytest.mark.parametrize(
    ("compressor", "share", "warns"),
    [(ls.BlockInt4(), 2 * 132 / 256, True), (ls.FP8(), 2 * 260 / 256, True), (ls.Sign(), 2 * 36 / 256, False)],
)
def test_other_codecs_against_bf16_on_two_nodes_of_eight_without_levels(
    compressor: Any, share: float, warns: bool
) -> None:
    """Every rank of a node sends its payload through the same interface: 8 times 1/4 of the gradient at a byte each."""
    made = reducer(compressor, 2, 8, two_level=False)
    assert made.interface_bytes() == pytest.approx(FULL * share, rel=1e-3)
    assert (made.interface_bytes() > made.bf16_interface_bytes()) is warns
