"""From a problem to a service: plan, start one Ray actor for each device, load variants."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

from trims_shim.batching.arguments import objective_ns, patience_s
from trims_shim.batching.policies.registry import rule_maker
from trims_shim.checks import whole
from trims_shim.cluster.actor import DeviceActor, Loader
from trims_shim.cluster.driving import Driver
from trims_shim.cluster.fleet import Fleet
from trims_shim.cluster.routing import Router
from trims_shim.cluster.service import Service
from trims_shim.errors import ClusterError
from trims_shim.plan_files import read_cluster
from trims_shim.planner import Problem, plan_proteus
from trims_shim.planner.replanning import Replanner

__all__ = ["deploy"]

_BURST = 1.1
"""See :class:`~trims_shim.planner.Replanning`."""
_ASIDE = 100
"""Calls that an actor may run beside batches: Ray's limit is for all of them."""


def deploy(
    problem: Problem | str | os.PathLike[str],
    loaders: Mapping[str, Loader],
    *,
    slo_ms: float | Mapping[str, float | None] | None = None,
    headroom: float = 1.5,
    replan_s: float | None = None,
    actor_options: Mapping[str, Mapping[str, Any]] | None = None,
    policy: str | None = None,
    queue_size: int = 1024,
    resend: bool = True,
    start_timeout_s: float = 300.0,
) -> Service:
    """Plan, start one Ray actor for each device, and load variants; blocks until all have loaded.

    ``problem``: what to plan for (:func:`~trims_shim.planner.plan_proteus`), or a file as for
    ``trims plan proteus``, which has the objectives of families, too.
    ``loaders``: by the names of variants. A loader runs in an actor. It is given the device for
    torch (``"cuda"`` or ``"cpu"``) and returns a function of batches.
    ``slo_ms``: the objective, one for all families or one for each; None for no limit, as of those
    that are left out. Batches take less than half of it.
    ``headroom``: how many times its demand each family's devices can answer.
    ``replan_s``: estimate the demand and plan again after this time, and at bursts; None for never.
    ``actor_options``: by the kind of device, options of its actors for Ray. By default an actor
    takes a GPU for the kind ``gpu``, a CPU for ``cpu``, and 1 of the custom resource of its name
    for others.
    ``policy``: of the batchers in the actors, see :class:`~trims_shim.batching.Batcher`.
    ``queue_size``: how many requests of a family may wait; others get QueueFull.
    ``resend``: a request whose device was lost is given to another one, once. It may then have run
    twice; if that does harm, False: such requests fail with DeviceLost.
    ``start_timeout_s``: for actors to start, and again for variants to load.

    Connects to the cluster of ``RAY_ADDRESS``, or starts Ray on this machine, unless ``ray.init``
    was called before. If so, several services can be deployed; else Ray ends with this one. Raises
    ClusterError if Ray is missing, an actor does not start, or a variant cannot be loaded;
    PlanningError; of a file OSError and FormatError; ValueError and TypeError.
    """
    problem, slo_ns = _with_objectives(problem, slo_ms)
    unknown = sorted({option.variant for option in problem.options} - set(loaders))
    if unknown:
        raise ValueError(f"loaders has none for {', '.join(unknown)}: add one for each variant")
    for variant, loader in loaders.items():
        if not callable(loader):
            raise TypeError(f"the loader of {variant} is {loader!r}; it has to be a function")
    actor_options = actor_options or {}
    if foreign := set(actor_options) - set(problem.devices):
        raise ValueError(
            f"actor_options has {', '.join(map(repr, sorted(foreign)))}, which is no kind of device"
        )
    if replan_s is not None:
        replan_s = patience_s("replan_s", replan_s)
        if not replan_s > 0:
            raise ValueError(f"replan_s is {replan_s}; None is for never")
    start_timeout_s = patience_s("start_timeout_s", start_timeout_s)
    if policy is not None:
        rule_maker(policy)  # raises here, not as an error of each loader
    plan = functools.partial(plan_proteus, headroom=headroom)
    placement = plan(problem)
    kinds = [kind for kind, count in problem.devices.items() for _ in range(count)]
    fleet = Fleet(kinds)
    fleet.place(placement)
    router = Router(fleet, slo_ns, queue_size=whole("queue_size", queue_size), resends=resend)
    ray = _ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            ray.init()
            stack.callback(ray.shutdown)
        largest = max((each.profile.max_batch_size for each in problem.options), default=1)
        start = ray.remote(max_restarts=-1, max_concurrency=2 * largest + _ASIDE)(DeviceActor)

        def make_actor(number: int) -> Any:
            options = dict(actor_options.get(kinds[number]) or _usual_options(kinds[number]))
            return start.options(**options).remote(dict(loaders), policy)

        actors: list[Any] = []
        stack.callback(_kill, ray, actors)
        actors.extend(map(make_actor, range(len(kinds))))
        _wait_until_up(ray, kinds, actors, start_timeout_s)
        replanner = None
        if replan_s is not None:
            since_ns = time.monotonic_ns()
            replanner = Replanner(placement, period_s=replan_s, burst=_BURST, since_ns=since_ns)
        driver = Driver(
            actors,
            fleet,
            router,
            start=make_actor,
            placement=placement,
            problem=problem,
            plan=plan,
            replanner=replanner,
            is_up=ray.is_initialized,
        )
        stack.callback(driver.stop, 0)
        _wait_until_loaded(driver, start_timeout_s)
        return Service(driver, fleet, router, slo_ns, on_shutdown=stack.pop_all().close)


def _with_objectives(
    problem: Problem | str | os.PathLike[str],
    slo_ms: float | Mapping[str, float | None] | None,
) -> tuple[Problem, dict[str, int]]:
    """Return the problem with the options that fit the objectives, and these by family."""
    if not isinstance(problem, Problem):
        if slo_ms is not None:
            raise ValueError("slo_ms is for a Problem; a file has the objectives of its families")
        found = read_cluster(os.fspath(problem))
        return found.problem, {family: objective_ns(ms) for family, ms in found.slo_ms.items()}
    families = list(problem.demand_qps)
    of_families = slo_ms if isinstance(slo_ms, Mapping) else dict.fromkeys(families, slo_ms)
    if foreign := set(of_families) - set(families):
        raise ValueError(f"slo_ms has {', '.join(map(repr, sorted(foreign)))}, which is no family")
    slo_ns = {family: objective_ns(of_families.get(family)) for family in families}
    limits_ms = {family: ms for family, ms in of_families.items() if ms is not None}
    fitting = (each.within(limits_ms.get(each.family, math.inf)) for each in problem.options)
    options = [option for option in fitting if option is not None]
    return dataclasses.replace(problem, options=options), slo_ns


def _usual_options(kind: str) -> dict[str, Any]:
    """What an actor for this kind of device takes."""
    usual: dict[str, dict[str, Any]] = {"cpu": {"num_cpus": 1}, "gpu": {"num_gpus": 1}}
    return usual.get(kind, {"resources": {kind: 1}})


def _wait_until_up(ray: Any, kinds: Sequence[str], actors: Sequence[Any], timeout_s: float) -> None:
    """Raise ClusterError if an actor has not started in time, or cannot."""
    pings = [actor.ping.remote() for actor in actors]
    up, missing = ray.wait(pings, num_returns=len(pings), timeout=timeout_s)
    if missing:
        counts = Counter(kind for kind, ping in zip(kinds, pings, strict=True) if ping in missing)
        wanted = ", ".join(f"{count} of kind {kind!r}" for kind, count in counts.items())
        raise ClusterError(
            f"in {timeout_s:g} s, these devices did not start: {wanted}. Of Ray's resources "
            f"{ray.cluster_resources()}, {ray.available_resources()} are free: add nodes, say in "
            "actor_options what a device takes, or plan for fewer"
        )
    try:
        ray.get(up)
    except ray.exceptions.RayError as error:
        raise ClusterError(f"a device cannot start: {error}") from error


def _wait_until_loaded(driver: Driver, timeout_s: float) -> None:
    """Raise ClusterError if a variant has not loaded in time, or cannot."""
    try:
        driver.started.result(timeout_s)
    except futures.TimeoutError:
        raise ClusterError(
            f"in {timeout_s:g} s, not all variants have loaded: give more start_timeout_s, or see "
            "Ray's logs of the actors"
        ) from None


def _kill(ray: Any, actors: Sequence[Any]) -> None:
    """End each of them, whatever becomes of the others."""
    if not ray.is_initialized():  # they are gone, and ray.kill would start another Ray
        return

    def kill(actor: Any) -> None:
        with contextlib.suppress(ValueError):  # it was of another Ray, which is gone, too
            ray.kill(actor)

    with contextlib.ExitStack() as stack:
        for actor in actors:
            stack.callback(kill, actor)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(
            f'a service needs Ray: pip install "trims-shim[cluster]" ({error})'
        ) from error
