"""The two passes over memory that a fused codec makes, eagerly in pieces or as compiled kernels, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_sync.compressors import compiled, planes, random
from lightning_sync.state import State

if TYPE_CHECKING:
    from lightning_sync.compressors.fused import Code, FusedCodec

Kernels = dict[str, compiled.Kernel]


def feed(
    codec: FusedCodec,
    kept: Tensor,
    fresh: Tensor | None,
    share: float = 1.0,
    keys: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Code:
    """Encode x = kept + share * fresh, and leave in `kept` what the code misses.

    Args:
        codec: The codec.
        kept: ``[rows, block]``, overwritten.
        fresh: ``[rows, block]`` of the same dtype; `None`: x is `kept` as it is.
        share: Any number.
        keys: ``[rows, 2]`` from `random.row_keys`, for noisy codecs.
        kernels: The compiled arithmetic, if there is any.
    """
    if codec.noisy and keys is None:
        raise ValueError(f"{codec!r} rounds at random: pass keys, from row_keys.")
    if kernels is not None and fresh is not None and _fits(kept):
        noise = () if keys is None else (keys,)
        factor = _factor(share, kept.device)
        return tuple(kernels["feed"](factor, *noise, *_cut(kept, codec.planes), *_cut(fresh, codec.planes)))
    parts = []
    rows = _piece(kept)
    for start in range(0, max(1, len(kept)), rows):
        piece = kept[start : start + rows]
        x = piece
        if fresh is not None:
            x = torch.mul(fresh[start : start + rows], share).add_(piece)
        own = None if keys is None else keys[start : start + rows].unsqueeze(1)
        code, decoded = codec.encode_planes([x.view(len(x), codec.planes, codec.block // codec.planes)], own)
        torch.sub(x, decoded[0].view_as(x), out=piece)
        parts.append(code)
    return parts[0] if len(parts) == 1 else tuple(torch.cat(t) for t in zip(*parts, strict=True))


def deliver(codec: FusedCodec, code: Code, out: Tensor, kernels: Kernels | None = None) -> None:
    """Decode into `out`, ``[rows, block]``."""
    if kernels is not None and _fits(out):
        kernels["deliver"](*code, *_cut(out, codec.planes))
        return
    rows = _piece(out)
    for start in range(0, len(out), rows):
        cut = out[start : start + rows].view(-1, codec.planes, codec.block // codec.planes)
        cut.copy_(codec.decode_planes(tuple(t[start : start + rows] for t in code), [cut])[0])


@functools.cache
def kernels_for(codec: FusedCodec, device: torch.device) -> Kernels | None:
    """The compiled arithmetic of a codec for float32 blocks, made or loaded at the first call; see `functions_of`."""
    if not compiled.can_compile(device):
        return None
    functions, sources = functions_of(codec, device)
    return compiled.compile_kernels(repr(codec), functions, sources)


def functions_of(codec: FusedCodec, device: torch.device) -> tuple[compiled.Functions, list[object]]:
    """What is compiled, and whose source decides about it.

    ``feed(share, [keys,] *kept, *fresh)`` returns the code, ``deliver(words, level, *out)`` writes. Blocks are given
    as planes. Neither checks anything.
    """
    count = codec.planes

    def feed(share: Tensor, *rest: Tensor) -> Any:
        keys, cut = (rest[0].unsqueeze(1), rest[1:]) if codec.noisy else (None, rest)
        kept, fresh = ([t.unsqueeze(1) for t in part] for part in (cut[:count], cut[count:]))
        values = [b * share + a for a, b in zip(kept, fresh, strict=True)]
        code, decoded = codec.encode_planes(values, keys)
        for a, value, known in zip(kept, values, decoded, strict=True):
            a.copy_(value - known)
        return code

    def deliver(words: Tensor, level: Tensor, *out: Tensor) -> None:
        cut = [t.unsqueeze(1) for t in out]
        for target, value in zip(cut, codec.decode_planes((words, level), cut), strict=True):
            target.copy_(value)

    def blocks() -> Sequence[Tensor]:
        return _cut(torch.zeros(64, codec.block, device=device), count)

    share, level = torch.ones(1, device=device), torch.ones(64, 1, device=device)
    words = torch.zeros(64, codec.block // count, dtype=codec.word, device=device)
    noise = [torch.zeros(64, 2, dtype=torch.int32, device=device)] if codec.noisy else []
    functions: compiled.Functions = {
        "feed": (feed, [share, *noise, *blocks(), *blocks()]),
        "deliver": (deliver, [words, level, *blocks()]),
    }
    ours = [base for base in type(codec).__mro__ if base.__module__.partition(".")[0] not in ("builtins", "abc")]
    return functions, [*ours, planes, random, feed]


def kernels_in(state: State) -> Kernels | None:
    """Those that `FusedCodec.init` has put into a state."""
    return cast("Kernels | None", state.cache.get("kernels"))


def _fits(blocks: Tensor) -> bool:
    return blocks.dtype == torch.float32 and len(blocks) >= 1


def _cut(blocks: Tensor, count: int) -> Sequence[Tensor]:
    """Blocks as planes, ``[rows, w]`` each."""
    return blocks.view(len(blocks), count, blocks.shape[1] // count).unbind(1)


@functools.lru_cache(maxsize=64)
def _factor(share: float, device: torch.device) -> Tensor:
    """A kernel's number is a tensor, else it would be compiled in."""
    return torch.tensor([share], dtype=torch.float32, device=device)


def _piece(blocks: Tensor) -> int:
    """Rows whose blocks, with all intermediate results, stay in a processor's cache; all of them elsewhere."""
    if blocks.device.type != "cpu":
        return max(1, len(blocks))
    return max(1, 2**19 // (blocks.shape[1] * blocks.element_size()))
