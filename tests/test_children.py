"""What other interpreters are told of this one, what they are called, and what they answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import trims_shim
from trims_shim import children
from trims_shim.children import NoAnswer, ask_child, search_path


def test_directories_that_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = ["/one", Path("/two"), b"/three", None, "four", "", "/five:/six", "/\udcff"]
    monkeypatch.setattr(sys, "path", strange)
    own = str(Path(trims_shim.__file__).parents[1])
    assert search_path() == [own, "/one", "/five:/six", "/\udcff"]


def test_modules_of_python_are_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the daemon imported a script's neighbour in place of ``bisect``."""
    library = str(Path(os.__file__).parent)
    own = str(Path(trims_shim.__file__).parents[1])
    monkeypatch.setattr(sys, "path", ["/script", own, library, f"{library}/lib-dynload", "/site"])
    assert search_path() == [library, f"{library}/lib-dynload", own, "/script", "/site"]


def test_info_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/")])
    assert trims_shim.info()


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoAnswer, match="ValueError: broken"):
        ask_child("raise ValueError('broken')")
    with pytest.raises(NoAnswer, match="status 7"):
        ask_child("sys.exit(7)")
    with pytest.raises(NoAnswer):
        ask_child("print('no json')")
    monkeypatch.setattr(children, "_TIMEOUT_S", 0.2)
    with pytest.raises(NoAnswer, match=r"^no answer within 0.2 s$"):
        ask_child("import time; time.sleep(60)")
