"""Where tensors lie in device memory.

Promise: tensors that the daemon places never overlap and are aligned; tensors and outline are
together the file, each byte once; the outline alone gives the same layout; no bytes make it raise
anything but a FormatError, or place a tensor where the file has none.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from trims_shim.errors import FormatError, TruncatedFile, UnsupportedFormat
from trims_shim.formats import (
    DeviceLayout,
    Placed,
    layout_of,
    read_archive,
    read_header,
    read_recipe,
)
from trims_shim.formats.device_layout import ALIGNMENT_BYTES
from trims_shim.formats.onnx_directory import directory_of
from trims_shim.specs import Record, Span

_FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SIZES = st.lists(
    st.integers(0, 20) | st.sampled_from([511, 512, 513, 1024, 1500]), min_size=1, max_size=12
)


def safetensors_of(sizes: list[int]) -> bytes:
    """A file of uint8 tensors of these sizes, without gaps."""
    entries, end = {}, 0
    for number, size in enumerate(sizes):
        entries[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + b"\xab" * end


def archive_of(tools: Any, sizes: list[int]) -> bytes:
    """A torch archive of storages of these sizes, with headers between them."""
    records = {f"data/{number}": b"\xab" * size for number, size in enumerate(sizes)}
    archive: bytes = tools.archive_of(
        {"data.pkl": b"\x80\x02N.", "version": b"3\n", **records, "byteorder": b"little"}
    )
    return archive


def files_of(tools: Any, sizes: list[int]) -> tuple[bytes, bytes]:
    return safetensors_of(sizes), archive_of(tools, sizes)


def outline_of(data: bytes, layout: DeviceLayout) -> bytes:
    """The file as a device tier keeps it on the host: zeros where the tensors were."""
    outline = bytearray(len(data))
    for span in layout.outline():
        outline[span.offset_bytes : span.end_bytes] = data[span.offset_bytes : span.end_bytes]
    return bytes(outline)


def naive_find(layout: DeviceLayout, offset_bytes: int, size_bytes: int) -> int | None:
    for each in layout.placed:
        start, end = each.source.offset_bytes, each.source.end_bytes
        if start <= offset_bytes and offset_bytes + size_bytes <= end:
            return each.offset_bytes + (offset_bytes - start)
    return None


def check(layout: DeviceLayout, file_bytes: int) -> None:
    """What holds of every layout, of whatever file."""
    for each in layout.placed:
        assert each.source.size_bytes > 0
        assert each.offset_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= each.source.offset_bytes <= each.source.end_bytes <= file_bytes
    for one, other in pairwise(layout.placed):
        assert one.source.end_bytes <= other.source.offset_bytes
        assert one.offset_bytes + one.source.size_bytes <= other.offset_bytes
    last = layout.placed[-1]
    assert layout.size_bytes == last.offset_bytes + last.source.size_bytes
    assert layout.size_bytes < file_bytes + ALIGNMENT_BYTES * len(layout.placed)
    assert layout.file_bytes == file_bytes
    spans = sorted(
        [*layout.outline(), *(each.source for each in layout.placed)],
        key=lambda span: span.offset_bytes,
    )
    position = 0
    for span in spans:
        assert span.offset_bytes == position, "a byte of the file in no part, or in two"
        assert span.size_bytes > 0
        position = span.end_bytes
    assert position == file_bytes


@given(sizes=SIZES.filter(any))
@_FUZZ
def test_every_layout_is_sound_and_that_of_its_outline(sizes: list[int], tools: Any) -> None:
    for data in files_of(tools, sizes):
        layout = layout_of(data)
        check(layout, len(data))
        assert [each.source.size_bytes for each in layout.placed] == [s for s in sizes if s]
        assert all(
            set(data[each.source.offset_bytes : each.source.end_bytes]) == {0xAB}
            for each in layout.placed
        )
        outline = outline_of(data, layout)
        assert layout_of(outline) == layout
        assert layout_of(outline).fingerprint() == layout.fingerprint()


@given(sizes=SIZES.filter(any), data=st.data())
@_FUZZ
def test_find_agrees_with_a_search(sizes: list[int], data: st.DataObject, tools: Any) -> None:
    for file in files_of(tools, sizes):
        layout = layout_of(file)
        edges = sorted(
            {
                edge
                for each in layout.placed
                for edge in (each.source.offset_bytes, each.source.end_bytes)
            }
        )
        near = st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 3, edge + 3))
        for _ in range(20):
            begin = data.draw(near)
            end = data.draw(near)
            if end > begin >= 0:
                expected = naive_find(layout, begin, end - begin)
                assert layout.find(begin, end - begin) == expected


def test_find_at_the_edges() -> None:
    layout = DeviceLayout((Placed(Span(100, 50), 0), Placed(Span(150, 10), 512)), 522, 200)
    assert layout.find(100, 50) == 0
    assert layout.find(149, 1) == 49
    assert layout.find(150, 10) == 512, "not the end of the tensor before it"
    assert layout.find(149, 2) is None, "half of it is another tensor's"
    assert layout.find(99, 2) is None
    assert layout.find(160, 1) is None
    assert layout.find(0, 200) is None


@given(st.tuples(SIZES.filter(any), SIZES.filter(any)))
@_FUZZ
def test_fingerprints_differ_when_layouts_differ(
    tools: Any, pair: tuple[list[int], list[int]]
) -> None:
    layouts = [layout_of(data) for sizes in pair for data in files_of(tools, sizes)]
    for one in layouts:
        for other in layouts:
            assert (one == other) == (one.fingerprint() == other.fingerprint())


def test_the_fingerprint_is_of_the_whole_file() -> None:
    """The same tensors at the same places, in a file with a longer end, are another layout."""
    placed = (Placed(Span(8, 8), 0),)
    one, other = DeviceLayout(placed, 8, 16), DeviceLayout(placed, 8, 17)
    assert one.fingerprint() != other.fingerprint()
    moved = DeviceLayout((Placed(Span(8, 8), 512),), 520, 16)
    assert moved.fingerprint() != one.fingerprint()


class TestRealFiles:
    def test_a_checkpoint(self, tools: Any, model_state: Any) -> None:
        data = tools.save(model_state)
        layout = layout_of(data)
        check(layout, len(data))
        outline = outline_of(data, layout)
        assert layout_of(outline) == layout
        archive = read_archive(outline)
        assert archive == read_archive(data)
        pickle = archive.records["data.pkl"]
        recipes = [
            read_recipe(each[pickle.offset_bytes : pickle.end_bytes]) for each in (data, outline)
        ]
        assert recipes[0].storages == recipes[1].storages
        assert recipes[0].tensors == recipes[1].tensors
        for storage in recipes[0].storages:
            record = archive.records[f"data/{storage.key}"]
            assert layout.find(record.offset_bytes, record.size_bytes) is not None
        assert layout.find(pickle.offset_bytes, pickle.size_bytes) is None

    def test_safetensors(self, model_state: Any) -> None:
        data = save_safetensors({k: v.contiguous() for k, v in model_state.items()})
        layout = layout_of(data)
        check(layout, len(data))
        outline = outline_of(data, layout)
        assert layout_of(outline) == layout
        assert read_header(outline) == read_header(data)
        for record in read_header(data):
            found = layout.find(record.span.offset_bytes, record.span.size_bytes)
            assert found is not None
            assert found % ALIGNMENT_BYTES == 0

    def test_a_mapped_file(self, tmp_path: Path) -> None:
        import mmap

        torch.save({"a": torch.ones(1000), "tied": torch.zeros(3)}, tmp_path / "m.pt")
        with (tmp_path / "m.pt").open("rb") as file:
            data = file.read()
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert layout_of(mapped) == layout_of(data)

    def test_tied_and_empty_storages(self, tools: Any) -> None:
        weight = torch.ones(7)
        data = tools.save({"a": weight, "b": weight[2:], "c": torch.ones(0), "d": torch.ones(1)})
        layout = layout_of(data)
        assert [each.source.size_bytes for each in layout.placed] == [28, 4]


class TestHostileFiles:
    @pytest.mark.parametrize("data", [b"", b"P", b"PK\x03\x04", bytes(7)])
    def test_too_short(self, data: bytes) -> None:
        with pytest.raises(TruncatedFile):
            layout_of(data)

    def test_no_tensor(self, tools: Any) -> None:
        for data in (
            safetensors_of([]),
            safetensors_of([0, 0]),
            archive_of(tools, [0]),
            tools.archive_of({"data.pkl": b"N.", "version": b"3\n", "data.bin": b"no tensor"}),
        ):
            with pytest.raises(UnsupportedFormat, match="no tensor"):
                layout_of(data)

    @pytest.mark.parametrize(
        "data", [b"\x80\x02}q\x00." * 20, b"\x93NUMPY\x01\x00" + bytes(200), b"{}" * 50]
    )
    def test_another_format(self, data: bytes) -> None:
        with pytest.raises(FormatError):
            layout_of(data)

    def test_every_truncation(self, tools: Any) -> None:
        for data in files_of(tools, [5, 600]):
            for size in range(len(data)):
                with pytest.raises(FormatError):
                    layout_of(data[:size])

    @pytest.mark.parametrize(
        "offsets", [[[0, 8], [0, 8]], [[0, 8], [4, 12]], [[8, 0], [8, 16]], [[0, 8], [9, 17]]]
    )
    def test_overlaps_and_gaps(self, offsets: list[list[int]]) -> None:
        entries = {
            f"t{number}": {"dtype": "U8", "shape": [8], "data_offsets": each}
            for number, each in enumerate(offsets)
        }
        header = json.dumps(entries).encode()
        with pytest.raises(FormatError):
            layout_of(len(header).to_bytes(8, "little") + header + bytes(32))

    @given(data=st.data(), sizes=SIZES.filter(any))
    @_FUZZ
    def test_damage(self, data: st.DataObject, sizes: list[int], tools: Any) -> None:
        for file in files_of(tools, sizes):
            damaged = bytearray(file)
            for _ in range(data.draw(st.integers(1, 4))):
                position = data.draw(st.integers(0, len(file) - 1))
                damaged[position] = data.draw(st.integers(0, 255))
            try:
                layout = layout_of(damaged)
            except FormatError:
                continue
            check(layout, len(damaged))

    @given(st.binary(max_size=120))
    def test_noise(self, data: bytes) -> None:
        for head in (b"", b"PK\x03\x04", (40).to_bytes(8, "little") + b"{"):
            with pytest.raises(FormatError):
                layout_of(head + data)


def test_weights_with_a_directory_at_their_end() -> None:
    records = (
        Record("a", Span(64, 12), "FLOAT", (3,)),
        Record("b", Span(128, 4), "FLOAT", (1,)),
    )
    layout = layout_of(bytes(256) + directory_of(records))
    assert layout.contents == records
    assert [(each.source, each.offset_bytes) for each in layout.placed] == [
        (Span(64, 12), 0),
        (Span(128, 4), 512),
    ]
    with pytest.raises(UnsupportedFormat, match="header begins with"):
        layout_of(bytes(256))
