"""The serving benchmark of staged models offers the loads it says, and judges what it measured.

From canned cells and a model of the test's own; nothing here is a measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]

from benchmarks import staged_cell, staged_serving, staged_serving_report  # noqa: E402
from benchmarks.batching_load import Record  # noqa: E402
from benchmarks.harness import WorkerFailed  # noqa: E402
from benchmarks.staged_models import LENGTHS, Served, make_served  # noqa: E402
from benchmarks.staged_serving import LONE, QUICK, SIDES, phases_of  # noqa: E402
from trims_shim.batching.collating.collate import collate_of  # noqa: E402

MS = 1_000_000
served_of = functools.cache(make_served)


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bert", "u-net", "vgg"])
def test_answers_of_a_batch_are_those_of_its_items(model: str) -> None:
    served = served_of(model)
    items = [served.item(number) for number in range(3)]
    collate = collate_of(served.collate)
    batch = served.whole(collate.join(items))
    for row, item in zip(batch, items, strict=True):
        alone = served.whole(collate.join([item]))[0]
        torch.testing.assert_close(row, alone, rtol=1e-3, atol=1e-3)
    assert len(served.staged()) == 2
    assert len(served.staged(1)) == 1


def test_every_class_has_an_example_and_lengths_are_as_stated() -> None:
    served = served_of("bert")
    collate = collate_of(served.collate, by_length=True)
    keys = {collate.key(item) for item in served.items}
    assert {collate.key(served.item(each)) for each in served.examples} == keys
    assert len(served.examples) == len(keys) == 9
    lengths = sorted(len(item["ids"]) for item in served.items)
    assert lengths[len(lengths) // 2] == pytest.approx(LENGTHS["median"], rel=0.15)
    assert LENGTHS["least"] <= lengths[0]
    assert lengths[-1] <= LENGTHS["most"]


# --- loads ----------------------------------------------------------------------------------------


def test_a_step_has_the_same_foot_on_both_sides() -> None:
    phases = phases_of("step", capacity=100.0, seconds=3.0)
    assert [rate for rate, _ in phases] == pytest.approx([30.0, 110.0, 30.0])
    assert sum(seconds for _, seconds in phases) == pytest.approx(3.0)


def test_arrivals_follow_the_phases_and_the_seed() -> None:
    phases = [(50.0, 20.0), (200.0, 20.0)]
    times = staged_cell._times_s(phases, seed=3)
    assert times == sorted(times) == staged_cell._times_s(phases, seed=3)
    assert times != staged_cell._times_s(phases, seed=4)
    early = sum(at < 20 for at in times)
    assert early / 20 == pytest.approx(50, rel=0.15)
    assert (len(times) - early) / 20 == pytest.approx(200, rel=0.1)


def test_every_request_is_counted_once() -> None:
    record = Record(
        intended_ns=[0, MS, 2 * MS, 3 * MS],
        submitted_ns=[0, MS, 4 * MS, 3 * MS],
        settled_ns=[10 * MS, 301 * MS, 9 * MS, 12 * MS],
        errors={2: "RequestDropped", 3: "_Wrong"},
    )
    later = Record(intended_ns=[5 * MS], submitted_ns=[6 * MS], settled_ns=[25 * MS])
    found = staged_cell._figures([record, later], qos_ms=200.0)
    assert (found["requests"], found["dropped"], found["errors"]) == (5, 1, ["_Wrong"])
    assert found["violations"] == pytest.approx(3 / 5)
    assert found["mean_ms"] == pytest.approx((10 + 300 + 20) / 3)
    assert found["generator_late_ms"] == 2.0


# --- cells ----------------------------------------------------------------------------------------


def tiny(name: str, device: str = "cpu") -> Served:
    """Doubles, adds one, negates."""
    stages = [lambda x: 2 * x, lambda x: x + 1, lambda x: -x]
    items = [torch.full((3,), float(number)) for number in range(8)]
    return Served(name, stages, items, "auto", [0])


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_cell, "make_served", tiny)
    monkeypatch.setattr(staged_cell, "_WARM_SIZES", (1,))
    monkeypatch.setattr(staged_cell, "gc", SimpleNamespace(collect=int, freeze=int))


def test_every_side_answers_all_loads(tiny_models: None) -> None:
    sides = SIDES | LONE | {"window": SIDES["window"] | {"wait_ms": 1}}
    phases = [(200.0, 0.1)]
    found = staged_cell.load(
        model="tiny", sides=sides, device="cpu", phases=phases, seeds=[1, 2], qos_ms=5000.0
    )
    offered = sum(len(staged_cell._times_s(phases, seed)) for seed in (1, 2))
    assert set(found) == set(sides)
    for name, each in found.items():
        assert each["requests"] == offered > 10
        assert (each["violations"], each["errors"]) == (0.0, [])
        assert each["facts"]["mean_batch"] >= 1
        assert ("stretches" in each["facts"]) == (sides[name]["stages"] != 0)


def test_each_side_has_one_place_in_a_turn() -> None:
    peers = dict.fromkeys("abc")
    turns = [[name for name, _ in staged_cell._shuffled(peers, seed)] for seed in range(20)]
    assert all(sorted(turn) == list("abc") for turn in turns)
    assert {turn[0] for turn in turns} == set("abc")


def test_wrong_answers_are_noticed(tiny_models: None) -> None:
    peer = staged_cell._prepare("tiny", {"function": LONE["function"]}, "cpu")["function"]
    assert peer._is_right(1, torch.full((3,), -3.0))
    assert not peer._is_right(1, torch.full((3,), -5.0))
    assert not peer._is_right(1, torch.full((4,), -3.0))


@pytest.mark.parametrize("seconds", [0.05, 0.0])
def test_clients_in_closed_loops(tiny_models: None, seconds: float) -> None:
    """On a busy machine the time is over before the first answer, which counts nevertheless."""
    found = staged_cell.saturated(
        model="tiny",
        sides={side: SIDES[side] for side in ("immediate", "dvabatch")},
        device="cpu",
        clients=[2, 4],
        seconds=seconds,
        qos_ms=5000.0,
    )
    assert set(found) == {"immediate", "dvabatch"}
    for by_clients in (each["by_clients"] for each in found.values()):
        assert set(by_clients) == {"2", "4"}
        assert all(each["violations"] == 0 < each["throughput"] for each in by_clients.values())


def test_lone_calls_are_timed_for_each_side(tiny_models: None) -> None:
    found = staged_cell.lone(model="tiny", sides=LONE, device="cpu", turns=2, calls=3)
    assert set(found) == set(LONE)
    assert all(each["p50_us"] > 0 for each in found.values())


# --- the report -----------------------------------------------------------------------------------


def cells(means_ms: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Of one model under a low load, by side: the mean latency of each repeat."""
    return [
        {
            "kind": "load",
            "model": "vgg",
            "load": "low",
            "side": side,
            "repeat": repeat,
            "result": {"mean_ms": mean_ms, "p99_ms": 2 * mean_ms},
        }
        for side, samples in means_ms.items()
        for repeat, mean_ms in enumerate(samples)
    ]


def content(found: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"processor": "p", "processors": 2, "versions": {"torch": "2"}, "date": "2026-01-01T"}
    return {
        "cells": found,
        "plan": {
            "models": ["vgg"],
            "loads": ["low"],
            "sides": ["immediate", "window", "auto", "dvabatch"],
        },
        "machine": machine,
        "device": "cpu",
        "is_quick": False,
        "qos_ms": 200.0,
        "left_out": ["load vgg high, repeat 4"],
        "faults": [],
    }


def test_gains_are_taken_within_repeats() -> None:
    found = content(
        cells({"immediate": (10.0, 20.0, 100.0), "dvabatch": (5.0, 10.0, 80.0), "window": (1.0,)})
    )
    gains = staged_serving_report.gains(found, "immediate")
    assert gains == {("vgg", "low"): pytest.approx(0.5)}
    # Of the window fewer repeats were measured: nothing is said.
    assert staged_serving_report.gains(found, "window") == {}


def test_a_peak_is_what_is_answered_in_time() -> None:
    by_clients = {
        "4": {"throughput": 50.0, "violations": 0.0},
        "8": {"throughput": 70.0, "violations": 0.01},
        "16": {"throughput": 90.0, "violations": 0.02},
    }
    cell = {"kind": "saturated", "model": "bert", "side": "dvabatch", "repeat": 0}
    found = content([cell | {"result": {"by_clients": by_clients}}])
    assert staged_serving_report.peaks(found) == {"bert": {"dvabatch": 70.0}}


def test_overhead_is_relative_to_the_plain_function() -> None:
    found = content(
        [
            {
                "kind": "lone",
                "model": "vgg",
                "side": side,
                "repeat": repeat,
                "result": {"p50_us": us},
            }
            for side, samples in {"function": (100.0, 200.0), "one stage": (102.0, 202.0)}.items()
            for repeat, us in enumerate(samples)
        ]
    )
    assert staged_serving_report.overheads(found)["vgg"]["one stage"].median == pytest.approx(1.015)


@pytest.mark.parametrize(
    ("ours_ms", "verdict"), [(4.0, "60% (target ≥ 0.46): met"), (8.0, "20% (")]
)
def test_the_report_shows_cells_verdicts_and_what_is_left_out(ours_ms: float, verdict: str) -> None:
    samples = dict.fromkeys(("immediate", "window", "auto"), (10.0, 10.0))
    found = content(cells(samples | {"dvabatch": (ours_ms, ours_ms)}))
    text = staged_serving_report.markdown(found)
    assert verdict in text
    assert ("**missed**" in text) == (ours_ms == 8.0)
    assert "left out: load vgg high, repeat 4" in text
    assert f"| vgg (load), dvabatch | {ours_ms} / {2 * ours_ms} |" in text


def test_a_picture_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = content(cells({"immediate": (1.0, 2.0), "dvabatch": (1.0,)}))
    staged_serving_report.plot(found, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_a_quick_run_is_marked_as_none() -> None:
    found = content(cells({"immediate": (1.0,), "dvabatch": (1.0,)})) | {"is_quick": True}
    assert "not measured" in staged_serving_report.markdown(found)
    assert QUICK.repeats == 1


# --- the whole run --------------------------------------------------------------------------------


class _HereServer:
    """Runs tasks in this process."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    def run(self, task: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(task)
        found: dict[str, Any] = getattr(staged_cell, task)(**arguments)
        return json.loads(json.dumps(found))


@pytest.mark.parametrize("minutes", ["1", "0"])
def test_a_run_from_the_first_measurement_to_the_files(
    tiny_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str
) -> None:
    here = _HereServer()
    monkeypatch.setattr(staged_serving, "server", lambda *_: contextlib.nullcontext(here))
    monkeypatch.setattr(staged_serving, "plot", lambda content, path: path.touch())
    plan = dataclasses.replace(QUICK, seconds=0.01, choosing_s=0.01, saturated_s=0.02, lone_calls=3)
    monkeypatch.setattr(staged_serving, "QUICK", plan)
    # A load of the real capacity of a model that only adds would be tens of thousands a second.
    calibrated = {"durations_ms": {"1": 10.0, "16": 16.0}}
    monkeypatch.setattr(staged_cell, "calibrate", lambda **_: calibrated)
    arguments = ["--quick", "--models", "vgg", "--loads", "low", "--minutes", minutes]
    assert staged_serving.main([*arguments, "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "staged_serving.json").read_text())
    assert content["calibrations"]["vgg"]["capacity"] == 1000.0
    assert content["windows_ms"] == {"vgg": {"low": 5}}
    if minutes == "0":
        assert len(content["left_out"]) == 3
        assert not content["cells"]
        return
    assert {cell["kind"] for cell in content["cells"]} == {"lone", "saturated", "load"}
    assert len(content["cells"]) == len(LONE) + 2 * len(plan.sides)
    assert set(here.asked) == {"calibrate", "learn", "lone", "saturated", "load"}
    assert staged_serving.main(["--report", "--output", str(tmp_path)]) == 0


class _Interrupted(_HereServer):
    """The model ``bert`` does not fit; the run is cut off when a load of ``vgg`` is measured."""

    def run(self, task: str, **arguments: Any) -> dict[str, Any]:
        if arguments["model"] == "bert":
            raise WorkerFailed(f"{task}: out of memory")
        if task == "load" and len(arguments["sides"]) > 1:
            raise KeyboardInterrupt
        return super().run(task, **arguments)


def test_a_run_that_is_cut_off_keeps_what_it_had_of_models_that_work(
    tiny_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = _Interrupted()
    monkeypatch.setattr(staged_serving, "server", lambda *_: contextlib.nullcontext(here))
    plan = dataclasses.replace(QUICK, choosing_s=0.01, saturated_s=0.02, lone_calls=3)
    monkeypatch.setattr(staged_serving, "QUICK", plan)
    calibrated = {"durations_ms": {"1": 10.0, "16": 16.0}}
    monkeypatch.setattr(staged_cell, "calibrate", lambda **_: calibrated)
    arguments = ["--quick", "--models", "bert", "vgg", "--loads", "low"]
    with pytest.raises(KeyboardInterrupt):
        staged_serving.main([*arguments, "--output", str(tmp_path)])
    content = json.loads((tmp_path / "staged_serving.json").read_text())
    assert content["faults"] == ["bert: calibrate: out of memory"]
    assert set(content["calibrations"]) == set(content["windows_ms"]) == {"vgg"}
    assert {cell["kind"] for cell in content["cells"]} == {"lone", "saturated"}
