"""A web server, an empty cache directory, and no pauses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trims_shim import config
from trims_shim.remote import copies, downloading, fetching
from trims_shim.remote import web as web_module

from .web_server import WebServer, serving


@pytest.fixture
def web() -> Iterator[WebServer]:
    """One for each test: streams that were given up may ask their server once more, later."""
    with serving() as server:
        yield server


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Settings of this process; the cache directory is the test's own."""
    base = {"HOME": str(tmp_path), "TRIMS_CACHE_DIR": str(tmp_path / "cache")}

    def use(**variables: str) -> None:
        monkeypatch.setattr(config, "_current", config.load(base | variables))

    use()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(downloading, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(web_module, "_PAUSES_S", (0.001,))
    monkeypatch.setattr(fetching, "_POLL_S", 0.01)
    yield use
    forget()


@pytest.fixture
def home(settings: Callable[..., None], tmp_path: Path) -> Path:
    """The directory of copies; made by the first."""
    return tmp_path / "cache" / "remote"


def forget() -> None:
    """Give up what this process uses, as its exit would."""
    assert not copies._filling, "a download has not been given up"
    for descriptor in copies._held.values():
        descriptor.close()
    copies._held.clear()
    copies._asked.clear()


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))
