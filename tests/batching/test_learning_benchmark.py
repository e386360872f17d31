"""What learning costs: the benchmark runs, and on a device with steps the best size is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import batching_learning


def test_a_row_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching_learning, "CELLS", ((0.85, False), (0.85, True)))
    arguments = ["--requests", "200", "--seeds", "1", "--output", str(tmp_path)]
    assert batching_learning.main(arguments) == 0
    content = json.loads((tmp_path / "batching_learning.json").read_text())
    assert len(content["cells"]) == 9 * 3 * 2 * 2
    for each in content["summary"].values():
        assert 0 <= each["violated_true"] <= each["violated_learned"] < 1


def test_with_a_long_queue_from_the_start_on_smaller_batches_are_found_to_be_better() -> None:
    """Eight at once take nearly three times as long as four."""
    found = [
        batching_learning.cell(
            "6.4 + .4 b ms, 12 beyond 4 and 8", "none", 1.1, True, learns, count=4000, seeds=2
        )
        for learns in (False, True)
    ]
    assert found[1].violated < found[0].violated + 0.2  # it was .27 more, for ever
