"""What stages cost while it is learned what they take; and the benchmark that measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import staged_learning


@pytest.mark.parametrize("model", ["U-Net-like", "BERT-like", "VGG-like"])
def test_learning_costs_next_to_nothing_at_medium_load(model: str) -> None:
    """Sizes that had not run were joined for nothing, it seemed; and all on board waited."""
    known = staged_learning.cell(model, 0.6, "dvabatch", count=3000, seeds=4)
    learned = staged_learning.cell(model, 0.6, "dvabatch, learned", count=3000, seeds=4)
    assert learned.mean_ms < 1.01 * known.mean_ms
    assert learned.p99_ms < 1.04 * known.p99_ms


def test_a_row_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_learning, "LOADS", (0.6,))
    assert staged_learning.main(["--quick", "--output", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "staged_learning.json").read_text())["cells"]
    assert len(cells) == 6 * 4
    assert all(0 < each["mean_ms"] <= each["p99_ms"] for each in cells)
    assert any(each["stretches"] for each in cells)
    assert not any(each["stretches"] for each in cells if each["way"].startswith("auto"))
