"""The onnxruntime of this process, told apart from every other."""

from __future__ import annotations

import os
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
    assert found.runtime == onnxruntime.__version__
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
    monkeypatch.setattr(onnxruntime, "__version__", "9")
    newer = fresh()
    assert len({before, younger, larger, built, newer}) == 5
    assert newer.runtime == "9"


def test_what_is_installed_afterwards_is_not_what_is_loaded(library: Path) -> None:
    before = fresh()
    library.write_bytes(b"an upgrade, while this process runs")
    assert installation() == before
