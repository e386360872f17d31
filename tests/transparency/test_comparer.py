"""The suite can fail: the comparer notices each kind of difference, and the runner's traps work."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENCE_S

from . import child, compare, shim
from .observe import Normaliser, Observer
from .registry import Case, Work, attempt


def _value() -> dict[str, Any]:
    tensor = torch.arange(6.0).reshape(2, 3)
    return {"a": tensor, "b": tensor[1:], "c": tensor, "d": [1, None], "e": KeyError("message")}


def _observed(value: Any) -> dict[str, Any]:
    return {"value": Observer(Normaliser("/work")).describe(value), "warnings": [], "output": []}


def _changed(key: str, value: Any) -> dict[str, Any]:
    return _value() | {key: value}


BASE = torch.arange(6.0).reshape(2, 3)
CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: _changed("a", BASE.double()), "value.items.a.dtype"),
    "shape": (lambda: _changed("a", BASE.reshape(3, 2)), "value.items.a.shape.0"),
    "value": (lambda: _changed("a", BASE + 1), "value.items.a.sha256"),
    "strides": (lambda: _changed("a", BASE.t().contiguous().t()), "value.items.a.stride.0"),
    "alias": (lambda: _changed("b", BASE[1:].clone()), "value.items.b.storage"),
    "identity": (lambda: _changed("c", BASE.clone()), "value.items.c"),
    "storage_size": (lambda: _changed("b", torch.zeros(9)[:3]), "value.items.b.storage"),
    "gradient": (
        lambda: _changed("a", BASE.clone().requires_grad_()),
        "value.items.a.requires_grad",
    ),
    "subclass": (lambda: _changed("a", torch.nn.Parameter(BASE)), "value.items.a.type"),
    "version": (lambda: _changed("a", BASE.clone().add_(0)), "value.items.a.version"),
    "inference": (lambda: _changed("a", _inferred()), "value.items.a.inference"),
    "order": (lambda: dict(reversed(_value().items())), "value.items.order"),
    "missing": (lambda: {k: v for k, v in _value().items() if k != "d"}, "value.items.d.type"),
    "container": (lambda: _changed("d", (1, None)), "value.items.d.type"),
    "number_type": (lambda: _changed("d", [1.0, None]), "value.items.d.items.0"),
    "boolean": (lambda: _changed("d", [True, None]), "value.items.d.items.0"),
    "message": (lambda: _changed("e", KeyError("massage")), "value.items.e.message"),
    "error_type": (lambda: _changed("e", IndexError("message")), "value.items.e.raised"),
}


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0).reshape(2, 3)


def test_equal_values_do_not_differ() -> None:
    assert compare.differences(_observed(_value()), _observed(_value())) == {}


@pytest.mark.parametrize(("make", "leaf"), CHANGED.values(), ids=CHANGED)
def test_difference_is_noticed(make: Callable[[], Any], leaf: str) -> None:
    found = compare.differences(_observed(_value()), _observed(make()))
    assert any(path == leaf or path.startswith(f"{leaf}.") for path in found), found


@pytest.mark.parametrize("part", ["warnings", "output"])
def test_difference_beside_the_value_is_noticed(part: str) -> None:
    other = _observed(_value()) | {part: [["UserWarning", "new", "a.py"]]}
    assert compare.differences(_observed(_value()), other)
    twice = copy.deepcopy(other)
    twice[part] *= 2
    assert compare.differences(other, twice)


def _run(tmp_path: Path, function: Callable[[Work], object], **options: Any) -> dict[str, Any]:
    return child._run_forked(Case("x.y", function, "x", **options), tmp_path, is_shimmed=False)


def test_runner_records_warnings_output_and_errors(tmp_path: Path) -> None:
    def case(work: Work) -> object:
        os.write(1, b"to descriptor 1")
        os.write(2, b"to descriptor 2")
        warnings.warn("a warning", DeprecationWarning, stacklevel=1)
        return attempt(open, work.directory / "missing")

    seen = _run(tmp_path, case)
    assert seen["output"] == ["to descriptor 1", "to descriptor 2"]
    assert seen["warnings"] == [["DeprecationWarning", "a warning", "test_comparer.py"]]
    assert seen["value"]["raised"] == "builtins.FileNotFoundError"
    assert seen["value"]["message"].endswith("'<work>/missing'")


@pytest.mark.parametrize(
    ("function", "timeout_s", "expected"),
    [
        (lambda work: 1 / 0, PATIENCE_S, "ZeroDivisionError"),
        (lambda work: os.kill(os.getpid(), signal.SIGKILL), PATIENCE_S, "status -9"),
        (lambda work: time.sleep(60), 1.0, "timed out"),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_runner_fails_broken_cases(
    tmp_path: Path, function: Callable[[Work], object], timeout_s: float, expected: str
) -> None:
    assert expected in _run(tmp_path, function, timeout_s=timeout_s)["failed"]


@pytest.mark.parametrize(
    ("flat", "served", "problems"),
    [
        ({"served:torch_zip": 1}, True, 0),
        ({"fallback:small_file": 1}, True, 1),
        ({"served.torch_zip": 2}, False, 1),
        ({}, False, 0),
        ({}, None, 0),
    ],
)
def test_counters_contradict_expectations(
    flat: dict[str, int], served: bool | None, problems: int
) -> None:
    assert len(compare.expectation_errors(flat, served, None)) == problems


def test_counters_are_found_in_nested_statistics() -> None:
    flat = shim._flat("", {"events": {("served", "torch_zip"): 2}, "note": "text"})
    assert shim.count(flat, "served") == 2
