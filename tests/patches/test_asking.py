"""What a step of a patch raises never reaches the program, whatever its settings are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from trims_shim import diagnostics
from trims_shim.client import descriptors
from trims_shim.errors import ConfigError, WireError
from trims_shim.patches import asking


@asking.or_none
def step() -> None:
    raise WireError("what the daemon sends is nonsense")


def test_an_unexpected_error_passes_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallbacks: list[str] = []
    monkeypatch.setattr(diagnostics, "fallback", lambda reason, _: fallbacks.append(reason))
    config = SimpleNamespace(strict=False)
    monkeypatch.setattr(asking, "cache", lambda: SimpleNamespace(config=config))
    assert step() is None
    config.strict = True
    with pytest.raises(WireError):
        step()
    monkeypatch.setattr(diagnostics, "EXPECTED_REASONS", {WireError.reason})
    assert step() is None
    assert fallbacks == [WireError.reason] * 2


def test_settings_that_cannot_be_read_are_not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> None:
        raise ConfigError("TRIMS_STRICT: 'perhaps' is neither yes nor no")

    fallbacks: list[str] = []
    monkeypatch.setattr(diagnostics, "fallback", lambda reason, _: fallbacks.append(reason))
    monkeypatch.setattr(asking, "cache", unreadable)
    assert step() is None
    assert fallbacks == [WireError.reason]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object, str], None]]:
    """Have a function interrupted by a signal whose handler raises TimeoutError."""

    def handler(*_: object) -> None:
        raise TimeoutError("the program's")

    before = signal.signal(signal.SIGUSR1, handler)

    def interrupt(where: object, name: str) -> None:
        monkeypatch.setattr(where, name, lambda *_: signal.raise_signal(signal.SIGUSR1))

    yield interrupt
    monkeypatch.undo()
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_while_a_file_is_named(
    interrupted: Callable[[object, str], None],
) -> None:
    interrupted(os.path, "abspath")
    with pytest.raises(TimeoutError, match="the program's"):
        asking.absolute("model.pt")


def test_what_a_handler_raises_while_streams_are_held(
    interrupted: Callable[[object, str], None],
) -> None:
    interrupted(descriptors, "_takes_stream")
    with pytest.raises(TimeoutError, match="the program's"), descriptors.above_streams():
        pytest.fail("the block began")
