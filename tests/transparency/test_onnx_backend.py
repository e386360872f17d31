"""A part of the onnx package's backend tests: outcomes and bits as without the shim.

All of them by hand: ``python -m tests.transparency.onnx_backend``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import onnx_backend, shim

pytestmark = pytest.mark.slow

SELECTION = {"match": "", "every": 48, "start": 0}


@pytest.fixture(scope="module")
def results() -> Iterator[tuple[onnx_backend.Results, onnx_backend.Results]]:
    with shim.SocketDirectory() as sockets:
        yield onnx_backend.run_both(SELECTION, sockets, 400)


@pytest.mark.timeout(500)
def test_outcomes_are_those_without_the_shim(
    results: tuple[onnx_backend.Results, onnx_backend.Results],
) -> None:
    assert onnx_backend.problems(*results) == []


@pytest.mark.timeout(500)
def test_enough_of_them_ran_and_were_served(
    results: tuple[onnx_backend.Results, onnx_backend.Results],
) -> None:
    original, shimmed = results
    passed = [name for name, seen in original["first"].items() if seen["outcome"] == "passed"]
    served = [name for name, seen in shimmed["second"].items() if seen["served"]]
    assert len(passed) >= 20
    assert len(served) >= len(passed) * 0.8


def test_a_difference_is_noticed() -> None:
    seen = {"outcome": "passed", "detail": "", "outputs": ["a"]}
    original = {"first": {"t": seen}, "second": {"t": seen}}
    for change in ({"outcome": "failed"}, {"detail": "other"}, {"outputs": ["b"]}):
        shimmed = {"first": {"t": seen}, "second": {"t": seen | change}}
        assert len(onnx_backend.problems(original, shimmed)) == 1
    assert onnx_backend.problems(original, {"first": {}, "second": {}})
    assert onnx_backend.problems(original, original) == []
