"""Compiled kernels give the bits of the eager arithmetic, are made once, and are never needed."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sync.comm.simulated import SimulatedWorld
from lightning_sync.compressors import (
    FP8,
    QSGD,
    BlockInt4,
    BlockInt8,
    ErrorFeedback,
    FusedCodec,
    Sign,
    compiled,
    fused,
    kernels,
)
from lightning_sync.compressors.random import row_keys, row_streams
from lightning_sync.testing import make_specs

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not compiled.can_compile(CPU), reason="no C++ compiler")
# Compiling takes half a minute for each, once per machine: one in every run, the others with `-m slow`.
CODECS: list[Any] = [
    BlockInt8(),
    *(
        pytest.param(c, marks=pytest.mark.slow)
        for c in (BlockInt4(), Sign(), FP8(), BlockInt8(stochastic=True), BlockInt4(block=24), Sign(block=72), QSGD())
    ),
]


def hard_blocks(rows: int, block: int, seed: int) -> Tensor:
    """Ordinary numbers, and every sort of row that could be treated in two ways."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, block, generator=generator) * torch.randn(rows, 1, generator=generator).mul(4).exp()
    special = [0.0, 1e-38, 1e-42, 3e38, 1e-20]
    for i, value in enumerate(special[: rows // 2]):
        x[i] = value * torch.randint(-1, 2, (block,), generator=generator)
    if rows > 20:
        x[10, :] = torch.arange(block) % 255 - 127.0  # exactly between two codes, in some places
        x[11, 3], x[12, 5], x[13, 0] = float("inf"), float("nan"), -float("inf")
        x[14, 1:] = 0
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, in the same places no numbers; zeros have no sign."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def same_code(codec: FusedCodec, a: Any, b: Any) -> bool:
    """A block that is not finite shows in its number; what its words are then is nobody's concern."""
    sound = a[1].isfinite().view(-1)
    return torch.equal(sound, b[1].isfinite().view(-1)) and all(
        torch.equal(x[sound], y[sound]) for x, y in zip(a, b, strict=True)
    )


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_they_give_the_same_bits(codec: FusedCodec) -> None:
    made = kernels.kernels_for(codec, CPU)
    assert made is not None, "compiling failed"
    for rows, share in ((1, 0.25), (2, 1 / 3), (63, 0.5), (500, 1 / 7), (64, 1.0)):
        keys = row_keys(row_streams(0, [("w",)], [range(rows)]), 3) if codec.noisy else None
        kept, fresh = hard_blocks(rows, codec.block, rows), hard_blocks(rows, codec.block, rows + 1)
        ours, theirs = kept.clone(), kept.clone()
        eager = kernels.feed(codec, ours, fresh, share, keys)
        quick = kernels.feed(codec, theirs, fresh, share, keys, made)
        assert same_code(codec, eager, quick), (rows, share)
        sound = eager[1].isfinite().view(-1)
        assert same(ours[sound], theirs[sound])
        out, written = torch.empty_like(kept), torch.empty_like(kept)
        kernels.deliver(codec, eager, out)
        kernels.deliver(codec, eager, written, made)
        assert same(out, written)
        # And the kernel keeps exactly what its own code misses.
        known = codec.decode(quick, torch.float32)
        x = (fresh * share + kept)[sound]
        assert same(theirs[sound], x - known[sound])


@needs_compiler
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_whole_reductions_give_the_same_bits(codec: FusedCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"large": (300, 257), "aligned": (64, 256 * 3), "small": (40, 30), "vector": (9,)}
    specs = make_specs(shapes)
    results = []
    for compile_from in (2**60, 1):
        monkeypatch.setattr(fused, "COMPILE_FROM", compile_from)
        world = SimulatedWorld(ErrorFeedback(codec), specs, 3)
        assert (kernels.kernels_in(world.states[0]) is not None) is (compile_from == 1)
        generator = torch.Generator().manual_seed(5)
        found = []
        for step in range(3):
            gradients = [[torch.randn(p.shape, generator=generator) for p in specs] for _ in range(3)]
            if step == 1:
                gradients = [[g.mT.contiguous().mT if g.dim() > 1 else g for g in mine] for mine in gradients]
            found += world.reduce(gradients)[0]
        found += [t for s in world.states for arena in s.arenas.values() for _, t in arena.items()]
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_they_run_on_any_thread_and_leave_denormal_numbers_alone() -> None:
    codec = BlockInt8()
    made = kernels.kernels_for(codec, CPU)
    assert made is not None
    found: list[Any] = []
    fresh = torch.randn(100, 256)

    def run() -> None:
        found.append(kernels.feed(codec, torch.zeros(100, 256), fresh, 1.0, None, made))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert torch.equal(found[0][0], codec.encode(fresh)[0])
    assert float(torch.tensor(1e-40) * 1) != 0


@needs_compiler
@pytest.mark.slow
def test_the_way_of_other_devices_gives_the_same_bits() -> None:
    """torch.compile, as on CUDA, here on the CPU; rows are left open."""
    codec = BlockInt8()
    functions, _ = kernels.functions_of(codec, CPU)
    made = {key: compiled._just_in_time(function, example) for key, (function, example) in functions.items()}
    for rows in (2, 100):
        kept, fresh = hard_blocks(rows, codec.block, rows), hard_blocks(rows, codec.block, rows + 1)
        ours, theirs = kept.clone(), kept.clone()
        eager = kernels.feed(codec, ours, fresh, 1 / 3)
        assert same_code(codec, eager, kernels.feed(codec, theirs, fresh, 1 / 3, None, made))
        sound = eager[1].isfinite().view(-1)
        assert same(ours[sound], theirs[sound])
        out, written = torch.empty_like(kept), torch.empty_like(kept)
        kernels.deliver(codec, eager, out)
        kernels.deliver(codec, eager, written, made)
        assert same(out, written)


# ---- when they are made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A compiler that writes a file at once, and a loader that reads it; lists what was compiled."""
    made: list[str] = []

    def compile_(function: Any, example: Any, path: Path) -> None:
        made.append(path.name)
        path.write_text("kernel")

    class Loaded:
        def __init__(self, path: str) -> None:
            assert Path(path).read_text() == "kernel"
            self.loader = self

        def boxed_run(self, arguments: list[Tensor]) -> list[Tensor]:
            return arguments

    monkeypatch.setattr(compiled, "_compile", compile_)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", Loaded)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "can_compile", lambda device: True)
    kernels.kernels_for.cache_clear()
    yield made
    kernels.kernels_for.cache_clear()


def test_they_are_made_once_and_said(fake: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kernels.kernels_for(BlockInt8(), CPU)
    assert len(fake) == 2
    assert [r.getMessage().split(" (")[0].split(" in ")[0] for r in caplog.records] == [
        ["Compiling 2 kernels for BlockInt8(block=256, stochastic=False), once on this machine; about 40 s."][0],
        "Compiled",
    ]
    kernels.kernels_for.cache_clear()  # another process
    caplog.clear()
    kernels.kernels_for(BlockInt8(), CPU)
    assert len(fake) == 2
    assert not caplog.records
    for other in (BlockInt8(block=512), BlockInt4(), BlockInt8(stochastic=True)):
        before = len(fake)
        kernels.kernels_for(other, CPU)
        assert len(fake) == before + 2, other
    assert len(set(fake)) == len(fake)


def test_another_processor_version_or_source_makes_them_anew(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.kernels_for(BlockInt8(), CPU)
    for name, value in (("_processor", lambda: "flags: another"), ("OPTIONS", {"cpp.dynamic_threads": False})):
        before = len(fake)
        monkeypatch.setattr(compiled, name, value)
        kernels.kernels_for.cache_clear()
        kernels.kernels_for(BlockInt8(), CPU)
        assert len(fake) == before + 2, name
    before = compiled._identity("x", [BlockInt8])
    assert compiled._identity("x", [BlockInt8, compiled]) != before
    assert compiled._identity("y", [BlockInt8]) != before


def test_small_models_and_other_dtypes_run_eagerly(fake: list[str]) -> None:
    def init(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
        return ErrorFeedback(BlockInt8()).init(make_specs({"w": shape}, dtype)).cache.get("kernels")

    assert init((1000, 1000)) is None
    assert init((4096, 1024), torch.float64) is None
    assert not fake
    assert init((4096, 1024)) is not None
    assert init((4096, 1024), torch.bfloat16) is not None, "residuals are float32"


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(
    fake: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("internal compiler error")

    monkeypatch.setattr(compiled, "_compile", broken)
    with caplog.at_level(logging.WARNING):
        assert kernels.kernels_for(BlockInt8(), CPU) is None
    assert "BlockInt8(block=256, stochastic=False) runs eagerly" in caplog.text
    assert "RuntimeError: internal compiler error" in caplog.text


def test_a_damaged_file_is_made_anew_in_the_next_run(
    fake: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels.kernels_for(BlockInt8(), CPU)
    (tmp_path / "lightning_sync" / fake[1]).write_text("half a ker")
    for expected in (None, 1):
        kernels.kernels_for.cache_clear()
        with caplog.at_level(logging.WARNING):
            made = kernels.kernels_for(BlockInt8(), CPU)
        assert (made is None) is (expected is None)
    assert "runs eagerly" in caplog.text
    assert len(fake) == 3


def test_without_a_compiler_or_switched_off_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not compiled.can_compile(CPU)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not compiled.can_compile(CPU)
    kernels.kernels_for.cache_clear()
    assert kernels.kernels_for(BlockInt8(), CPU) is None
    kernels.kernels_for.cache_clear()
    assert not compiled.can_compile(torch.device("mps"))
