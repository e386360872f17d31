"""Creating and running sessions: from a prepared model, the first time, and without pre-packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Summary
from benchmarks.ort_plan import (
    NOT_SLOWER,
    OFF,
    Model,
    Prepared,
    Run,
    alternated,
    check_equal,
    check_served,
    cost,
    find_model,
    prepared_models,
    session,
)
from benchmarks.report import Curve, Row, Target, compared

__all__ = ["measure_first_sessions", "measure_sessions"]

Result = dict[str, Any]
_PLAIN, _TRIMS, _OFF = "from a path", "from a path, trims", "from a path, trims, not pre-packed"
_BYTES, _BYTES_TRIMS = "from bytes", "from bytes, trims"
_PLAIN_OFF = "from a path, not pre-packed"
_NO_PACKING = {"session.disable_prepacking": "1"}
_FASTER = {"bert-base": 4.0, "gpt2": 3.5, "resnet50": 8.0}
_FASTER_OFF = {"bert-base": 15.0}
_LESS_PEAK = {"bert-base": 8.0}
_SMALL_BYTES = 20e6
"""Below this size the target is only that a session is not created more slowly."""
_FIRST_LIMIT = 1.1
_RUN_LIMIT = 1 / NOT_SLOWER


def measure_sessions(run: Run) -> None:
    """Measure sessions from prepared models against onnxruntime alone, in every way."""
    curves: dict[str, list[tuple[float, Summary]]] = {}
    for name in run.plan.models:
        if not run.has_time(f"sessions of {name}", _estimate_s(run, name)):
            continue
        with run.part(f"sessions of {name}"):
            model = find_model(name)
            with prepared_models() as prepared:
                results = _measure(run, model, prepared)
            for side, runs in results.items():
                times = Summary.of([each["create_s"] for each in runs])
                curves.setdefault(side, []).append((model.size_bytes, times))
            run.findings.curves[:] = _curves(curves)


def _estimate_s(run: Run, name: str) -> float:
    """Least time for a model; the clock then cuts short sides that do not fit."""
    processes = (6 if name in run.plan.every_way else 4) * (run.plan.rounds + 1)
    return processes * (2.5 if name in ("bert-base", "gpt2") else 1.2)


def _curves(points: dict[str, list[tuple[float, Summary]]]) -> list[Curve]:
    panels = {_PLAIN: _PLAIN, _TRIMS: _PLAIN, _OFF: _PLAIN, _BYTES: _BYTES, _BYTES_TRIMS: _BYTES}
    return [
        Curve(f"session {panels[side]}", side, tuple(sorted(found, key=lambda point: point[0])))
        for side, found in points.items()
        if side in panels
    ]


def _measure(run: Run, model: Model, prepared: Prepared) -> dict[str, list[Result]]:
    findings, is_every_way = run.findings, model.name in run.plan.every_way
    is_left_alone = not _prepare(run, model, prepared, is_every_way=is_every_way)
    results = alternated(run, _sides(run, model, prepared, is_every_way=is_every_way))
    findings.samples[f"sessions of {model.name}"] = results
    packed = [side for side in results if side not in (_OFF, _PLAIN_OFF)]
    check_equal(model.name, _all(results, packed), findings)
    if is_every_way:
        check_equal(f"{model.name} not pre-packed", _all(results, [_OFF, _PLAIN_OFF]), findings)
    _judge_creation(run, model, results, is_left_alone=is_left_alone)
    _judge_runs(run, model, results)
    return results


def _all(results: dict[str, list[Result]], sides: Sequence[str]) -> list[Result]:
    return [each for side in sides for each in results[side]]


def _prepare(run: Run, model: Model, prepared: Prepared, *, is_every_way: bool) -> bool:
    """Have the daemon prepare a model; False if it leaves the model to onnxruntime."""
    entry = prepared.prepare(model)
    if entry is None:
        return False
    if is_every_way:
        prepared.prepare(model, OFF)
    run.findings.samples[f"entry of {model.name}"] = dataclasses.asdict(entry)
    size = Summary.of([float(entry.size_bytes)])
    ratio = Summary.of([entry.size_bytes / model.size_bytes])
    baseline = Summary.of([float(model.size_bytes)])
    run.findings.rows += [
        Row(
            "disk space of the prepared model",
            model.title,
            baseline,
            size,
            ratio,
            "times the model",
            measured="bytes",
        ),
        Row(
            "time until it is prepared",
            model.title,
            figure=Summary.of([entry.prepare_s]),
            unit="s",
            note="in the background; sessions are created the ordinary way meanwhile",
        ),
    ]
    return True


def _sides(
    run: Run, model: Model, prepared: Prepared, *, is_every_way: bool
) -> dict[str, Callable[[], Result]]:
    runs = run.plan.runs
    sides = {
        _PLAIN: session(model, None, runs=runs),
        _TRIMS: session(model, prepared, runs=runs),
        _BYTES: session(model, None, how="bytes"),
        _BYTES_TRIMS: session(model, prepared, how="bytes"),
    }
    if is_every_way:
        sides |= {
            _OFF: session(model, prepared, settings=OFF, runs=runs),
            _PLAIN_OFF: session(model, None, entries=_NO_PACKING),
        }
    return sides


def _judge_creation(
    run: Run, model: Model, results: dict[str, list[Result]], *, is_left_alone: bool
) -> None:
    findings = run.findings
    wanted = _FASTER.get(model.name, NOT_SLOWER if model.size_bytes < _SMALL_BYTES else None)
    pairs = [
        ("session from a path", _PLAIN, _TRIMS, wanted),
        ("session from bytes", _BYTES, _BYTES_TRIMS, None),
        ("session, TRIMS_ORT_PREPACK=off", _PLAIN, _OFF, _FASTER_OFF.get(model.name)),
    ]
    for measurement, baseline, shim, least in pairs:
        if shim not in results:
            continue
        what = f"{measurement}, {model.name}"
        note = "small: left to onnxruntime"
        if not is_left_alone:
            note = check_served(what, results[shim], findings)
        times = [[each["create_s"] for each in results[side]] for side in (baseline, shim)]
        target = None if least is None else Target(at_least=least)
        findings.rows.append(compared(measurement, model.title, *times, target=target, note=note))
    peaks = [[float(each["peak_bytes"]) for each in results[side]] for side in (_PLAIN, _TRIMS)]
    least_peak = _LESS_PEAK.get(model.name)
    peak = compared(
        "peak memory while creating",
        model.title,
        *peaks,
        target=None if least_peak is None else Target(at_least=least_peak),
    )
    findings.rows.append(dataclasses.replace(peak, measured="bytes"))


def _judge_runs(run: Run, model: Model, results: dict[str, list[Result]]) -> None:
    first = [[each["first_run_s"] for each in results[side]] for side in (_PLAIN, _TRIMS)]
    run.findings.rows.append(cost("first inference", model, *first))
    # The median of one process's inferences is one sample.
    typical = {
        side: [Summary.of(each["run_s"]).median for each in results[side]]
        for side in (_PLAIN, _TRIMS, _OFF)
        if side in results
    }
    plain = typical[_PLAIN]
    limit = Target(at_most=_RUN_LIMIT)
    run.findings.rows.append(cost("inference", model, plain, typical[_TRIMS], target=limit))
    if _OFF in typical:
        name = "inference, TRIMS_ORT_PREPACK=off"
        run.findings.rows.append(cost(name, model, plain, typical[_OFF]))


def measure_first_sessions(run: Run) -> None:
    """Measure the first session ever of a model, while the model is being prepared."""
    for name in run.plan.first_models:
        if not run.has_time(f"first session of {name}", run.plan.rounds * 8.0):
            continue
        with run.part(f"first session of {name}"):
            _measure_first(run, find_model(name))


def _measure_first(run: Run, model: Model) -> None:
    sides = {"onnxruntime": session(model, None), "trims": _unknown(model)}
    results = alternated(run, sides)
    what = f"first session of {model.name}"
    run.findings.samples[what] = results
    check_equal(what, _all(results, list(sides)), run.findings)
    times = [[each["create_s"] for each in runs] for runs in results.values()]
    row = cost("first session ever", model, *times, target=Target(at_most=_FIRST_LIMIT))
    run.findings.rows.append(row)


def _unknown(model: Model) -> Callable[[], Result]:
    """Create a session with a daemon that runs but has prepared nothing."""

    def first() -> Result:
        with prepared_models() as prepared:
            return session(model, prepared)()

    return first
