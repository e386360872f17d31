"""Models that are prepared before they are needed: how long somebody waits for that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import World

from trims_shim.errors import DaemonTimeout, NotServed
from trims_shim.patches import onnxruntime_warm

PREPARING = NotServed("preparing", "its turn will come")


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"a model")
    return str(path)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Answer requests with these objects, or errors; what of them is left."""

    def answer(*answers: Any) -> list[Any]:
        left = list(answers)

        def open_prepared(*_: Any, **__: Any) -> Any:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(onnxruntime_warm, "open_prepared", open_prepared)
        return left

    return answer


def test_it_is_asked_for_until_it_is_there(path: str, answer: Callable[..., list[Any]]) -> None:
    model = object()
    answer(PREPARING, PREPARING, PREPARING, model)
    waits: list[None] = []
    before = World.descriptors(os.getpid()).items()
    assert onnxruntime_warm.prepare(path, waiting=lambda: waits.append(None)) is model
    assert World.descriptors(os.getpid()).items() <= before
    assert len(waits) == 3


def test_not_for_ever(
    path: str, answer: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_warm, "_PATIENCE_S", -1e6)
    left = answer(*[PREPARING] * 9)
    with pytest.raises(DaemonTimeout):
        onnxruntime_warm.prepare(path)
    assert len(left) == 8


def test_not_after_a_refusal(path: str, answer: Callable[..., list[Any]]) -> None:
    left = answer(NotServed("outputs_differ", "other bits in y"), PREPARING)
    with pytest.raises(NotServed, match="other bits"):
        onnxruntime_warm.prepare(path)
    assert left == [PREPARING]
