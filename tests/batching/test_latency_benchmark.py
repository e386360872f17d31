"""The benchmark of latencies over the load runs, and says what it was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batching_latencies


def test_a_row_for_each_load_and_a_figure_for_each_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_latencies, "JITTERS", ("none", "log-normal"))
    arguments = ["--requests", "100", "--seeds", "1", "--output", str(tmp_path), "--loads"]
    assert batching_latencies.main([*arguments, "0.1", "1.2", "--policies", "auto", "cork"]) == 0
    content = json.loads((tmp_path / "batching_latencies.json").read_text())
    assert len(content["cells"]) == 3 * 2 * 2 * 2 * 2
    assert {each["policy"] for each in content["cells"]} == {"auto", "cork"}
    assert all(each["mean_ms"] > 0 for each in content["cells"])
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| profile | jitter | CV | load | auto | cork |"
    assert sum(line.startswith("| 20 + 2 b |") for line in table) == 8
