"""What tests of preparation start from: a model, and the directory that it is prepared in."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx_models import perceptron, save


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir(0o700)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    save(perceptron())(path)
    return path
