"""Fixtures of the tests of onnxruntime's patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from onnx_models import Sample, sample, save
from preparations import Preparations, patched


@pytest.fixture
def preparations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparations]:
    yield from patched(tmp_path, monkeypatch)


@pytest.fixture
def lenient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparations]:
    """As users have it: without TRIMS_STRICT."""
    yield from patched(tmp_path, monkeypatch, strict="0")


@pytest.fixture
def made() -> Sample:
    return sample("perceptron")


@pytest.fixture
def path(tmp_path: Path, made: Sample) -> str:
    file = tmp_path / "model.onnx"
    save(made)(file)
    return str(file)
