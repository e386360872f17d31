"""The reader of ONNX models.

Promise: it finds what the onnx package finds, wherever in a model that is; weights are not touched,
and the work is linear in the fields of the model. What is wrong with a file: test_onnx_hostile.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_everything import everything, floats, outside
from onnx_messages import (
    attribute,
    entry,
    external,
    facts_by_onnx,
    facts_of,
    graph,
    model,
    node,
    size_by_onnx,
    tensor,
)

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.onnx import OnnxModel, StoredTensor, is_ort_format, read_model
from trims_shim.formats.protobuf import WireReader, delimited, encode_varint
from trims_shim.specs import Span

_DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
_REAL = sorted(_DATA.rglob("*.onnx"))


def _assert_as_onnx(content: bytes, found: OnnxModel) -> None:
    assert facts_of(found, content) == facts_by_onnx(content)


# What is found


def test_a_model() -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w"], ["h"]),
                helper.make_node("EPContext", ["h"], ["y"], domain="com.microsoft"),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [
                numpy_helper.from_array(weight, "w"),
                outside(floats("o", 7), "../b.bin", offset=64, length=28),
                outside(floats("p", 7), "/a.bin"),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    content = made.SerializeToString()
    at = content.find(weight.tobytes())
    assert read_model(content) == OnnxModel(
        operators=frozenset({("", "MatMul"), ("com.microsoft", "EPContext")}),
        tensors=(
            StoredTensor("w", TensorProto.FLOAT, (2, 3), "", Span(at, 24)),
            StoredTensor("o", TensorProto.FLOAT, (7,), "../b.bin", Span(64, 28)),
            StoredTensor("p", TensorProto.FLOAT, (7,), "/a.bin", Span(0, 28)),
        ),
        locations=("../b.bin", "/a.bin"),
    )


def test_every_place_of_a_tensor() -> None:
    content = everything().SerializeToString()
    found = read_model(content)
    _assert_as_onnx(content, found)
    names = [each.name for each in found.tensors]
    assert names.count("inner_weight") == 4
    assert names.count("deep") == 4
    assert {"w", "typed", "strings", "sparse", "sparse_at", "far", "y", "of_function"} < set(names)
    assert not {"x", "constant", "sparse_constant"} & set(names)
    locations = ("data", "deep.bin", "default", "fun", "l", "sparse", "train")
    assert found.locations == locations
    assert {("com.example", "Custom"), ("", "Add"), ("", "If")} < found.operators


@pytest.mark.parametrize("path", _REAL, ids=lambda path: path.parent.name)
def test_real_models(path: Path) -> None:
    content = path.read_bytes()
    _assert_as_onnx(content, read_model(content))


def test_there_are_real_models() -> None:
    assert len(_REAL) > 100


def test_a_mapped_file(tmp_path: Path) -> None:
    content = everything().SerializeToString()
    (tmp_path / "model.onnx").write_bytes(content)
    with (tmp_path / "model.onnx").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert read_model(mapping) == read_model(content)
    mapping.close()


@pytest.mark.parametrize("name", sorted(set(TensorProto.DataType.keys())))
def test_an_external_length_that_is_missing_follows_from_dtype_and_shape(name: str) -> None:
    dtype = TensorProto.DataType.Value(name)
    for shape in ((3, 5), (), (0, 4)):
        for length in ((), (entry("length", "0"),)):
            given = tensor(entry("location", "f"), *length, b"\x70\x01", dtype=dtype, shape=shape)
            [found] = read_model(model(graph(given))).tensors
            size = size_by_onnx(dtype, shape)
            assert found.span == (None if size is None else Span(0, size)), shape


def test_an_external_length_that_is_given() -> None:
    given = tensor(external("f", offset=5, length=99), shape=(3,))
    [found] = read_model(model(graph(given))).tensors
    assert found.span == Span(5, 99)


def test_a_dtype_of_the_future_has_no_size() -> None:
    given = tensor(entry("location", "f") + b"\x70\x01", dtype=99)
    [found] = read_model(model(graph(given))).tensors
    assert (found.dtype, found.span) == (99, None)


def test_external_data_that_is_switched_off_is_not_external() -> None:
    for location in (b"", b"\x70\x00", b"\x70\x07"):
        content = model(graph(tensor(entry("location", "f"), location, b"\x4a\x04abcd")))
        found = read_model(content)
        _assert_as_onnx(content, found)
        assert found.locations == ()
        assert content[found.tensors[0].span.offset_bytes :][:4] == b"abcd"  # type: ignore[union-attr]


def test_what_comes_twice_is_read_as_protobuf_does() -> None:
    twice = tensor(b"\x42\x01a\x42\x01b", b"\x10\x01\x10\x07", b"\x0a\x02\x05\x06", b"\x08\x07")
    content = model(graph(twice, node("A", b"\x22\x01B", b"\x3a\x01x\x3a\x01y"))) + b"\x08\x05"
    found = read_model(content)
    _assert_as_onnx(content, found)
    assert (found.tensors[0].name, found.tensors[0].dtype) == ("b", 7)
    assert found.tensors[0].shape == (1, 5, 6, 7)
    assert found.operators == {("y", "B")}


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../../x", "", ".", "a\0b", "*/_ORT_MEM_ADDR_/*", "C:\\x", "ü", "a" * 9999],
)
def test_locations_are_reported_as_they_are(location: str) -> None:
    content = model(graph(tensor(external(location))))
    if not location:
        with pytest.raises(CorruptFile, match="without a location"):
            read_model(content)
        return
    assert read_model(content).locations == (location,)


def test_the_ort_format() -> None:
    assert is_ort_format(b"\x18\0\0\0ORTM")
    assert is_ort_format(b"\x18\0\0\0ORTM" + bytes(99))
    assert not is_ort_format(b"\x18\0\0\0ORT")
    assert not is_ort_format(b"")
    assert not is_ort_format(model(graph())[:16])
    with pytest.raises(UnsupportedFormat, match="ORT format"):
        read_model(b"\x18\0\0\0ORTM" + bytes(99))


def test_a_mapping_can_be_closed_while_its_error_is_held() -> None:
    mapping = mmap.mmap(-1, 4096)
    content = model(graph(node("A"), tensor(name=b"\xff")))
    mapping[: len(content)] = content
    with memoryview(mapping)[: len(content)] as view, pytest.raises(UnsupportedFormat) as caught:
        read_model(view)
    mapping.close()
    assert caught.value.__traceback__ is not None


# What it costs


@pytest.fixture
def descriptor() -> Iterator[int]:
    """An empty file that takes memory only where something was written or read."""
    descriptor = os.memfd_create("model")
    yield descriptor
    os.close(descriptor)


def _memory_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_weights_are_not_touched(descriptor: int) -> None:
    size = 1 << 30
    raw = encode_varint(delimited(9)) + encode_varint(size)
    weight = b"\x10\x01\x42\x01w" + raw
    head = encode_varint(delimited(5)) + encode_varint(len(weight) + size) + weight
    beginning = model(encode_varint(delimited(7)) + encode_varint(len(head) + size) + head)
    os.write(descriptor, beginning)
    os.ftruncate(descriptor, len(beginning) + size)
    before = _memory_of(descriptor)
    with mmap.mmap(descriptor, 0) as mapping:
        [found] = read_model(mapping).tensors
        assert found.span == Span(len(beginning), size)
        assert _memory_of(descriptor) == before
        assert mapping[size // 2] == 0
        assert _memory_of(descriptor) > before


def test_a_file_of_two_gibibytes(descriptor: int) -> None:
    os.write(descriptor, model(graph(node("Add"))))
    os.ftruncate(descriptor, 1 << 31)
    before = _memory_of(descriptor)
    with (
        mmap.mmap(descriptor, 0) as mapping,
        pytest.raises(UnsupportedFormat, match="2147483648 bytes"),
    ):
        read_model(mapping)
    assert _memory_of(descriptor) == before


def _fields_walked(content: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    walked = 0
    original = WireReader.fields

    def counting(self: WireReader, start: int, end: int) -> Any:
        nonlocal walked
        for field in original(self, start, end):
            walked += 1
            yield field

    with monkeypatch.context() as patch:
        patch.setattr(WireReader, "fields", counting)
        read_model(content)
    return walked


def test_work_is_linear_in_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(count: int) -> bytes:
        each = node("Add", attribute(b"\x18\x05"), attribute(graph(node("If"), field=6)))
        return model(graph(each * count))

    one, many = (_fields_walked(chain(count), monkeypatch) for count in (100, 1000))
    assert many < 10 * one
    assert many < 30 * 1000
