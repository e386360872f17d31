"""The benchmark on traces: what it reads, how it judges, and that it takes up where it stopped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from benchmarks import batching_placement, batching_traces, planning, proteus_artefact  # noqa: E402
from benchmarks.batching_data import DataMissing, find_dataset  # noqa: E402
from benchmarks.batching_placement import (  # noqa: E402
    Group,
    Placement,
    SolverMissing,
    find_placement,
)
from benchmarks.batching_trace_cells import Cell, Result, fingerprint  # noqa: E402
from benchmarks.batching_trace_report import (  # noqa: E402
    DEFAULT,
    Findings,
    Row,
    is_best,
)
from benchmarks.batching_trace_tables import write_markdown  # noqa: E402
from benchmarks.proteus_artefact import ArtefactRun, placement_file  # noqa: E402
from trims_shim.batching.simulator import Report  # noqa: E402
from trims_shim.planner import programme  # noqa: E402

HEADER = "Model,Accel,Trials,batchsize,50th_pct,90th_pct,avg_latency(ms),Min,Max,Accuracy,Norm\n"


def profile_row(variant: str, device: str, size: int, latency_ms: float) -> str:
    return f"{variant},onnxruntime_{device},9,{size},{latency_ms},0,0,0,0,0,0\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two families in the artefact's layout, and a placement for their trace."""
    root = tmp_path / "data" / "proteus"
    (root / "model_variants").mkdir(parents=True)
    (root / "model_variants" / "cats").write_text("small,90.5\nlarge,100")
    (root / "model_variants" / "dogs").write_text("dog,80\n")
    rows = [profile_row("small", "cpu", size, 20 + size) for size in (1, 2, 4, 8, 16)]
    rows += [profile_row("large", "cpu", 1, 100), profile_row("large", "cpu", 2, 160)]
    rows += [profile_row("dog", "gpu_pascal", 1, 999), profile_row("dog", "gpu_pascal", 1, 30)]
    (root / "aggregate_profiled.csv").write_text(HEADER + "".join(rows))
    for trace in ("zipf_exponential", "flat"):
        (root / "traces" / trace).mkdir(parents=True)
        for family, gap_ms in (("cats", 20), ("dogs", 50)):
            lines = "".join(f"{n * gap_ms},1,300\n" for n in range(3000 // gap_ms))
            (root / "traces" / trace / f"{family}.txt").write_text(lines)
    placements = tmp_path / "placements.json"
    groups = [
        {"variant": "small", "device": "cpu", "devices": 2, "planned_qps": 75.0},
        {"variant": "dog", "device": "gpu_pascal", "devices": 1, "planned_qps": 30.0},
    ]
    known = {"zipf_exponential, 300 ms": {"headroom": 1.5, "share": 1.0, "groups": groups}}
    placements.write_text(json.dumps(known))
    monkeypatch.setattr(batching_placement, "CACHE", placements)
    monkeypatch.setenv("TRIMS_BATCHING_DATA", str(root.parent))
    return root


# --- reading --------------------------------------------------------------------------------------


def test_the_data_is_read_as_the_artefact_reads_it(data: Path) -> None:
    dataset = find_dataset()
    assert dataset.directory == data
    small, large, dog = dataset.options(slo_ms=300)
    assert (small.family, small.accuracy, small.max_batch_size) == ("cats", 90.5, 8)
    assert small.peak_qps == 285  # 8 in 28 ms, rounded down
    assert [small.profile().latency_ns(size) / 1e6 for size in (1, 3, 5, 8)] == [21, 24, 28, 28]
    assert large.max_batch_size == 1  # two take more than half the objective
    assert dog.profile().latency_ns(1) == 30e6  # of repeated rows the last
    assert [each.variant for each in dataset.options(slo_ms=100)] == ["small", "dog"]


def test_requests_are_merged_and_demand_is_what_a_placement_has_to_carry(data: Path) -> None:
    dataset = find_dataset()
    requests = dataset.requests("zipf_exponential")
    assert [each.key for each in requests[:4]] == ["cats", "dogs", "cats", "cats"]
    assert len(requests) == 150 + 60
    assert dataset.demand_qps("flat", headroom=2) == {"cats": 100, "dogs": 40}
    burst = "".join(f"{1000 + n},1,300\n" for n in range(500))
    (data / "traces" / "flat" / "cats.txt").write_text(burst)
    assert dataset.demand_qps("flat", headroom=1)["cats"] == pytest.approx(500 / 3)
    (data / "traces" / "flat").rename(data / "traces" / "peaked")
    assert dataset.demand_qps("peaked", headroom=1)["cats"] == 500


@pytest.mark.parametrize(("named", "message"), [("", "is not set"), ("/nowhere", "holds none")])
def test_missing_data_says_what_to_do(
    named: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMS_BATCHING_DATA", named)
    with pytest.raises(DataMissing, match=f"{message}.*Get github.com/UMass-LIDS/Proteus"):
        find_dataset()


def test_a_placement_is_taken_from_the_file(data: Path) -> None:
    placement = find_placement(find_dataset(), "zipf_exponential", 300)
    assert [(each.option.variant, each.devices) for each in placement.groups] == [
        ("small", 2),
        ("dog", 1),
    ]


def test_the_solver_meets_the_demand_with_the_most_accurate(data: Path) -> None:
    placement = batching_placement.solve(find_dataset(), "flat", 300)
    flows = {each.option.variant: each.planned_qps for each in placement.groups}
    assert placement.share == 1
    assert flows["large"] + flows.get("small", 0) == pytest.approx(75)
    assert flows["dog"] == pytest.approx(30)
    assert "small" not in flows  # eight CPUs carry all of it at full accuracy


def test_without_a_solver_it_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    programme._highs.cache_clear()
    with pytest.raises(SolverMissing, match=r"pip install 'trims-shim\[planner\]'"):
        find_placement(find_dataset(), "flat", 300)


def test_the_artefact_gets_the_same_placement(data: Path) -> None:
    small, _, dog = find_dataset().options(slo_ms=300)
    placement = Placement("any", 300, 1.0, (Group(small, 12, 60.0), Group(dog, 1, 9.0)))
    lines = placement_file(placement, ["cats", "dogs"]).splitlines()
    # Python literals on the second, fourth and sixth line; ten devices of each of its kinds.
    required, weights, hosted = (eval(lines[index]) for index in (1, 3, 5))
    assert required == {("small", "CPU"): 10, ("small", "VPU"): 2, ("dog", "GPU_PASCAL"): 1}
    assert weights["CPU-9", 0] == pytest.approx(50)
    assert weights["VPU-1", 0] == pytest.approx(10)
    assert weights["GPU_PASCAL-0", 1] == 9
    assert len(hosted) == 13


# --- judging --------------------------------------------------------------------------------------


def result(policy: str, violations: int, *, routing: str = "random", seed: int = 1) -> Result:
    cell = Cell("zipf_exponential", policy, seed, routing=routing)
    counts = (1000, 1000 - violations, violations, 0, 0)
    return Result(cell, "code", Report(*counts, 10.0, 2.0, 0.5, 0.0, 0, 20.0, 90.0, 99.5))


def artefact(violations: int) -> ArtefactRun:
    return ArtefactRun(
        "zipf_exponential", "accscale", 300.0, 1000, 0.01, 0, 1000 - violations, violations, 0, 0,
        99.0, 99.1, 2.0, 0.3, 100.0, 400.0, 60.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "is_within"), [(80, True), (100, True), (130, True), (131, False)]
)
def test_noise_is_two_deviations_of_the_difference_of_two_counts(
    ours: int, is_within: bool
) -> None:
    """31 are more than two deviations of 231, of which one is 15.2."""
    (contest,) = Findings([result(DEFAULT, ours), result("other", 100)], []).contests()
    assert is_best(contest, DEFAULT) == is_within


def test_seeds_are_put_together() -> None:
    rows = [result(DEFAULT, 10, seed=1), result(DEFAULT, 30, seed=2)]
    (row,) = Findings(rows, []).rows
    assert isinstance(row, Row)
    assert (row.ratio, row.range, row.violations) == (0.02, (0.01, 0.03), 40)


def test_targets_are_judged_from_the_rows() -> None:
    results = [result(DEFAULT, 2), result("other", 500)]
    best, fewer = Findings(results, [artefact(violations=49)]).targets()
    assert (best.is_met, best.figure) == (True, "in 1")
    assert (fewer.is_met, fewer.figure) == (False, "24.5 x")
    best, fewer = Findings([result(DEFAULT, 4), result("other", 0)], [artefact(400)]).targets()
    assert fewer.is_met
    assert best.is_met  # four against none is noise
    (best,) = Findings([result(DEFAULT, 5), result("other", 0)], []).targets()
    assert (best.is_met, best.figure) == (False, "in 0; not in zipf_exponential random")


def test_part_of_a_trace_is_not_compared_with_all_of_it() -> None:
    part = Findings([result(DEFAULT, 2)], [replace(artefact(400), requests=9999)])
    assert part.factor("zipf_exponential", "accscale") is None


def test_a_result_is_kept_in_one_row() -> None:
    kept = result(DEFAULT, 3)
    row = json.loads(json.dumps(kept.row()))
    assert Result.of_row(row) == kept
    assert len(row) == len(Result.columns())


def test_tables_for_the_documentation(tmp_path: Path) -> None:
    findings = Findings(
        [result(DEFAULT, 2), result(DEFAULT, 1, routing="least loaded")], [artefact(90)]
    )
    write_markdown(findings, tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text()
    assert "| zipf_exponential | 1.00% | 9.00% |  |  | 0.20% | 0.10% |" in text
    assert "- met: the default is best" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 2  # two tables, each with rows of one width


# --- all of it ------------------------------------------------------------------------------------


def test_it_simulates_only_what_is_missing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--quick", "--output", str(tmp_path), "--policies", "immediate", "early_drop"]
    command += ["--jobs", "1", "--artefact", str(tmp_path / "none.json")]
    assert batching_traces.main(command) == 0
    assert "28 of 28 cells to simulate" in capsys.readouterr().err
    content = json.loads((tmp_path / "batching_traces.json").read_text())
    assert len(content["cells"]) == 28
    assert (tmp_path / "batching_traces.png").stat().st_size > 10_000
    assert batching_traces.main([*command, "--json"]) == 0
    output = capsys.readouterr()
    assert "0 of 28 cells to simulate" in output.err
    reports = [each["report"] for each in json.loads(output.out)["cells"]]
    assert all(r["requests"] == r["on_time"] + r["late"] + r["dropped"] for r in reports)
    assert batching_traces.main([*command, "--json", "--again", "immediate"]) == 0
    assert "14 of 28 cells to simulate" in capsys.readouterr().err
    tables = (tmp_path / "batching_traces.md").read_text()
    assert batching_traces.main([*command, "--show", "--policies", "immediate"]) == 0
    assert (tmp_path / "batching_traces.md").read_text() == tables, "cells that are kept are in it"


def test_without_cells_there_is_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batching_traces.main(["--show", "--output", str(tmp_path)]) == 1
    assert "has none of these cells" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        (batching_traces, []),
        (planning, []),
        (proteus_artefact, ["--checkout", "Proteus"]),
    ],
    ids=["traces", "planning", "artefact"],
)
def test_without_data_it_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    benchmark: ModuleType,
    arguments: list[str],
) -> None:
    monkeypatch.delenv("TRIMS_BATCHING_DATA", raising=False)
    assert benchmark.main(arguments) == 1
    assert "set TRIMS_BATCHING_DATA" in capsys.readouterr().err


def test_a_policys_code_has_its_own_fingerprint() -> None:
    found = {policy: fingerprint(policy) for policy in ("auto", "immediate", "proteus")}
    assert len(set(found.values())) == 3
