"""onnxruntime.set_seed: what random nodes draw afterwards is what they draw without the shim."""

from __future__ import annotations

import pickle
from pathlib import Path

import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as binding
import pytest
from onnx_models import sample, save
from ort_sessions import new, outcomes
from preparations import Preparations, apply_points

from trims_shim import diagnostics
from trims_shim.patches import onnxruntime_session


def test_sessions_are_left_alone_after_it(
    preparations: Preparations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    save(sample("perceptron"))(path)
    # Sessions of later tests are not to know of it.
    monkeypatch.setattr(onnxruntime_session, "_is_seed_set", False)
    assert onnxruntime.set_seed is binding.set_seed
    assert hasattr(onnxruntime.set_seed, "__wrapped__")
    new(str(path))
    new(str(path))
    with pytest.raises(TypeError):
        onnxruntime.set_seed("three")
    new(str(path))
    assert diagnostics.stats().served == 2
    assert onnxruntime.set_seed(3) is None
    new(str(path))
    assert diagnostics.stats().served == 2
    assert outcomes() == {"preparing": 1, "random_seed": 1}


def test_it_stays_set_when_patches_are_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_session, "_is_seed_set", False)
    undo_points = apply_points()
    try:
        onnxruntime.set_seed(3)
    finally:
        undo_points()
    apply_points()()
    assert onnxruntime_session._is_seed_set


def test_it_may_be_pickled() -> None:
    """As the initializer of processes that are spawned."""
    undo_points = apply_points()
    try:
        pickled = pickle.dumps(onnxruntime.set_seed)
        assert pickle.loads(pickled) is onnxruntime.set_seed
    finally:
        undo_points()
    assert pickle.loads(pickled) is onnxruntime.set_seed
