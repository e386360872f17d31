"""What other interpreters are told of this one, and what they are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trims_shim
from trims_shim.children import search_path


def test_directories_that_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = ["/one", Path("/two"), b"/three", None, "four", "", "/five:/six", "/\udcff"]
    monkeypatch.setattr(sys, "path", strange)
    own = str(Path(trims_shim.__file__).parents[1])
    assert search_path() == [own, "/one", "/five:/six", "/\udcff"]


def test_info_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/")])
    assert trims_shim.info()
