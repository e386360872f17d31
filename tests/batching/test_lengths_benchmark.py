"""The benchmark of lengths runs, and its ways differ in nothing but the keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batching_lengths


def test_a_row_for_each_load_and_a_figure_for_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_lengths, "LOADS", (0.3,))
    arguments = ["--requests", "300", "--seeds", "1", "--output", str(tmp_path)]
    assert batching_lengths.main(arguments) == 0
    cells = json.loads((tmp_path / "batching_lengths.json").read_text())["cells"]
    assert len(cells) == 3 * 2 * 2 * 2 * 4
    assert sum(line.startswith("| 20 ms ") for line in capsys.readouterr().out.splitlines()) == 8
    for knowledge in ("known", "learned"):
        means = {
            each["way"]: each["mean_ms"]
            for each in cells
            if (each["device"], each["objective"], each["arrivals"], each["knowledge"])
            == ("5 ms up to 2048 tokens, then in proportion", "loose", "Poisson", knowledge)
        }
        assert means["auto"] < means["auto, apart"]
