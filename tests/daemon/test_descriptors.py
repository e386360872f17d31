"""How many descriptors are left, whatever their numbers."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator

import pytest

from trims_shim.daemon import descriptors
from trims_shim.daemon.descriptors import are_scarce, check_descriptors, limit
from trims_shim.errors import TooManyRequests


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    descriptors._is_told.cache_clear()
    yield
    descriptors._is_told.cache_clear()


@pytest.mark.parametrize(("most", "first_scarce"), [(1000, 751), (100_000, 100_001 - 8192)])
@pytest.mark.parametrize("reserved", [0, 10])
def test_some_are_kept(
    monkeypatch: pytest.MonkeyPatch, most: int, first_scarce: int, reserved: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    monkeypatch.setattr(descriptors, "_open_count", lambda: first_scarce - reserved)
    with pytest.raises(TooManyRequests, match="ulimit"):
        check_descriptors(reserved=reserved)
    monkeypatch.setattr(descriptors, "_open_count", lambda: first_scarce - reserved - 1)
    check_descriptors(reserved=reserved)


@pytest.mark.parametrize("is_told", [False, True], ids=["read", "told"])
def test_those_above_the_newest_count(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """Found: the lowest free number was taken for their count."""
    if not is_told:
        monkeypatch.setattr(descriptors, "_is_told", lambda: False)
    elif not descriptors._is_told():
        pytest.skip("this kernel does not tell how many are open")
    before = descriptors._open_count()
    held = [os.dup(0) for _ in range(100)]
    try:
        for each in held[:50]:
            os.close(each)
        # Threads of other tests may still close, or open, some.
        assert 25 < descriptors._open_count() - before < 75
    finally:
        for each in held[50:]:
            os.close(each)


def test_a_directory_that_has_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in sandboxes."""
    monkeypatch.setattr(descriptors, "_OPEN", "/")
    monkeypatch.setattr(os, "stat", lambda _: os.stat_result((0,) * 6 + (4096,) + (0,) * 3))
    assert descriptors._open_count() == len(os.listdir("/"))


def test_none_is_left_to_count_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_is_told", lambda: False)
    monkeypatch.setattr(descriptors, "_OPEN", "/nowhere")
    assert are_scarce()


def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sandbox may say, with a negative number. Found: every client was refused."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert limit() == sys.maxsize
    assert not are_scarce()
