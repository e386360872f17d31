"""Which other files of a model are offered to a daemon that sees other files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from onnx_models import perceptron, save, save_external

from trims_shim.patches import onnxruntime_models as models


@pytest.fixture
def path(tmp_path: Path, no_leak: None) -> Path:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "m.onnx"
    save_external(perceptron(), "sub/weights.bin")(path)
    return path


def offered(path: Path) -> dict[str, int]:
    """The inodes of what is offered."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with models.externals(descriptor, str(path)) as found:
            return {location: os.fstat(each).st_ino for location, each in found.items()}
    finally:
        os.close(descriptor)


def test_what_the_model_names(path: Path) -> None:
    weights = path.parent / "sub" / "weights.bin"
    assert offered(path) == {"sub/weights.bin": weights.stat().st_ino}


def test_a_model_without_any(tmp_path: Path) -> None:
    save(perceptron())(tmp_path / "m.onnx")
    assert offered(tmp_path / "m.onnx") == {}


def test_what_is_not_there(path: Path) -> None:
    (path.parent / "sub" / "weights.bin").unlink()
    assert offered(path) == {}


def test_what_is_linked_to_from_outside(path: Path, tmp_path: Path) -> None:
    """onnxruntime refuses it: a prepared model must not stand for this one."""
    (path.parent / "sub").rename(tmp_path / "elsewhere")
    (path.parent / "sub").symlink_to(tmp_path / "elsewhere")
    assert offered(path) == {}


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    weights = path.parent / "sub" / "weights.bin"
    weights.unlink()
    os.mkfifo(weights)
    assert offered(path) == {"sub/weights.bin": weights.stat().st_ino}


def test_more_than_a_daemon_takes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_EXTERNALS_LIMIT", 0)
    assert offered(path) == {}
