"""The libraries are built once, by whoever is first, and never taken from an older source."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emulated_cuda import NoCompiler, building

build = building.build.__wrapped__


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is built yet, and there is little to build: one function in one library."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "answer.c").write_text("int answer(void) { return 41; }\n")
    (tmp_path / "tmp").mkdir()
    flags = tuple(flag for flag in building._FLAGS if flag != "-fvisibility=hidden")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(building, "_SOURCES", tmp_path / "src")
    monkeypatch.setattr(building, "_LIBRARIES", {"libanswer.so.1": ("answer.c",)})
    monkeypatch.setattr(building, "_FLAGS", flags)
    return tmp_path / "src"


def answer(directory: Path) -> int:
    return int(ctypes.CDLL(str(directory / "libanswer.so.1")).answer())


def test_built_once(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build()
    assert answer(directory) == 41
    monkeypatch.setattr(building, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build() == directory


def test_a_changed_source_is_built_anew(sources: Path) -> None:
    before = build()
    (sources / "answer.c").write_text("int answer(void) { return 42; }\n")
    after = build()
    assert (answer(before), answer(after)) == (41, 42)


def test_concurrent_builds_agree_and_leave_nothing(sources: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = {each.result() for each in [pool.submit(build) for _ in range(4)]}
    assert len(found) == 1
    directory = found.pop()
    assert answer(directory) == 41
    assert list(directory.parent.iterdir()) == [directory]


def test_an_error_of_the_compiler_is_shown(sources: Path) -> None:
    (sources / "answer.c").write_text("int answer(void) { int unused; return 41; }\n")
    with pytest.raises(RuntimeError, match="unused variable"):
        build()
    assert list(Path(building._base()).iterdir()) == []


def test_without_a_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoCompiler, match="no-such-compiler"):
        build()


def test_a_place_that_someone_prepared_is_not_used(sources: Path) -> None:
    base = building._base()
    base.rmdir()
    base.symlink_to(sources)
    with pytest.raises(RuntimeError, match="not a directory of this user"):
        build()
