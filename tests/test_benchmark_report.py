"""How benchmarks show what they have measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness import Summary
from benchmarks.report import Curve, plot

CURVE = Curve("load", "torch.load", ((1e6, Summary.of([0.1])), (1e7, Summary.of([0.2, 0.4]))))


def test_plot_is_left_out_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "gpu.png"
    plot([CURVE], path, subtitle="medians")
    assert not path.exists()
    assert f"left out: {path}" in capsys.readouterr().out
