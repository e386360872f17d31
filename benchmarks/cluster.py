"""What a service on Ray costs for each request, and what a change of a variant costs.

``python -m benchmarks.cluster`` starts a Ray of its own on this machine and writes
``docs/results/cluster.json``.

- **Routing**: the same device, asked directly (``actor.answer.remote``) and through a
  :class:`~trims_shim.cluster.Service`; one request after another, and a thousand at once.
- **Changes**: actors that hold nothing load the same weights at the same moment, with and without
  the shim; the time until the last of them has loaded and touched all weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from benchmarks import harness, models
from benchmarks.harness import Result, Summary
from trims_shim.batching import LatencyProfile
from trims_shim.cluster import deploy
from trims_shim.cluster.actor import DeviceActor
from trims_shim.planner import Option, Problem

__all__ = ["main"]

_LIMIT_S = 300.0
_SIZE = 32
_MS = 1e3


def _option(variant: str) -> Option:
    profile = LatencyProfile.linear(0.01, 0.1, max_batch_size=_SIZE)
    return Option("family", variant, "cpu", 1.0, profile)


def _echo(device: str) -> Callable[[list[Any]], list[Any]]:
    return list


def _timed(ask: Callable[[], object], times: int = 1) -> float:
    """Milliseconds for each of ``times``."""
    start = time.perf_counter()
    ask()
    return (time.perf_counter() - start) / times * _MS


# --- routing --------------------------------------------------------------------------------------


def routing(rounds: int, requests: int) -> Result:
    """Medians of milliseconds for a request."""
    problem = Problem({"cpu": 1}, [_option("echo")], {"family": 100})
    with deploy(problem, {"echo": _echo}, queue_size=requests) as service:
        direct = ray.remote(DeviceActor).options(num_cpus=1).remote({"echo": _echo}, None)
        ray.get(direct.load.remote(1, _option("echo")), timeout=_LIMIT_S)

        def answer(item: int) -> Any:
            return direct.answer.remote(1, item, float("inf"))

        def one_by_one(ask: Callable[[int], object]) -> float:
            return _timed(lambda: [ask(item) for item in range(requests)], requests)

        def at_once_direct() -> object:
            return ray.get([answer(item) for item in range(requests)], timeout=_LIMIT_S)

        def at_once_service() -> object:
            futures = [service.submit("family", item) for item in range(requests)]
            return [future.result(_LIMIT_S) for future in futures]

        sides = {
            "direct": lambda: {
                "one_by_one_ms": one_by_one(lambda item: ray.get(answer(item))),
                "at_once_ms": _timed(at_once_direct, requests),
            },
            "service": lambda: {
                "one_by_one_ms": one_by_one(lambda item: service.call("family", item)),
                "at_once_ms": _timed(at_once_service, requests),
            },
        }
        found = harness.alternate(sides, rounds, warmups=1)
        ray.kill(direct)
    return {
        f"{side}_{name}": Summary.of([each[name] for each in results])
        for side, results in found.items()
        for name in ("one_by_one_ms", "at_once_ms")
    }


# --- changes --------------------------------------------------------------------------------------


def _loader(architecture: str, path: str) -> Callable[[str], Callable[[list[Any]], list[Any]]]:
    """As programs do that skip the initialisation of weights."""

    def load(device: str) -> Callable[[list[Any]], list[Any]]:
        import torch

        with torch.device("meta"):
            model = models.ARCHITECTURES[architecture]()
        model.load_state_dict(torch.load(path), assign=True)
        touched = sum(float(each.reshape(-1)[::1024].sum()) for each in model.state_dict().values())
        return lambda items: [touched + 0 * sum(each.numel() for each in model.parameters())]

    return load


def changes(rounds: int, architecture: str, actors: int, settings: dict[str, str]) -> Result:
    """Summaries of milliseconds until the last actor has changed its variant."""
    checkpoint = models.ensure_checkpoint(architecture, "pt")
    loaders = {"nothing": _echo, "large": _loader(architecture, str(checkpoint.path))}

    def start(variables: dict[str, str]) -> list[Any]:
        environment = {"env_vars": variables | {"PYTHONPATH": os.pathsep.join(sys.path)}}
        made = ray.remote(num_cpus=0.1, runtime_env=environment)(DeviceActor)
        return [made.remote(loaders, None) for _ in range(actors)]

    groups = {"without": start({"TRIMS_ENABLED": "0"}), "with": start(settings)}
    loads = iter(range(1, 1_000_000))

    def change(group: list[Any]) -> Result:
        def to(variant: str) -> object:
            option = _option(variant)
            return ray.get([each.load.remote(next(loads), option) for each in group])

        to("nothing")
        return {"ms": _timed(lambda: to("large"))}

    def side(group: list[Any]) -> Callable[[], Result]:
        return lambda: change(group)

    sides = {name: side(group) for name, group in groups.items()}
    found = harness.alternate(sides, rounds, warmups=1)
    for actor in (each for group in groups.values() for each in group):
        ray.kill(actor)
    times = {name: [each["ms"] for each in results] for name, results in found.items()}
    return {
        "model": architecture,
        "size_mb": checkpoint.path.stat().st_size / 1e6,
        "actors": actors,
        **{f"{name}_ms": Summary.of(samples) for name, samples in times.items()},
        "gain": harness.pair_ratios(times["without"], times["with"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = harness.argument_parser("cluster", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--models", nargs="+", choices=models.ARCHITECTURES, default=["vgg16", "gpt2-medium"]
    )
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 4])
    options = parser.parse_args(arguments)
    with harness.daemon() as private:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            routed = routing(options.rounds, options.requests)
            for name, summary in routed.items():
                print(f"{name}: {summary.median:.2f} ({summary.low:.2f} to {summary.high:.2f})")
            changed = []
            for model in options.models:
                for actors in options.actors:
                    row = changes(options.rounds, model, actors, dict(private.environment))
                    print(f"{model}, {actors} actors: {row}", flush=True)
                    changed.append(row)
        finally:
            ray.shutdown()
    content = {
        "machine": harness.describe_machine() | {"ray": ray.__version__},
        "routing": routed,
        "changes": changed,
    }
    harness.write_json(options.output / "cluster.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
