"""How benchmarks write and show what they have measured."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import staged_policies_report, staged_serving_report
from benchmarks.harness import Summary, write_json
from benchmarks.report import Curve, plot

CURVE = Curve("load", "torch.load", ((1e6, Summary.of([0.1])), (1e7, Summary.of([0.2, 0.4]))))


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Limits the size of the files that this process writes, until the end of the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_results_of_an_earlier_run_outlast_a_full_disk(
    tmp_path: Path, file_size_limit: Callable[[int], None]
) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"rounds": [1]})
    file_size_limit(1 << 16)
    with pytest.raises(OSError, match="File too large"):
        write_json(path, {"rounds": list(range(1 << 16))})
    assert json.loads(path.read_text()) == {"rounds": [1]}
