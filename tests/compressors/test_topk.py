"""Chunk top-k against plain loops over its definition; what approximate selection may lose, and what it may not."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.comm.topology import Topology
from lightning_sync.compressors import BF16, BlockInt8, ChunkTopK, ErrorFeedback, RandomBlock
from lightning_sync.compressors.largest import group_size, largest
from lightning_sync.compressors.values import FORMATS
from lightning_sync.state import ParamSpec
from lightning_sync.testing import make_specs, undelivered

VALUES = list(FORMATS)


# ---- against the definition


def top(chunk: np.ndarray, k: int) -> np.ndarray:
    """C(x) of one chunk, with values as they are."""
    kept = sorted(range(len(chunk)), key=lambda i: -abs(chunk[i]))[:k]
    return np.array([x if i in kept else 0.0 for i, x in enumerate(chunk)])


def chunks(flat: np.ndarray, chunk: int) -> np.ndarray:
    return np.concatenate([flat, np.zeros(-len(flat) % chunk)]).reshape(-1, chunk)


class Paper:
    """Error feedback around top-k (Stich et al. 2018, algorithm 1; both ends: Tang et al. 2019), chunk by chunk."""

    def __init__(self, rows: int, chunk: int, k: int, world_size: int, pattern: str) -> None:
        self.k, self.n, self.pattern = k, world_size, pattern
        self.residuals = [np.zeros((rows, chunk)) for _ in range(world_size)]
        self.owners = np.zeros((rows, chunk))

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros_like(self.owners)
        for e, g in zip(self.residuals, gradients, strict=True):
            e += g / self.n
            sent = np.stack([top(row, self.k) for row in e])
            e -= sent
            total += sent
        if self.pattern == "gather":
            return total
        self.owners += total
        mean = np.stack([top(row, self.k) for row in self.owners])
        self.owners -= mean
        return mean


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 150),
    st.sampled_from([8, 13, 64]),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.sampled_from(["exchange", "gather"]),
    st.integers(0, 10**6),
)
def test_it_is_the_reference_loop(n: int, size: int, chunk: int, ratio: float, pattern: Any, seed: int) -> None:
    compressor = ChunkTopK(ratio, chunk, pattern=pattern, recall=1)
    world = SimulatedWorld(ErrorFeedback(compressor), make_specs({"w": (size,)}, torch.float64), n)
    paper = Paper(-(-size // chunk), chunk, compressor.k, n, pattern)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        # float32 numbers in float64: values travel as float32.
        gradients = [torch.randn(size, generator=generator).double() / 2**9 for _ in range(n)]
        gradients = [(g * 2**20).round() / 2**20 for g in gradients]
        expected = paper.step([chunks(g.numpy(), chunk) for g in gradients])
        for result in world.reduce([[g] for g in gradients]):
            np.testing.assert_allclose(result[0].numpy(), expected.reshape(-1)[:size], rtol=0, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(8, 1), (8, 4), (12, 3), (64, 16), (48, 8)]), st.integers(1, 3), st.integers(0, 10**6))
def test_with_groups_the_best_of_every_group_compete(shape: tuple[int, int], k: int, seed: int) -> None:
    width, group = shape
    columns = width // group
    k = min(k, columns)
    generator = torch.Generator().manual_seed(seed)
    # Distinct magnitudes, far enough apart for any number of bits.
    rows = torch.stack([torch.randperm(width, generator=generator) + 1.0 for _ in range(3)])
    rows *= torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1
    for row, found in zip(rows.tolist(), largest(rows, k, group).tolist(), strict=True):
        winners = [max(range(c, width, columns), key=lambda i: abs(row[i])) for c in range(columns)]
        assert sorted(found) == sorted(sorted(winners, key=lambda i: -abs(row[i]))[:k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [1, 16])
def test_numbers_that_are_not_finite_are_larger_than_all_others(dtype: torch.dtype, group: int) -> None:
    rows = torch.randn(200, 4096, dtype=dtype) * 1e30
    rows[3, 7], rows[150, 4095] = float("nan"), float("-inf")
    found = largest(rows, 5, group)
    assert 7 in found[3]
    assert 4095 in found[150]


def test_the_expected_share_of_the_largest_is_found() -> None:
    """0.9 is asked for; the mean over 500 chunks lies within 5 standard errors of the formula, and above 0.9."""
    k, width = 41, 4096
    group = group_size(k, width, 0.9)
    assert group == 16
    rows = torch.randn(500, width, generator=torch.Generator().manual_seed(0))
    exact, found = rows.abs().topk(k).indices, largest(rows, k, group)
    shares = (exact.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean(1)
    groups = width // group
    expected = groups / k * (1 - (1 - 1 / groups) ** k)
    assert abs(float(shares.mean()) - expected) <= 5 * float(shares.std()) / 500**0.5
    assert float(shares.mean()) > 0.9
    assert group_size(k, width, 1.0) == 1
    assert group_size(width, width, 0.1) == 1


# ---- bounds


def once(compressor: ChunkTopK, x: Tensor) -> Tensor:
    blocks = x.clone()
    return compressor.decode(compressor.encode(blocks), x.dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(VALUES),
    st.sampled_from([(8, 0.1), (64, 0.02), (64, 0.5), (4096, 0.01)]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from(["normal", "flat", "spike", "few"]),
    st.integers(0, 10**6),
)
def test_it_contracts_at_least_as_documented(value: Any, shape: Any, recall: float, kind: str, seed: int) -> None:
    chunk, ratio = shape
    compressor = ChunkTopK(ratio, chunk, value, recall=recall)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, chunk, generator=generator, dtype=torch.float64)
    if kind == "flat":
        x = x.sign() * (1 + 1e-3 * torch.rand(x.shape, generator=generator, dtype=torch.float64))
    if kind == "spike":
        x[:, 3] *= 1000
    if kind == "few":
        x[:, 2:] = 0
    left = (x - once(compressor, x)).square().sum(1) / x.square().sum(1)
    delta = {"fp32": compressor.k / chunk, "2bit": 1 / chunk}.get(value, compressor.k / chunk * 0.99)
    slack = 1e-6 + chunk / 2**23  # float32 values, and the bits of a magnitude that hold its place
    assert float(left.max()) <= 1 - delta * (1 - slack) + 1e-12


@pytest.mark.parametrize("value", VALUES)
def test_values_are_as_exact_as_their_format(value: str) -> None:
    form = FORMATS[value]
    v = torch.randn(50, 41, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    code = form.encode(v)
    out = form.decode(code, 41, torch.float64)
    assert sum(t[0].nbytes for t in code) == form.nbytes(41)
    top_value = v.abs().amax(1, keepdim=True)
    worst = {"fp32": 2.0**-24 * v.abs(), "bf16": 2.0**-8 * v.abs(), "int8": top_value / 253}.get(value, top_value)
    assert bool(((out - v).abs() <= worst).all())
    if value == "2bit":
        for row, decoded in zip(v.numpy(), out.numpy(), strict=True):
            high = np.abs(row) > np.abs(row).mean()
            levels = np.where(high, np.abs(row)[high].mean(), np.abs(row)[~high].mean())
            np.testing.assert_allclose(decoded, np.sign(row) * levels, rtol=1e-6)
            # The decoded row is the projection on the two sets: errors stand at right angles to it.
            assert abs(float((row - decoded) @ decoded)) <= 1e-5 * float(row @ row)


@pytest.mark.parametrize("value", VALUES)
def test_what_was_zero_stays_zero_so_that_padding_costs_nothing(value: Any) -> None:
    compressor = ErrorFeedback(ChunkTopK(0.5, 64, value))
    world = SimulatedWorld(compressor, make_specs({"w": (70,)}), 2)
    gradient = torch.zeros(70)
    gradient[[3, 69]] = torch.tensor([2.0, -1.0])
    for _ in range(3):
        (out,) = world.reduce([[gradient], [gradient]])[0]
        assert out.nonzero().view(-1).tolist() == [3, 69]
    for state in world.states:
        assert bool((state.arenas["residual"]["w"][70:] == 0).all())


@pytest.mark.parametrize("pattern", ["exchange", "gather"])
@pytest.mark.parametrize("value", VALUES)
def test_sums_telescope(value: Any, pattern: Any) -> None:
    world = SimulatedWorld(
        ErrorFeedback(ChunkTopK(0.1, 64, value, pattern)), make_specs({"w": (40, 30)}, torch.float64), 3
    )
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(40, 30, dtype=torch.float64)
    for _ in range(10):
        mine = [[torch.randn(40, 30, generator=generator, dtype=torch.float64)] for _ in range(3)]
        total += sum(g[0] for g in mine) / 3 - world.reduce(mine)[0][0]
    assert torch.allclose(total.view(-1), undelivered(world.states, "w"), atol=1e-12)


# ---- bytes, and where gradients lie


def test_the_documentation_states_the_payload() -> None:
    assert [ChunkTopK(values=v).row_bytes() for v in ("fp32", "2bit")] == [246, 101]
    assert ChunkTopK(1 / 64, 64, "bf16").row_bytes() == 3, "short indices in short chunks"


def test_gathering_costs_the_same_at_two_ranks_and_half_as_much_again_per_rank_above() -> None:
    specs = make_specs({"w": (4096, 64)})
    for n in range(2, 80):
        topology = Topology(0, tuple(range(n)))
        gather = ChunkTopK(pattern="gather").wire_bytes(specs, topology).sent
        exchange = sum(ChunkTopK().wire_bytes(specs, Topology(r, topology.nodes)).sent for r in range(n)) / Fraction(n)
        assert gather == exchange * n / 2
        assert (gather > BF16().wire_bytes(specs, topology).sent) == (n >= 67)


@pytest.mark.parametrize("pattern", ["exchange", "gather"])
def test_matrices_between_vectors_in_one_buffer_get_what_matrices_alone_get(pattern: Any) -> None:
    """As in a DDP bucket; what lies between them is left alone."""
    shapes = {"a": (40, 30), "b": (37, 31)}
    alone, among = (
        SimulatedWorld(ErrorFeedback(ChunkTopK(0.1, 64, pattern=pattern)), make_specs(shapes), 1) for _ in range(2)
    )
    sizes = {"a": 1200, "bias": 40, "b": 1147, "end": 3}
    for draw in range(3):
        buffer = torch.randn(sum(sizes.values()), generator=torch.Generator().manual_seed(draw))
        before = buffer.clone()
        parts = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
        mine = [parts[n].view(s) for n, s in shapes.items()]
        expected = alone.reduce([mine])[0]
        state = among.states[0]
        run = among.compressor.reduce(list(shapes), mine, state)
        payload = next(run)
        while True:
            if payload.pattern == "exchange":
                payload = type(payload)(payload.pattern, tuple(t[None] for t in payload.tensors), payload.splits)
            try:
                payload = run.send(payload)
            except StopIteration:
                break
        for tensor, other in zip(mine, expected, strict=True):
            assert torch.equal(tensor, other)
        kept = dict(zip(sizes, before.split(list(sizes.values())), strict=True))
        assert torch.equal(parts["bias"], kept["bias"])
        assert torch.equal(parts["end"], kept["end"])


def test_without_feedback_what_is_not_sent_is_lost_and_with_it_only_late() -> None:
    """The mean of what is delivered over many steps of one gradient, relative error."""
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    errors = []
    for compressor in (ChunkTopK(0.05, 256), ErrorFeedback(ChunkTopK(0.05, 256))):
        world = SimulatedWorld(compressor, make_specs({"w": (64, 64)}), 2)
        total = sum(world.reduce([[gradient]] * 2)[0][0] for _ in range(200))
        errors.append(float((total / 200 - gradient).norm() / gradient.norm()))
    assert errors[0] > 0.5
    assert errors[1] < 0.15


# ---- options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ratio", 0),
        ("ratio", 1.1),
        ("ratio", float("nan")),
        ("ratio", True),
        ("ratio", "1%"),
        ("chunk", 7),
        ("chunk", 65536),
        ("chunk", 64.0),
        ("values", "fp8"),
        ("pattern", "sum"),
        ("recall", 0),
        ("recall", 2),
    ],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"ChunkTopK\({option}={value!r}\)"):
        ChunkTopK(**{option: value})


def test_vectors_and_small_matrices_are_not_worth_it() -> None:
    spec = ParamSpec("w", (2000,), torch.float32, torch.device("cpu"))
    assert not ChunkTopK().accepts(spec)
    assert not ChunkTopK().accepts(ParamSpec("w", (30, 30), torch.float32, torch.device("cpu")))
    assert ChunkTopK().accepts(ParamSpec("w", (32, 32), torch.float32, torch.device("cpu")))


def test_aggregators_other_than_the_mean_would_take_what_was_not_sent_for_zeros() -> None:
    assert not ChunkTopK().aggregates
    assert not ErrorFeedback(ChunkTopK()).aggregates
    assert not ErrorFeedback(RandomBlock(then=BlockInt8())).aggregates
