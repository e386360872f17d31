"""The onnxruntime of this process, told apart from every other."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as binding
import pytest

from trims_shim.daemon.preparer.installation import Installation, installation


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of an installation that is in another place."""
    path = tmp_path / "onnxruntime" / "capi" / "state.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    monkeypatch.setattr(binding, "__file__", str(path))
    installation.cache_clear()
    yield path
    installation.cache_clear()


def fresh() -> Installation:
    installation.cache_clear()
    return installation()


def test_this_one() -> None:
    found = installation()
    assert os.path.samefile(found.package, os.path.dirname(onnxruntime.__file__))
    assert found.runtime == binding.get_version_string()
    assert found.build.startswith(binding.get_build_info())


def test_builds_of_one_version_are_told_apart(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fresh()
    assert before.package == str(library.parent.parent)
    os.utime(library, ns=(1, 1))
    younger = fresh()
    library.write_bytes(b"123456")
    os.utime(library, ns=(1, 1))
    larger = fresh()
    monkeypatch.setattr(binding, "get_build_info", lambda: "another compiler")
    built = fresh()
    monkeypatch.setattr(binding, "get_version_string", lambda: "9")
    newer = fresh()
    assert len({before, younger, larger, built, newer}) == 5
    assert newer.runtime == "9"


def note(owner: bytes, kind: int, content: bytes) -> bytes:
    padded = [part + bytes(-len(part) % 4) for part in (owner, content)]
    return struct.pack("<III", len(owner), len(content), kind) + b"".join(padded)


def elf(build_id: bytes, *, magic: bytes = b"\x7fELF\2\1") -> bytes:
    """A library of nothing but notes: ones of other kinds, of others and nowhere, and its ID."""
    nowhere = note(b"GNU\0", 3, b"none")
    parts = [
        (1, nowhere),
        (4, note(b"GNU\0", 1, b"abcde") + note(b"Go\0", 3, b"of Go")),
        (1, nowhere),
        (4, note(b"other", 3, b"of it") + note(b"GNU\0", 1, b"abcd") + note(b"GNU\0", 3, build_id)),
    ]
    content = struct.pack("<6s10x16xQ14xHH6x8x", magic, 72, 56, len(parts))
    offset = len(content) + 56 * len(parts)
    for kind, notes in parts:
        content += struct.pack("<IIQQQQQQ", kind, 0, offset, 0, 0, len(notes), len(notes), 4)
        offset += len(notes)
    return content + b"".join(notes for _, notes in parts)


def test_a_build_is_the_same_in_every_container(library: Path) -> None:
    """pip gives the files of each installation another time."""
    library.write_bytes(elf(b"20 bytes that tell it"))
    one = fresh()
    assert f" of {b'20 bytes that tell it'.hex()};" in one.build
    os.utime(library, ns=(1, 1))
    assert fresh() == one
    library.write_bytes(elf(b"20 bytes of another 1"))
    assert fresh() != one


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_id_is_the_linkers() -> None:
    told = subprocess.run(
        ["readelf", "-n", binding.__file__], capture_output=True, text=True, check=True
    )
    (build_id,) = re.findall(r"Build ID: ([0-9a-f]+)", told.stdout)
    assert build_id in fresh().build


def test_what_is_no_library_is_told_by_its_time(library: Path) -> None:
    whole = elf(b"20 bytes that tell it")
    for length in range(len(whole)):
        library.write_bytes(whole[:length])
        os.utime(library, ns=(7, 7))
        has_id = length > len(whole) - 24
        assert (f"{length} bytes of 7;" in fresh().build) != has_id, length
    library.write_bytes(elf(b"ID", magic=b"\x7fELF\1\1"))
    os.utime(library, ns=(7, 7))
    assert "bytes of 7;" in fresh().build


def test_libraries_of_c_are_told_apart(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants are computed with its functions."""
    before = fresh()
    monkeypatch.setattr(os, "confstr", lambda name: f"{name}: 9")
    assert fresh().build.endswith("; CS_GNU_LIBC_VERSION: 9")
    monkeypatch.setattr(os, "confstr_names", {})  # a system without it
    assert fresh().build.endswith("; ")
    assert fresh() != before


def test_the_packages_version_says_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: of Debian's and nightly builds it is another, so that they were never served.

    The package takes it at the end of its import; the client looks before.
    """
    before = fresh()
    monkeypatch.setattr(onnxruntime, "__version__", "9")
    assert fresh() == before


def test_what_is_installed_afterwards_is_not_what_is_loaded(library: Path) -> None:
    before = fresh()
    library.write_bytes(b"an upgrade, while this process runs")
    assert installation() == before
