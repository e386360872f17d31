"""The benchmark of devices that change runs, and its shares are shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batching_changes


def test_a_row_for_each_change_and_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_changes, "LASTING", ((3, 60, 100),))
    monkeypatch.setattr(batching_changes, "PASSING", ((5, 0.5, 3, 60, 100, 0.1),))
    assert batching_changes.main(["--seeds", "1", "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "batching_changes.json").read_text())
    assert len(content["lasting"]) == len(content["passing"]) == 2
    for each in content["lasting"]:
        assert each["before"] == 1
        assert 0 < each["at_once"] <= 1
    assert all(0 <= each["violated"] < 1 for each in content["passing"])
