"""How benchmarks show what they have measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import staged_policies_report, staged_serving_report
from benchmarks.harness import Summary
from benchmarks.report import Curve, plot

CURVE = Curve("load", "torch.load", ((1e6, Summary.of([0.1])), (1e7, Summary.of([0.2, 0.4]))))


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot([CURVE], path, subtitle="medians"),
        lambda path: staged_serving_report.plot({}, path),
        lambda path: staged_policies_report.plot([], path),
    ],
    ids=["loads", "staged serving", "staged policies"],
)
def test_plot_is_left_out_without_matplotlib(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    draw: Callable[[Path], None],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "gpu.png"
    draw(path)
    assert not path.exists()
    assert f"left out: {path}" in capsys.readouterr().out
