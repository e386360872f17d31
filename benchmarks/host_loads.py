"""Loads that hit the cache and loads that miss it, against the frameworks' own loaders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Daemon, Summary, alternate, daemon, run_once
from benchmarks.plan import (
    SERVED_FRACTION,
    Findings,
    Model,
    Plan,
    check_equal,
    prepare,
    run_until_served,
    served_note,
    warm_daemon,
)
from benchmarks.process_memory import ballast, drop_cached, wait_for_reporting, warm_cached
from benchmarks.report import Curve, Target, compared

__all__ = ["measure_loads", "measure_misses", "measure_pretrained"]

LARGE_BYTES = 500e6
"""From this size on there are targets."""
COLD_LIMIT = 0.01
"""Largest share of a file in the page cache with which a run counts as cold."""
MISS_SHARE = 2.5
"""Memory touched before a first load, as a multiple of the model: segment, page cache, room."""
FREE_SHARE, FREE_BYTES = 3, 1 << 30
"""Memory left free for a first load: a multiple of the model, and bytes for the processes."""
_LOADS = {
    "torch.load": ("torch", False),
    "torch.load(mmap=True)": ("torch-mmap", False),
    "torch.load with trims": ("torch", True),
    "safetensors": ("safetensors", False),
    "safetensors with trims": ("safetensors", True),
    "transformers": ("transformers", False),
    "transformers with trims": ("transformers", True),
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A baseline, the side it is compared with, and the targets of both tasks (None: none)."""

    baseline: str
    shim: str
    load: float | None
    load_into: float | None


_GROUPS = (
    (_Pair("torch.load", "torch.load with trims", 30.0, 20.0),),
    (
        _Pair("torch.load(mmap=True)", "torch.load with trims", 2.5, 8.0),
        _Pair("safetensors", "safetensors with trims", 3.0, None),
    ),
)
"""The sides of a group alternate. Plain torch.load is apart, and sides that follow it wait: at its
end it frees the model's size in memory. If a hypervisor takes that back, the machine is slow for
half a minute (:func:`~benchmarks.process_memory.wait_for_reporting`)."""
_PRETRAINED = (_Pair("transformers", "transformers with trims", None, None),)


def measure_loads(plan: Plan, findings: Findings) -> None:
    """Measure load and touch, and load into a model, against the frameworks' own loaders."""
    times: dict[tuple[str, str], dict[float, list[float]]] = {}
    for name in plan.tiny + plan.models:
        model = prepare(name)
        with warm_daemon(plan, model.pt, model.safetensors) as own:
            for task in ["load"] if name in plan.tiny else ["load", "load_into"]:
                for pairs in _GROUPS:
                    runs = _measure_group(task, model, own, pairs, plan, findings)
                    for variant, results in runs.items():
                        curve = times.setdefault((_TITLES[task], variant), {})
                        curve.setdefault(model.size_bytes, []).extend(
                            run["total_s"] for run in results
                        )
    for (panel, variant), points in times.items():
        summaries = tuple((size, Summary.of(totals)) for size, totals in points.items())
        findings.curves.append(Curve(panel, variant, summaries))


def measure_pretrained(plan: Plan, findings: Findings) -> None:
    """Measure transformers' ``from_pretrained``, which itself maps files, and touch every page."""
    for name in plan.pretrained:
        model = prepare(name, is_pretrained=True)
        with warm_daemon(plan, model.pretrained) as own:
            _measure_group("load", model, own, _PRETRAINED, plan, findings)


_TITLES = {"load": "load + touch", "load_into": "load + load_state_dict"}


def _measure_group(
    task: str,
    model: Model,
    own: Daemon | None,
    pairs: Sequence[_Pair],
    plan: Plan,
    findings: Findings,
) -> dict[str, list[dict[str, Any]]]:
    names = list(dict.fromkeys(name for each in pairs for name in (each.baseline, each.shim)))
    if model.size_bytes >= LARGE_BYTES:
        wait_for_reporting()
    sides = _load_sides(task, model, own, names)
    if own is not None:
        for each in pairs:
            run_until_served(sides[each.shim])
    results = alternate(sides, plan.rounds, warmups=1)
    findings.samples[f"{task} {model.name}, {names[0]}"] = results
    is_tiny = model.name in plan.tiny
    _judge_loads(task, model, results, pairs, findings, is_tiny=is_tiny)
    return results


def _load_sides(
    task: str, model: Model, own: Daemon | None, names: Sequence[str]
) -> dict[str, Callable[[], dict[str, Any]]]:
    sides: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in names:
        how, with_shim = _LOADS[name]
        if with_shim and own is None:
            continue
        files = {"safetensors": model.safetensors, "transformers": model.pretrained}
        path = files.get(how, model.pt)
        arguments = {"path": path, "how": how}
        if task == "load_into":
            arguments["architecture"] = model.name
        environment = own.environment if own is not None and with_shim else None
        sides[name] = _once(task, environment, arguments)
    return sides


def _once(
    task: str, environment: dict[str, str] | None, arguments: dict[str, str]
) -> Callable[[], dict[str, Any]]:
    return lambda: run_once(task, environment=environment, **arguments)


def _judge_loads(
    task: str,
    model: Model,
    results: dict[str, list[dict[str, Any]]],
    pairs: Sequence[_Pair],
    findings: Findings,
    *,
    is_tiny: bool,
) -> None:
    totals = {name: [run["total_s"] for run in runs] for name, runs in results.items()}
    check_equal(f"{task} {model.name}", [r for runs in results.values() for r in runs], findings)
    for pair in pairs:
        baseline, shim = pair.baseline, pair.shim
        wanted = pair.load if task == "load" else pair.load_into
        is_promised = wanted is not None and model.size_bytes >= LARGE_BYTES
        note = ""
        if is_tiny and shim in results:
            note = _tiny_note(results[shim])
        elif shim in results:
            note = served_note(f"{task} {model.name}", results[shim], findings)
        findings.rows.append(
            compared(
                f"{_TITLES[task]} vs {baseline}",
                model.title,
                totals[baseline],
                totals.get(shim),
                target=Target(at_least=wanted) if is_promised else None,
                note=note,
            )
        )


def _tiny_note(runs: Sequence[dict[str, Any]]) -> str:
    is_served = min(run["shared"] for run in runs) >= SERVED_FRACTION
    return "no gain promised; " + ("served" if is_served else "left to the framework's own loader")


def measure_misses(plan: Plan, findings: Findings) -> None:
    """Measure the first load of a model, with and without its file in the page cache."""
    starter = prepare("mobilenet" if plan.miss_models[0] != "mobilenet" else "resnet18")
    for name in plan.miss_models:
        model = prepare(name)
        with ballast(FREE_SHARE * model.size_bytes + FREE_BYTES):
            for state in ("in the page cache", "on disk"):
                _measure_miss(plan, findings, model, state, starter)


def _measure_miss(plan: Plan, findings: Findings, model: Model, state: str, starter: Model) -> None:
    sides: dict[str, Callable[[], dict[str, Any]]] = {"torch.load": _prepared(model, state, None)}
    if plan.with_shim:
        sides["torch.load with trims"] = _prepared(model, state, starter)
    results = alternate(sides, plan.rounds, warmups=1)
    what = f"first load {model.name} {state}"
    findings.samples[what] = results
    check_equal(what, [r for runs in results.values() for r in runs], findings)
    shim = results.get("torch.load with trims")
    findings.rows.append(
        compared(
            f"first load, file {state}",
            model.title,
            [run["total_s"] for run in results["torch.load"]],
            [run["total_s"] for run in shim] if shim else None,
            target=Target(at_most=1.1) if model.size_bytes >= LARGE_BYTES else None,
            slower_is="shim",
            note=served_note(what, shim, findings) if shim else "",
        )
    )


def _prepared(model: Model, state: str, starter: Model | None) -> Callable[[], dict[str, Any]]:
    """One load of a model that no daemon knows; ``starter`` only starts the daemon."""

    def run() -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            environment = None
            if starter is not None:
                own = stack.enter_context(daemon())
                own.warm(starter.pt)
                environment = own.environment
            cached = drop_cached(model.pt)
            if state == "in the page cache":
                cached = warm_cached(model.pt)
            elif cached > COLD_LIMIT:
                raise RuntimeError(f"{cached:.0%} of {model.pt} cannot be dropped from the cache")
            is_large = model.size_bytes >= LARGE_BYTES
            settle_bytes = int(MISS_SHARE * model.size_bytes) if is_large else 0
            result = run_once(
                "load",
                environment=environment,
                path=model.pt,
                how="torch",
                settle_bytes=settle_bytes,
            )
            return result | {"cached_before": cached}

    return run
