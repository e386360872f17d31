"""The directory at the end of a prepared model's weights.

Promise: what was written is read again, from the file and from its outline; no bytes make it raise
anything but a FormatError, or list an initializer where the file has none.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.errors import CorruptFile, FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats import layout_of
from trims_shim.formats.onnx_directory import (
    ELEMENT_BYTES,
    MAGIC,
    directory_of,
    has_directory,
    read_directory,
)
from trims_shim.specs import Record, Span


def record(name: str, offset: int, *shape: int, dtype: str = "FLOAT") -> Record:
    size = ELEMENT_BYTES[dtype]
    for each in shape:
        size *= each
    return Record(name, Span(offset, size), dtype, shape)


RECORDS = (
    record("weight", 64, 16, 32),
    record("half", 4096, 7, dtype="FLOAT16"),
    record("größe ☃ \n", 8192, 3, 1, 5, dtype="INT8"),
)
DATA = bytes(range(256)) * 40


def with_text(text: bytes, data: bytes = DATA, *, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return data + text + size.to_bytes(8, "little") + MAGIC


def with_entries(entries: Any) -> bytes:
    return with_text(json.dumps(entries).encode())


def test_what_was_written_is_read() -> None:
    assert read_directory(DATA + directory_of(RECORDS)) == RECORDS


def test_the_order_of_writing_does_not_matter() -> None:
    assert directory_of(reversed(RECORDS)) == directory_of(RECORDS)


def test_a_scalar() -> None:
    records = (record("scalar", 8),)
    assert read_directory(DATA + directory_of(records)) == records


def test_nothing_listed() -> None:
    assert read_directory(DATA + directory_of(())) == ()
    with pytest.raises(UnsupportedFormat, match="holds no tensor"):
        layout_of(DATA + directory_of(()))


def test_bytes_before_are_the_device_images_and_the_rest_its_outline() -> None:
    content = DATA + directory_of(RECORDS)
    layout = layout_of(content)
    assert [each.source for each in layout.placed] == [each.span for each in RECORDS]
    assert [each.offset_bytes % 512 for each in layout.placed] == [0, 0, 0]
    outline = bytearray(len(content))
    for span in layout.outline():
        outline[span.offset_bytes : span.end_bytes] = content[span.offset_bytes : span.end_bytes]
    assert layout_of(bytes(outline)) == layout
    assert read_directory(bytes(outline)) == RECORDS


@pytest.mark.parametrize(
    "start",
    [
        bytes(64),
        (1000).to_bytes(8, "little") + b"{" + bytes(55),
        (8).to_bytes(8, "little") + b'{"a": 1}' + bytes(48),
        (1 << 63).to_bytes(8, "little") + bytes(56),
        b"\xff" * 64,
    ],
)
def test_weights_may_begin_like_another_format(start: bytes) -> None:
    content = start + DATA[64:] + directory_of(RECORDS)
    assert [each.source for each in layout_of(content).placed] == [each.span for each in RECORDS]


def test_files_without_one() -> None:
    for content in (b"", MAGIC[1:], MAGIC, DATA, DATA + MAGIC[:-1], MAGIC + DATA):
        assert not has_directory(content)
        with pytest.raises(UnsupportedFormat, match="no directory"):
            read_directory(content)


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (with_text(b"{}", length=200_000_000), UnsupportedFormat, "more than"),
        (with_text(b"{}", length=50_000), TruncatedFile, "before it"),
        (with_text(b"{"), CorruptFile, "not JSON"),
        (with_text(b"\xff\xff"), CorruptFile, "not JSON"),
        (with_text(b""), CorruptFile, "not JSON"),
        (with_text(b"[" * 100_000), CorruptFile, "not JSON"),
        (with_text(b"[]"), CorruptFile, "not a JSON object"),
        (with_text(b'{"a":["INT8",[],0],"a":["INT8",[],1]}'), CorruptFile, "twice"),
        (with_entries({"a": 1}), CorruptFile, "three values"),
        (with_entries({"a": ["FLOAT", [1]]}), CorruptFile, "three values"),
        (with_entries({"a": ["STRING", [1], 0]}), UnsupportedFormat, "dtype"),
        (with_entries({"a": [["FLOAT"], [1], 0]}), UnsupportedFormat, "dtype"),
        (with_entries({"a": ["FLOAT", 1, 0]}), CorruptFile, "shape"),
        (with_entries({"a": ["FLOAT", [-1], 0]}), CorruptFile, "shape"),
        (with_entries({"a": ["FLOAT", [True], 0]}), CorruptFile, "shape"),
        (with_entries({"a": ["FLOAT", [1.0], 0]}), CorruptFile, "shape"),
        (with_entries({"a": ["FLOAT", [1], -1]}), CorruptFile, "offset"),
        (with_entries({"a": ["FLOAT", [1], "0"]}), CorruptFile, "offset"),
        (with_entries({"a": ["FLOAT", [0], 0]}), CorruptFile, "empty"),
        (with_entries({"a": ["FLOAT", [1 << 40, 1 << 40], 0]}), CorruptFile, "huge"),
        (with_entries({"a": ["FLOAT", [0, 1 << 62, 4], 0]}), CorruptFile, "empty"),
        (with_entries({"a": ["FLOAT", [2], 8], "b": ["INT8", [1], 15]}), CorruptFile, "overlaps"),
        (with_entries({"a": ["INT8", [1], 8], "b": ["INT8", [1], 0]}), CorruptFile, "order"),
        (with_entries({"a": ["INT8", [len(DATA) + 1], 0]}), TruncatedFile, "initializers end"),
        (with_entries({"a": ["INT8", [1], len(DATA)]}), TruncatedFile, "initializers end"),
    ],
)
def test_every_way_to_be_wrong(content: bytes, error: type[FormatError], match: str) -> None:
    with pytest.raises(error, match=match):
        read_directory(content)


def test_the_last_byte_of_the_weights_may_be_listed() -> None:
    found = read_directory(with_entries({"a": ["INT8", [1], len(DATA) - 1]}))
    assert found[0].span == Span(len(DATA) - 1, 1)


@given(st.binary(max_size=200), st.binary(max_size=60), st.integers(0, 80))
def test_no_bytes_raise_anything_else(data: bytes, text: bytes, length: int) -> None:
    content = with_text(text, data, length=length)
    try:
        records = read_directory(content)
    except FormatError:
        return
    assert all(each.span.end_bytes <= len(content) for each in records)


@given(st.data())
def test_damage_is_noticed_or_harmless(data: st.DataObject) -> None:
    content = bytearray(DATA + directory_of(RECORDS))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(len(DATA), len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    try:
        layout = layout_of(bytes(content))
    except FormatError:
        return
    for each in layout.placed:
        assert each.source.end_bytes <= len(content) - len(MAGIC) - 8
