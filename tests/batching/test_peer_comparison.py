"""The comparison with other batchers counts every request once and judges only what it measured.

From canned records and a batcher of the test's own; nothing here is a measurement. One smoke run
drives this package's batcher as the benchmark does.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks import batching_peers  # noqa: E402
from benchmarks.batching_devices import Batch, SleepDevice  # noqa: E402
from benchmarks.batching_load import Record, arrivals_s, offer, summarise  # noqa: E402
from benchmarks.batching_peers_report import judge, plot, write_markdown  # noqa: E402
from benchmarks.batching_plan import (  # noqa: E402
    CHOOSE,
    COMPARE,
    Calibration,
    Cell,
    Job,
    choose,
    compared_jobs,
    tried_jobs,
)
from benchmarks.peers import CATALOGUE, Done, Dropped, Peer  # noqa: E402

CELL = Cell("sleep", 1.0, 200.0, 200.0, 100.0, 0.65)
SMOKE_S = 60
MS = 1_000_000


def record(
    policy: str,
    violations: float,
    *,
    cell: Cell = CELL,
    settings: dict[str, Any] | None = None,
    repeat: int = 0,
    purpose: str = COMPARE,
) -> dict[str, Any]:
    job = Job(cell, policy, settings or {}, repeat, 10.0, purpose)
    quantiles = {"count": 2.0, "p50": 1.0, "p95": 2.0, "p99": 3.0}
    result = {
        "violations": violations,
        "goodput": 190.0,
        "latency_ms": quantiles,
        "mean_batch": 4.0,
        "busy": 0.5,
        "processor_us": 100.0,
        "switches_per_s": 10.0,
        "handover_us": quantiles,
        "generator_late_ms": quantiles,
    }
    shown = {"device": cell.device, "cv": cell.cv, "share": cell.share}
    return {"job": job.key(), "cell": shown, "at_once": 1, "result": result}


def verdict(ours: Sequence[float], *theirs: float) -> str:
    records = [record("trims", each, repeat=n) for n, each in enumerate(ours)]
    records += [record("cork", each, repeat=n) for n, each in enumerate(theirs)]
    judged = judge(records, ("sleep", 1.0, 200.0))
    assert judged is not None
    return str(judged)


# --- arrivals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    times = arrivals_s(200.0, cv, 200.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 1 / mean == pytest.approx(200.0, rel=0.05)
    assert deviation / mean == pytest.approx(cv, rel=0.1)
    assert times == sorted(times)
    assert times == arrivals_s(200.0, cv, 200.0, seed=1) != arrivals_s(200.0, cv, 200.0, seed=2)


# --- what became of requests ----------------------------------------------------------------------


def test_every_request_is_counted_once() -> None:
    load = Record(
        intended_ns=[n * MS for n in range(1, 7)],
        submitted_ns=[n * MS for n in range(1, 7)],
        settled_ns=[11 * MS, 13 * MS, 200 * MS, 0, 14 * MS, 15 * MS],
        errors={4: "dropped", 5: "ValueError"},
        elapsed_s=1.0,
    )
    found = summarise(load, [Batch((0, 1), 2 * MS, 10 * MS)], slo_s=0.1)
    names = ("on_time", "late", "unanswered", "dropped", "failed")
    assert [found[name] for name in names] == [2, 1, 1, 1, 1]
    assert found["violations"] == pytest.approx(4 / 6)
    assert found["latency_ms"]["count"] == 4  # three answers, and one that is overdue
    assert found["latency_ms"]["p99"] is None
    assert found["busy"] == pytest.approx(8 / 199)


def test_hand_over_is_the_idle_time_before_a_full_batch_that_had_been_there() -> None:
    load = Record(
        intended_ns=[1, 2, 3, 4, 5, 6], submitted_ns=[0, 0, 5, 6, 100, 300], elapsed_s=1.0
    )
    load.settled_ns = [9] * 6
    batches = [
        Batch((0, 1), 10, 50),
        Batch((2, 3), 2050, 2100),  # was complete at 6
        Batch((4,), 9000, 9100),  # not full
        Batch((4, 5), 9300, 9400),
    ]
    found = summarise(load, batches, slo_s=1.0)["handover_us"]
    assert found["count"] == 2
    assert found["p5"] == pytest.approx(0.2)
    assert found["p95"] == pytest.approx(2.0)


class _Odd(Peer):
    """Answers even requests, drops every fourth, fails, mixes up or forgets the others."""

    def start(self) -> None:
        pass

    def submit(self, item: Any, done: Done) -> None:
        if item % 4 == 0:
            done(None, Dropped())
        elif item % 2 == 0:
            done(self.device.run_list([item])[0], None)
        elif item == 1:
            done(None, ValueError())
        elif item == 3:
            done(item + 1, None)


def test_load_records_drops_failures_and_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.batching_load._GRACE_S", 0.05)
    device = SleepDevice()
    peer = _Odd(device, slo_ms=100, max_batch_size=1, settings={})
    load = offer(peer, device, [0.0, 0.001, 0.002, 0.003, 0.004, 0.005], slo_s=0.1)
    assert load.errors == {0: "dropped", 1: "ValueError", 3: "wrong answer", 4: "dropped"}
    assert load.settled_ns[2] > load.intended_ns[2] + 20 * MS
    assert load.settled_ns[5] == 0


# --- the plan -------------------------------------------------------------------------------------


def test_objective_and_capacity_come_from_the_calibration() -> None:
    calibration = Calibration({1: 10.0, 4: 20.0, 16: 40.2})
    assert calibration.capacity == pytest.approx(16 / 0.0402)
    assert calibration.slo_ms == 80.0


def test_a_peer_gets_the_settings_that_did_best_on_the_cell_most_like_it() -> None:
    first, second = CATALOGUE["batched"].variants[:2]
    bursty = Cell("sleep", 3.0, 200.0, 200.0, 100.0, 0.65)
    busier = Cell("sleep", 1.0, 260.0, 260.0, 100.0, 0.85)
    tried = [
        record("batched", 0.2, settings=dict(first), purpose=CHOOSE),
        record("batched", 0.1, settings=dict(second), purpose=CHOOSE),
        record("batched", 0.1, settings=dict(first), purpose=CHOOSE, cell=bursty),
        record("batched", 0.2, settings=dict(second), purpose=CHOOSE, cell=bursty),
    ]
    assert choose("batched", CELL, tried) == second
    assert choose("batched", bursty, tried) == first
    assert choose("batched", busier, tried) == second
    model = Cell("torch", 3.0, 0.8, 300.0, 60.0, 0.8)
    assert choose("batched", model, tried) == first
    assert choose("batched", CELL, []) == first


def test_batchers_take_turns_and_share_arrivals() -> None:
    rounds = list(compared_jobs([CELL], ["trims", "cork"], [], seconds=1.0, repeats=2))
    assert [[job.policy for job in jobs] for jobs in rounds] == [
        ["trims", "cork"],
        ["cork", "trims"],
    ]
    assert [len({job.seed for job in jobs}) for jobs in rounds] == [1, 1]
    tried = list(tried_jobs([CELL], ["trims", "batched"], seconds=1.0, repeats=1))
    assert {job.policy for job in tried[0]} == {"batched"}
    assert {job.seed for job in tried[0]}.isdisjoint(job.seed for jobs in rounds for job in jobs)


# --- verdicts -------------------------------------------------------------------------------------


def test_difference_beyond_the_noise_decides() -> None:
    assert verdict([0.10], 0.15) == "best"
    assert verdict([0.10], 0.11) == "equal"
    assert verdict([0.15], 0.10) == "behind"
    assert verdict([0.10, 0.20, 0.30], 0.12, 0.22, 0.32) == "best"  # pairs differ by the same
    assert verdict([0.10, 0.20, 0.30], 0.22, 0.12, 0.32) == "equal"


def test_the_best_peer_is_the_one_compared_with() -> None:
    records = [record("trims", 0.10), record("batched", 0.5), record("cork", 0.05)]
    judged = judge(records, ("sleep", 1.0, 200.0))
    assert judged is not None
    assert (judged.peer, str(judged)) == ("cork", "behind")
    assert judge([record("trims", 0.1)], ("sleep", 1.0, 200.0)) is None


def test_report_shows_every_measured_batcher(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [record("trims", 0.01), record("cork", 0.05)]
    machine = {"processor": "one", "processors": 2}
    write_markdown(records, {"machine": machine}, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "| BentoML CorkDispatcher | 0.050 |" in text
    assert "1 best, 0 equal, 0 behind" in text
    plot(records, tmp_path / "report.png", machine)
    assert (tmp_path / "report.png").stat().st_size > 1000


# --- for real -------------------------------------------------------------------------------------


def test_libraries_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    nowhere = {
        each: replace(CATALOGUE[each], package=f"no_{each}_here") for each in ("cork", "ray")
    }
    monkeypatch.setattr("benchmarks.peers.CATALOGUE", CATALOGUE | nowhere)
    with pytest.raises(SystemExit, match=r"no_cork_here, no_ray_here cannot.*setup\.sh installs"):
        batching_peers.main(["--output", str(tmp_path), "--policies", "trims", "cork", "ray"])
    assert not list(tmp_path.iterdir())


def test_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def pretend(jobs: Sequence[Job], records: list[Any], faults: list[str]) -> None:
        for job in jobs:
            ran.append((job.policy, job.repeat))
            records.append(record(job.policy, 0.1, repeat=job.repeat) | {"job": job.key()})

    pytest.importorskip("rich")
    monkeypatch.setattr(batching_peers, "_run", pretend)
    monkeypatch.setattr(batching_peers, "_calibrate", lambda *_: Calibration({1: 20.0}))
    monkeypatch.setattr(batching_peers, "_report", lambda *_: None)
    monkeypatch.setattr(batching_peers, "check_installed", lambda *_: None)
    command = ["--devices", "sleep", "--rates", "200", "--cvs", "1", "--output", str(tmp_path)]
    command += ["--policies", "trims", "cork"]
    assert batching_peers.main([*command, "--repeats", "1"]) == 0
    assert batching_peers.main([*command, "--repeats", "2", "--jobs", "2"]) == 0
    assert sorted(ran) == [("cork", 0), ("cork", 1), ("trims", 0), ("trims", 1)]
    assert batching_peers.main([*command, "--repeats", "1", "--fresh"]) == 0
    assert len(ran) == 6


@pytest.mark.parametrize("policy", ["trims", "trims-asyncio"])
def test_a_cell_of_our_own_batcher(policy: str, tmp_path: Path) -> None:
    parameters = {
        "policy": policy,
        "settings": dict(CATALOGUE[policy].variants[0]),
        "device": "sleep",
        "slo_ms": 2000,  # nothing about time is claimed here
        "rate": 100,
        "cv": 1,
        "seconds": 0.3,
        "seed": 1,
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.batching_cell"),
            *("measure", json.dumps(parameters), "1"),
        ],
        cwd=ROOT,
        input="\n",
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SMOKE_S,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["requests"] > 10
    assert result["failed"] == 0, result["errors"]
    assert result["on_time"] == result["requests"]
