"""Number formats between one sender and one reader."""

import pytest
import torch

from lightning_sync import compressors
from lightning_sync.asynchronous.codec import RowCodec, codec_for
from lightning_sync.asynchronous.layout import FlatLayout
from lightning_sync.compressors import BlockInt8, ErrorFeedback, Route
from lightning_sync.state import ParamSpec

PAIRED = ["none", "bf16", "fp16", "fp8", "int8", "int4", "sign", "topk"]


def test_these_names_and_no_others_can_serve_one_sender_and_one_reader() -> None:
    found = []
    for name in compressors.registry:
        if name in PAIRED:
            found.append(codec_for(compressors.registry.build(name)))
        else:
            with pytest.raises(ValueError, match="one sender and one reader"):
                codec_for(compressors.registry.build(name))
    assert len(found) == len(PAIRED)
    with pytest.raises(ValueError, match="one sender and one reader"):
        codec_for(Route([("a*", BlockInt8()), ("*", BlockInt8())]))


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_bytes_are_as_many_as_foretold_and_decode_to_something_nearer_than_nothing(name: str, blocks: int) -> None:
    codec = codec_for(compressors.registry.build(name))
    values = torch.randn(blocks * codec.alignment, generator=torch.Generator().manual_seed(1))
    kept = values.clone()
    code = codec.encode(values)
    assert (code.dtype, code.numel()) == (torch.uint8, codec.nbytes(values.numel()))
    assert torch.equal(values, kept), "encoding changes nothing"
    out = torch.full_like(values, float("nan"))
    codec.decode(code.clone(), out)
    assert float((out - values).norm()) <= float(values.norm())
    assert not codec.exact or torch.equal(out, values)


def test_error_feedback_around_a_codec_is_the_codec() -> None:
    assert isinstance(codec_for(ErrorFeedback(BlockInt8(block=64))), RowCodec)
    assert codec_for(ErrorFeedback(BlockInt8(block=64))).alignment == 64


@pytest.mark.parametrize("owners", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("alignment", [1, 8])
def test_slices_cover_the_vector_once_and_blocks_do_not_cross_parameters(owners: int, alignment: int) -> None:
    shapes = [(3, 5), (), (9,), (0,), (2, 2)]
    specs = [ParamSpec(f"p{i}", s, torch.float32, torch.device("cpu")) for i, s in enumerate(shapes)]
    layout = FlatLayout(specs, owners, alignment)
    assert [a for a, _ in layout.slices] == [0, *(b for _, b in layout.slices[:-1])]
    assert layout.slices[-1][1] == layout.size
    assert all(a % alignment == 0 and b % alignment == 0 for a, b in layout.slices)
    tensors = [torch.randn(s) for s in shapes]
    vector = layout.gather(tensors, layout.zeros())
    back = [torch.empty(s) for s in shapes]
    layout.scatter(vector, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    for spec, start in zip(specs, layout.starts, strict=True):
        if spec.numel:
            assert layout.name_at(start) == layout.name_at(start + spec.numel - 1) == spec.name
