"""TorchScript archives without their weights, and where the weights are."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, List  # noqa: UP035 - TorchScript knows no other

import pytest
import torch

from tests.script_models import BATCH, SHARED, Model, Restoring, load, saved
from trims_shim.errors import CorruptFile, FormatError, UnsupportedFormat
from trims_shim.patches import torch_script_archive
from trims_shim.patches.torch_script_archive import read_script
from trims_shim.patches.torch_script_pickle import read_script_pickle


@pytest.fixture(scope="module")
def archive() -> bytes:
    return saved(Model().eval(), **{"note.txt": "seen"})


def records(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def changed(
    content: bytes,
    *,
    compression: int = zipfile.ZIP_STORED,
    is_aligned: bool = True,
    **changes: bytes | None,
) -> bytes:
    """The archive with other contents of some records; None: without it."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w") as archive:
        for name in source.namelist():
            new = changes.get(name.partition("/")[2], source.read(name))
            if new is not None:
                info = zipfile.ZipInfo(name)
                info.compress_type = compression
                if is_aligned:  # as torch does
                    padding = bytes(-(made.tell() + 30 + len(name) + 4) % 64)
                    info.extra = struct.pack("<HH", 0x4246, len(padding)) + padding
                archive.writestr(info, new)
    return made.getvalue()


def attribute(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


def test_each_weight_is_a_record_of_the_archive(archive: bytes) -> None:
    plain = load(io.BytesIO(archive))
    found = {}
    for tensor, record in read_script(io.BytesIO(archive)).weights:
        expected = attribute(plain, tensor.path)
        found[tensor.path] = expected.data_ptr()
        assert (tensor.size, tensor.stride) == (tuple(expected.shape), expected.stride())
        assert (tensor.offset, f"torch.{tensor.dtype}") == (0, str(expected.dtype))
        content = bytearray(archive[record.offset_bytes : record.end_bytes])
        bytes_of = torch.frombuffer(content, dtype=expected.dtype)
        assert torch.equal(bytes_of.as_strided(tensor.size, tensor.stride), expected)
    shared = {attribute(plain, tuple(name.split("."))).data_ptr() for name in SHARED}
    assert sorted(found.values()) == sorted(shared)


def test_torch_reads_the_rest(archive: bytes) -> None:
    script = read_script(io.BytesIO(archive))
    module = load(io.BytesIO(script.archive))
    empty = {tensor.path for tensor, _ in script.weights}
    assert all(attribute(module, path).shape == (0,) for path in empty)
    assert (module.listed[0].shape, module.low.shape, module.count) == ((2048,), (2048,), 7)
    assert module.inner.weight.requires_grad
    assert not module.coarse.requires_grad
    mine, whole = records(script.archive), records(archive)
    gone = {tensor.name for tensor, _ in script.weights}
    assert mine.keys() == whole.keys() - gone
    assert [name for name in mine if mine[name] != whole[name]] == ["data.pkl"]


def test_the_key_of_a_storage_may_be_the_name_of_an_attribute() -> None:
    """Then it is written once, and referred to."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(3)])
    weights = read_script(io.BytesIO(saved(model))).weights
    assert {tensor.path for tensor, _ in weights} == {(f"{n}", "weight") for n in range(3)}


def test_tensors_that_share_a_storage_stay(archive: bytes) -> None:
    paths = {tensor.path for tensor, _ in read_script(io.BytesIO(archive)).weights}
    assert not paths & {("low",), ("high",)}


def test_a_class_that_restores_itself_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="restores itself"):
        read_script(io.BytesIO(saved(Restoring())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constants.pkl": None}, "not a TorchScript archive"),
        ({"data.pkl": None}, "not a TorchScript archive"),
        ({"byteorder": b"big"}, "order of bytes"),
        ({"data.pkl": pickle.dumps(1, 2)}, "not of a module"),
        ({"data.pkl": b"\x80\x02cos\nsystem\n)R."}, "not of a module"),
        ({"data.pkl": b"\x80\x02c__torch__.torch.classes\nX\n."}, "only torch can restore"),
    ],
)
def test_other_archives_are_refused(
    archive: bytes, changes: dict[str, bytes | None], message: str
) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        read_script(io.BytesIO(changed(archive, **changes)))


def test_weights_that_are_constants_of_the_graph_stay() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(64, 64).eval()))
    with pytest.raises(UnsupportedFormat, match="in large tensors"):
        read_script(io.BytesIO(saved(frozen)))


@pytest.mark.parametrize("changes", [{}, {"byteorder": None}], ids=["now", "before torch 2.1"])
def test_records_that_are_where_torch_puts_them(
    archive: bytes, changes: dict[str, bytes | None]
) -> None:
    found = read_script(io.BytesIO(changed(archive, **changes))).weights
    assert [each.tensor for each in found] == [
        each.tensor for each in read_script(io.BytesIO(archive)).weights
    ]


@pytest.mark.parametrize("options", [{"is_aligned": False}, {"compression": zipfile.ZIP_DEFLATED}])
def test_records_that_cannot_be_mapped_stay(archive: bytes, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat, match="large tensor"):
        read_script(io.BytesIO(changed(archive, **options)))


@pytest.mark.parametrize("more_bytes", [64, -64])
def test_a_record_that_is_not_as_long_as_the_pickle_says_stays(
    archive: bytes, more_bytes: int
) -> None:
    odd, *others = (each.tensor for each in read_script(io.BytesIO(archive)).weights)
    record = records(archive)[f"data/{odd.key}"]
    record = record + bytes(more_bytes) if more_bytes > 0 else record[:more_bytes]
    script = read_script(io.BytesIO(changed(archive, **{f"data/{odd.key}": record})))
    assert [each.tensor for each in script.weights] == others
    assert records(script.archive)[f"data/{odd.key}"] == record


def test_a_record_that_is_not_where_the_directory_says_is_corrupt(archive: bytes) -> None:
    """Torch finds that out, too, and raises its own error."""
    tensor = read_script(io.BytesIO(archive)).weights[0].tensor
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        (info,) = (
            each for each in opened.infolist() if each.filename.endswith(f"data/{tensor.key}")
        )
    damaged = bytearray(archive)
    damaged[info.header_offset] ^= 1
    with pytest.raises(CorruptFile, match="no local header"):
        read_script(io.BytesIO(damaged))
    with pytest.raises(RuntimeError):
        load(io.BytesIO(damaged))


@pytest.mark.parametrize("name", ["data/3", "constants.pkl"])
def test_a_record_that_reaches_into_the_next_is_corrupt(archive: bytes, name: str) -> None:
    """Torch reads it; the next one may be gone."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        (info,) = (each for each in opened.infolist() if each.filename.endswith(name))
    damaged = bytearray(archive)
    damaged[info.header_offset + 29] ^= 1  # 256 bytes more before the data
    with pytest.raises(CorruptFile, match="reaches into the next"):
        read_script(io.BytesIO(damaged))


def with_entry(content: bytes, name: str, offset: int, value: int) -> bytes:
    """The archive with another number of 32 bits in the directory's first entry of that name."""
    position = content.index(b"PK\x01\x02")
    while name.encode() not in content[position + 46 :][:80].partition(b"PK\x01\x02")[0]:
        position = content.index(b"PK\x01\x02", position + 1)
    position += offset
    return content[:position] + struct.pack("<I", value) + content[position + 4 :]


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: b"junk" * 16 + content,
        lambda content: with_entry(content, "code/", 24, 9999),  # Its size.
        lambda content: with_entry(content, "data/0", 8, 1),  # Flags: encrypted.
        lambda content: with_entry(content, "data/0", 20, 9),  # Its size when compressed.
        lambda content: with_entry(content, "data/0", 38, 16),  # Attributes: a directory.
    ],
    ids=["junk before", "size", "encrypted", "compressed size", "directory"],
)
def test_what_torch_refuses_is_refused(archive: bytes, damaged: Callable[[bytes], bytes]) -> None:
    """Here, or by torch in the archive that is left, though Python's zipfile does not look."""
    content = damaged(archive)
    with pytest.raises((UnsupportedFormat, RuntimeError)):
        load(io.BytesIO(read_script(io.BytesIO(content)).archive))


def test_names_that_differ_in_case_only_are_refused(archive: bytes) -> None:
    made = io.BytesIO(archive)
    with zipfile.ZipFile(made, "a") as opened:
        opened.writestr(f"{opened.namelist()[0].partition('/')[0]}/DATA.pkl", b"")
    with pytest.raises(UnsupportedFormat, match="of one name"):
        read_script(made)


def test_names_that_zipfile_reads_differently_are_refused(archive: bytes) -> None:
    renamed = archive.replace(b"/constants.pkl", b"/data/99\0xyzab")
    with pytest.raises(UnsupportedFormat, match="torch does not write"):
        read_script(io.BytesIO(renamed))


def test_records_that_the_end_record_does_not_count_are_refused(archive: bytes) -> None:
    shorter = bytearray(changed(archive))
    count = int.from_bytes(shorter[-12:-10], "little") - 1
    struct.pack_into("<HH", shorter, len(shorter) - 14, count, count)
    with pytest.raises(CorruptFile, match=f"{count} records at"):
        read_script(io.BytesIO(shorter))


def test_a_directory_that_only_zipfile_reads_is_refused(archive: bytes) -> None:
    content = changed(archive)
    size, start = struct.unpack_from("<II", content, len(content) - 10)
    directory, end = content[start : start + size], bytearray(content[-22:])
    place = start + size + len(end)
    # The end record's comment is the directory that it gives the place of: torch's.
    struct.pack_into("<IH", end, 16, place, size)
    moved = bytearray(directory)
    for match in re.finditer(rb"PK\x01\x02", directory):
        at = match.start() + 42
        (offset,) = struct.unpack_from("<I", moved, at)
        struct.pack_into("<I", moved, at, offset + place - start)
    crafted = content[:start] + moved + end + directory
    assert zipfile.ZipFile(io.BytesIO(crafted)).testzip() is None
    torch._C.PyTorchFileReader(io.BytesIO(crafted))
    with pytest.raises(FormatError):
        read_script(io.BytesIO(crafted))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no archive" * 100])
def test_what_is_no_archive_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptFile):
        read_script(io.BytesIO(content))


def test_deep_and_cut_pickles_end_in_an_error(archive: bytes) -> None:
    nested = b"c__torch__\nX\n)\x81}X\x01\x00\x00\x00a"
    deep = b"\x80\x02" + nested * 1000 + b"N" + b"sb" * 1000 + b"."
    with pytest.raises(UnsupportedFormat, match="depth"):
        read_script_pickle(deep)
    data = records(archive)["data.pkl"]
    for end in range(0, len(data), 7):
        with pytest.raises(CorruptFile):
            read_script_pickle(data[:end])


def test_damaged_archives_end_in_an_error_or_are_whole(archive: bytes) -> None:
    """Damage to a large record is for whoever maps it: torch does not look for it, either."""
    whole = read_script(io.BytesIO(archive)).archive
    chance = random.Random(0)
    for _ in range(500):
        damaged = bytearray(archive)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(FormatError):
            assert len(read_script(io.BytesIO(damaged)).archive) == len(whole)


class Noted(torch.nn.Module):
    """Something that is no weight, in the pickle."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = torch.ones(64, 64)
        self.numbers: List[int] = list(range(numbers))  # noqa: UP006

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.weight * len(self.numbers)


def test_much_beside_the_weights_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is quicker with it, and leaves extra files where they are."""
    little, much = io.BytesIO(saved(Noted(9), a="x" * 99)), saved(Noted(9), a="x" * 99_999)
    assert [weight.tensor.path for weight in read_script(little).weights] == [("weight",)]
    monkeypatch.setattr(
        torch_script_archive, "read_script_pickle", lambda data: pytest.fail("read")
    )
    for content in (much, saved(Noted(9999))):
        with pytest.raises(UnsupportedFormat, match=r"of a pickle\) beside 16384 in large"):
            read_script(io.BytesIO(content))


def test_many_small_records_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(32)]))
    monkeypatch.setattr(zipfile, "ZipFile", lambda file: pytest.fail("was read"))
    with pytest.raises(UnsupportedFormat, match=r"\d\d records in \d+ bytes"):
        read_script(io.BytesIO(content))


def test_results_of_what_is_read(archive: bytes) -> None:
    """The fixture is a model that runs."""
    assert load(io.BytesIO(archive))(BATCH).shape == (2, 64)
