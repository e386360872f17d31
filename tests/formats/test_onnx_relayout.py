"""Aligning the external data of optimised models.

Promise: every span begins at 64 bytes, large ones at a page, and nothing else of the model changes;
onnxruntime takes the result, with what kernels packed, and computes the same bits; a form that is
not known is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from onnx_messages import (
    attribute,
    entry,
    external,
    facts_by_onnx,
    facts_of,
    graph,
    model,
    node,
    save_optimised,
    session,
    tensor,
)
from onnx_networks import NETWORKS

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats.onnx import read_model
from trims_shim.formats.onnx_relayout import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    Copy,
    Relayout,
    relayout,
)
from trims_shim.formats.protobuf import delimited, encode_field

RUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
_FUZZ = settings(max_examples=100, deadline=None)


def _data_of(layout: Relayout, data: bytes) -> bytes:
    made = bytearray(layout.size_bytes)
    for each in layout.copies:
        piece = data[each.source_offset : each.source_offset + each.size_bytes]
        made[each.target_offset : each.target_offset + each.size_bytes] = piece
    return bytes(made)


def _tensors_of(value: Any) -> list[TensorProto]:
    """Every external tensor below a message, in order."""
    if isinstance(value, TensorProto):
        return [value] if value.data_location == TensorProto.EXTERNAL else []
    found = []
    for field, content in value.ListFields():
        if field.message_type is not None:
            for each in [content] if isinstance(content, Message) else content:
                found += _tensors_of(each)
    return found


@dataclass(frozen=True)
class _Blob:
    """A span of the data file: a tensor's own (no key), or what a kernel packed."""

    tensor: str
    key: str
    offset: int
    size: int


def _blobs_of(content: bytes) -> list[_Blob]:
    blobs = []
    for each in _tensors_of(onnx.ModelProto.FromString(content)):
        entries = {pair.key: pair.value for pair in each.external_data}
        blobs.append(_Blob(each.name, "", int(entries["offset"]), int(entries["length"])))
        for number in range(len(entries) - 3):
            key, *places = entries[f"prepacked_{number}"].split("|")
            for place in places:
                offset, size, checksum = place.split(";")
                assert checksum == "0"
                blobs.append(_Blob(each.name, key, int(offset), int(size)))
    return blobs


def _without_external_data(content: bytes) -> bytes:
    proto = onnx.ModelProto.FromString(content)
    for each in _tensors_of(proto):
        each.ClearField("external_data")
    return proto.SerializeToString(deterministic=True)


def _assert_moved(before: bytes, data: bytes, layout: Relayout, location: str) -> bytes:
    """All that the promise says of a layout. The new data file."""
    moved = _data_of(layout, data)
    assert _without_external_data(layout.model) == _without_external_data(before)
    for old, new in zip(_blobs_of(before), _blobs_of(layout.model), strict=True):
        assert (old.tensor, old.key, old.size) == (new.tensor, new.key, new.size)
        assert moved[new.offset : new.offset + new.size] == data[old.offset : old.offset + old.size]
        assert new.offset + new.size <= layout.size_bytes
        assert new.offset % (PAGE_BYTES if new.size >= 64 << 10 else ALIGNMENT_BYTES) == 0
    end = 0
    for copy in layout.copies:
        assert copy.size_bytes > 0
        assert copy.target_offset >= end
        end = copy.target_offset + copy.size_bytes
    assert end == layout.size_bytes
    assert set(read_model(layout.model).locations) <= {location}
    again = relayout(layout.model, data_size_bytes=layout.size_bytes, location=location)
    assert again.model == layout.model
    assert all(each.source_offset == each.target_offset for each in again.copies)
    return moved


# Models that onnxruntime wrote

_PACKED = set(NETWORKS) - {"quantised_conv", "four_bits"}
"""Models of which a kernel keeps packed weights, with every version."""


def _save(source: Path, directory: Path) -> tuple[Path, Path]:
    """Skips where onnxruntime (1.21, 1.24) cannot save the initializers of sub-graphs."""
    try:
        path, data = save_optimised(source, directory)
    except Exception as error:
        if "Subgraph" in str(error) and "not found in node" in str(error):
            pytest.skip("this onnxruntime does not save sub-graphs")
        raise
    for inner in _graphs_of(onnx.load(path, load_external_data=False).graph):
        names = [each.name for each in inner.initializer]
        if len(names) != len(set(names)):
            pytest.skip("this onnxruntime saves the initializers of sub-graphs twice")
    return path, data


def _graphs_of(outer: onnx.GraphProto) -> list[onnx.GraphProto]:
    inner = [each.g for one in outer.node for each in one.attribute if each.HasField("g")]
    return [outer, *(found for each in inner for found in _graphs_of(each))]


@dataclass(frozen=True)
class _Saved:
    source: Path
    model: bytes
    data: bytes
    directory: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What onnxruntime saves of one of the models; made once."""
    known: dict[str, _Saved] = {}

    def make(name: str) -> _Saved:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            source = directory / "source.onnx"
            source.write_bytes(NETWORKS[name]())
            path, data = _save(source, directory)
            known[name] = _Saved(source, path.read_bytes(), data.read_bytes(), directory)
        return known[name]

    return make


def _write(layout: Relayout, data: bytes, directory: Path) -> Path:
    (directory / "weights.bin").write_bytes(_data_of(layout, data))
    path = directory / "model.onnx"
    path.write_bytes(layout.model)
    return path


def _feeds(opened: Any) -> Mapping[str, Any]:
    [given] = opened.get_inputs()
    return {"x": np.random.RandomState(1).standard_normal(given.shape).astype(np.float32)}


def _outputs(opened: Any) -> list[bytes]:
    return [each.tobytes() for each in opened.run(None, _feeds(opened))]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_onnxruntime_saves_is_aligned_and_runs_the_same(
    name: str, saved: Any, tmp_path: Path
) -> None:
    files = saved(name)
    layout = relayout(files.model, data_size_bytes=len(files.data), location="weights.bin")
    _assert_moved(files.model, files.data, layout, "weights.bin")
    for content in (files.source.read_bytes(), files.model, layout.model):
        assert facts_of(read_model(content), content) == facts_by_onnx(content)
    blobs = _blobs_of(layout.model)
    assert blobs
    if name in _PACKED:
        assert any(each.key for each in blobs)
    path = _write(layout, files.data, tmp_path)
    ours = session(path, level="ORT_DISABLE_ALL")
    assert _outputs(ours) == _outputs(session(files.source))


@pytest.mark.skipif(RUNTIME >= (1, 32), reason="from 1.32 on onnxruntime aligns them itself")
def test_onnxruntime_leaves_packed_weights_unaligned(saved: Any) -> None:
    """Without this, the re-layout would not be needed."""
    models = [saved(name).model for name in ("matmul", "gemm", "recurrent")]
    offsets = [each.offset for content in models for each in _blobs_of(content) if each.key]
    assert any(offset % ALIGNMENT_BYTES for offset in offsets)


# onnxruntime 1.32 saves what it packed of quantised weights, and packs them again.
PACKED_ARE_USED = ["matmul", "branches", "loop", *(["quantised"] if RUNTIME < (1, 32) else [])]


@pytest.mark.parametrize("name", PACKED_ARE_USED)
def test_sessions_use_the_packed_weights_of_the_file(name: str, saved: Any, tmp_path: Path) -> None:
    """Writing to the file below a session shows what it maps. Nobody may do that elsewhere."""
    files = saved(name)
    layout = relayout(files.model, data_size_bytes=len(files.data), location="weights.bin")
    path = _write(layout, files.data, tmp_path)
    opened = session(path, level="ORT_DISABLE_ALL")
    before = _outputs(opened)
    with (tmp_path / "weights.bin").open("r+b") as file:
        for each in _blobs_of(layout.model):
            if each.key:
                os.pwrite(file.fileno(), bytes(each.size), each.offset)
    assert _outputs(opened) != before
    plain = session(files.source)
    assert _outputs(plain) == before


def test_models_of_one_source_are_equal(saved: Any, tmp_path: Path) -> None:
    files = saved("branches")
    path, data = _save(files.source, tmp_path)
    layouts = [
        relayout(content, data_size_bytes=size, location="weights.bin")
        for content, size in (
            (files.model, len(files.data)),
            (path.read_bytes(), data.stat().st_size),
        )
    ]
    assert layouts[0] == layouts[1]


# Models by hand


def _packed(*blobs: tuple[int, int], key: str = "MatMul+7", number: int = 0) -> bytes:
    places = "|".join(f"{offset};{size};0" for offset, size in blobs)
    return entry(f"prepacked_{number}", f"{key}|{places}")


def _relayout(*parts: bytes, size: int = 1000) -> Relayout:
    return relayout(model(graph(*parts)), data_size_bytes=size, location="w")


def test_order_and_alignment() -> None:
    first = tensor(external(offset=500, length=4), _packed((3, 100), (200, 0), (103, 7)), name="a")
    second = tensor(external(offset=110, length=8), _packed((600, 65536)), name="b", shape=(2,))
    layout = _relayout(first, second, size=70000)
    assert layout.copies == (
        Copy(3, 0, 100),
        Copy(103, 128, 7),
        Copy(110, 192, 8),
        Copy(500, 256, 4),
        Copy(600, 4096, 65536),
    )
    assert layout.size_bytes == 4096 + 65536
    tensors = onnx.ModelProto.FromString(layout.model).graph.initializer
    assert [(each.key, each.value) for each in tensors[0].external_data] == [
        ("location", "w"),
        ("offset", "256"),
        ("length", "4"),
        ("prepacked_0", "MatMul+7|0;100;0|0;0;0|128;7;0"),
    ]
    assert [each.value for each in tensors[1].external_data][1:] == [
        "192",
        "8",
        "MatMul+7|4096;65536;0",
    ]


def test_lengths_of_messages_grow_and_shrink() -> None:
    inner = graph(tensor(external("a" * 200, offset=900, length=4)), node("A"), field=6)
    for location in ("w", "w" * 300):
        content = model(graph(node("If", attribute(inner), b"\x32\x03doc"), b"\x52\x03doc"))
        layout = relayout(content, data_size_bytes=1000, location=location)
        _assert_moved(content, bytes(range(250)) * 4, layout, location)


def test_every_place_of_a_tensor() -> None:
    def one(at: int, field: int = 5) -> bytes:
        return tensor(external(offset=at, length=4), name=f"t{at}", field=field)

    sparse = one(11, 1) + one(16, 2)
    content = model(
        graph(
            node("Constant", attribute(one(21))),
            node("If", attribute(graph(one(26), one(31), field=6))),
            node("Many", attribute(one(36, 10), one(41, 10), graph(one(46), field=11))),
            node("Sparse", attribute(encode_field(delimited(22), one(51, 1) + one(56, 2)))),
            node("Sparse", attribute(encode_field(delimited(23), one(61, 1) + one(66, 2)))),
            one(71),
            encode_field(delimited(15), sparse),
        ),
        encode_field(delimited(20), graph(one(76), field=1) + graph(one(81), field=2)),
        encode_field(
            delimited(25), node("F", attribute(one(86)), field=7) + attribute(one(91), field=11)
        ),
    )
    data = bytes(range(1, 101))
    layout = relayout(content, data_size_bytes=100, location="w")
    _assert_moved(content, data, layout, "w")
    assert len(layout.copies) == 17
    assert layout.size_bytes == 16 * 64 + 4


def test_equal_spans_stay_shared() -> None:
    layout = _relayout(*(tensor(external(offset=7), name=name) for name in "ab"))
    assert layout.copies == (Copy(7, 0, 4),)


def test_tensors_without_elements() -> None:
    empty = tensor(external(offset=1000, length=0), shape=(0, 3), name="e")
    layout = _relayout(empty, tensor(external(offset=9)))
    assert layout.copies == (Copy(9, 0, 4),)
    tensors = onnx.ModelProto.FromString(layout.model).graph.initializer
    assert [each.value for each in tensors[0].external_data] == ["w", "0", "0"]


def test_a_model_without_external_data_stays_as_it_is() -> None:
    content = model(graph(node("A"), tensor(b"\x4a\x04abcd"), tensor(entry("location", "x"))))
    assert relayout(content, data_size_bytes=0, location="w") == Relayout(content, (), 0)


def test_fields_of_the_future_are_kept() -> None:
    """Bytes outside external data are copied, not understood."""
    unknown = b"\xf8\x3f\x05" + b"\xfa\x3f\x02ab" + b"\xf9\x3f12345678"
    one = tensor(b"\x62\x03doc", external(offset=3), unknown)
    content = model(unknown, graph(unknown, one, node("A", unknown)), unknown)
    layout = relayout(content, data_size_bytes=100, location="data")
    expected = content.replace(b"\x0a\x06offset\x12\x013", b"\x0a\x06offset\x12\x010")
    assert layout.model == expected != content


_WRONG: dict[str, tuple[bytes, type[FormatError], str]] = {
    "outside": (tensor(external(offset=997)), TruncatedFile, "4 bytes at 997: its file has 1000"),
    "far outside": (tensor(external(offset=1 << 62)), TruncatedFile, "its file has 1000"),
    "packed outside": (
        tensor(external(), _packed((4, 10), (990, 11))),
        TruncatedFile,
        "11 bytes at 990",
    ),
    "overlap": (
        tensor(external()) + tensor(external(offset=2)),
        CorruptFile,
        "4 bytes at 2 overlaps what ends at 4",
    ),
    "packed inside": (tensor(external(), _packed((0, 5))), CorruptFile, "overlaps"),
    "packed over another": (tensor(external(), _packed((4, 9), (12, 3))), CorruptFile, "overlaps"),
    "length": (tensor(external(length=5)), CorruptFile, "5 bytes, but dtype 1 of shape .1. takes"),
    "two files": (
        tensor(external("a")) + tensor(external("b")),
        UnsupportedFormat,
        "external data in 2 files",
    ),
    "strings": (tensor(external(), dtype=8), UnsupportedFormat, "external, of dtype 8"),
    "dtype": (tensor(external(), dtype=99), UnsupportedFormat, "external, of dtype 99"),
    "both": (tensor(external(), b"\x4a\x04abcd"), UnsupportedFormat, "both inside and external"),
    "no offset": (
        tensor(entry("location", "a"), entry("length", "4"), b"\x70\x01"),
        UnsupportedFormat,
        "without an offset",
    ),
    "checksum": (tensor(external(), entry("checksum", "00")), UnsupportedFormat, "'checksum'"),
    "slice": (tensor(external(), entry("source_shape", "2")), UnsupportedFormat, "'source_shape'"),
    "no packed blobs": (tensor(external(), entry("prepacked_0", "k")), UnsupportedFormat, "'k'"),
    "no packed key": (
        tensor(external(), entry("prepacked_0", "|1;2;0")),
        UnsupportedFormat,
        "prepacked as",
    ),
    "packed checksum": (
        tensor(external(), entry("prepacked_0", "k|10;2;1")),
        UnsupportedFormat,
        "prepacked blob '10;2;1'",
    ),
    "packed without a checksum": (
        tensor(external(), entry("prepacked_0", "k|10;2")),
        UnsupportedFormat,
        "prepacked blob",
    ),
    "packed with more": (
        tensor(external(), entry("prepacked_0", "k|10;2;0;0")),
        UnsupportedFormat,
        "prepacked blob",
    ),
    "packed at -1": (
        tensor(external(), entry("prepacked_0", "k|-1;2;0")),
        CorruptFile,
        "'-1' is not an offset",
    ),
    "packed twice": (
        tensor(external(), _packed((10, 2)), _packed((20, 2))),
        UnsupportedFormat,
        "twice",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_one_error_for_each_way_to_be_wrong(name: str) -> None:
    content, error, message = _WRONG[name]
    with pytest.raises(error, match=message):
        _relayout(content)


def test_a_mapping_can_be_closed_while_its_error_is_held() -> None:
    content = model(graph(tensor(external()), tensor(external(offset=10), b"\x4a\x01x")))
    mapping = mmap.mmap(-1, len(content))
    mapping[:] = content
    with pytest.raises(UnsupportedFormat) as caught:
        relayout(mapping, data_size_bytes=100, location="w")
    mapping.close()
    assert caught.value.__traceback__ is not None


def test_a_cut_model_is_refused(saved: Any) -> None:
    files = saved("branches")
    for keep in range(97, len(files.model) // 2, 97):
        with pytest.raises(FormatError):
            relayout(files.model[:keep], data_size_bytes=len(files.data), location="w")


# Anything at all


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A model with spans at random places of a random file."""
    parts = []
    end = 0
    sizes = st.sampled_from([1, 3, 4, 63, 64, 65, 1000, 65535, 65536, 70000])
    for number in range(draw(st.integers(0, 5))):
        spans = []
        for size in draw(st.lists(sizes, min_size=1, max_size=3)):
            offset = end + draw(st.sampled_from([0, 0, 1, 64, 4095]))
            end = offset + size
            spans.append((offset, size))
        (offset, size), *blobs = draw(st.permutations(spans))
        entries = [
            _packed(*blobs[index : index + 1], key=f"Conv+{index}", number=index)
            for index in range(len(blobs))
        ]
        one = tensor(
            external("some.data", offset=offset, length=size),
            *entries,
            name=f"w{number}",
            dtype=TensorProto.UINT8,
            shape=(size,),
            field=5,
        )
        depth = draw(st.integers(0, 3))
        for _ in range(depth):
            one = node("If", attribute(graph(node("A"), one, field=6)), b"\x32\x01d")
        parts.append(one)
    filler = draw(st.integers(0, 100))
    state = np.random.RandomState(draw(st.integers(0, 100)))
    return model(graph(*parts)), state.bytes(end + filler)


@_FUZZ
@given(_layouts())
def test_any_layout(layout: tuple[bytes, bytes]) -> None:
    content, data = layout
    moved = relayout(content, data_size_bytes=len(data), location="weights.bin")
    _assert_moved(content, data, moved, "weights.bin")


@_FUZZ
@given(
    name=st.sampled_from(["matmul", "quantised", "branches"]),
    position=st.integers(0, 1 << 30),
    value=st.integers(0, 255),
    size=st.integers(0, 1 << 20),
)
def test_mutated_models(saved: Any, name: str, position: int, value: int, size: int) -> None:
    files = saved(name)
    content = bytearray(files.model)
    content[position % len(content)] = value
    for length in (size, len(files.data)):
        try:
            layout = relayout(content, data_size_bytes=length, location="weights.bin")
        except FormatError:
            continue
        for each in layout.copies:
            assert 0 <= each.source_offset <= each.source_offset + each.size_bytes <= length
        relayout(layout.model, data_size_bytes=layout.size_bytes, location="weights.bin")
