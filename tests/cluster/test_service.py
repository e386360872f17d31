"""Services on a real Ray, of one machine: answers, errors, lost devices, plans anew, and the cache.

One Ray for all tests here. What actors do is in functions that Ray sends to them by value, as a
user's script would.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE_S, wait_until

from trims_shim.batching import LatencyProfile
from trims_shim.cluster import Service, deploy
from trims_shim.cluster.actor import DeviceActor
from trims_shim.errors import BatcherClosed, ClusterError, DeviceLost, QueueFull, RequestDropped
from trims_shim.planner import Option, Problem, replanning

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = pytest.mark.timeout(900)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.py"
PROFILE = LatencyProfile.linear(1.0, 4.0, max_batch_size=4)
START_S = 300.0
"""Ray and its actors take 15 s of processor time to start, and others may need the processors."""
LONG_MS = START_S * 1e3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, in an environment where actors start a daemon of ours."""
    directory = Path(tempfile.mkdtemp(prefix="trims-cl-", dir="/tmp"))  # names of sockets are short
    sockets = directory / "s"
    sockets.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMS_SOCKET_DIR", str(sockets))
        patch.setenv("TRIMS_AUTOSTART", "1")
        patch.setenv("TRIMS_START_TIMEOUT", "60")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ray.init(
            num_cpus=3,
            num_gpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=str(directory / "ray"),
        )
        try:
            yield
        finally:
            ray.shutdown()
            stop = [sys.executable, "-m", "trims_shim", "stop"]
            subprocess.run(stop, timeout=PATIENCE_S, check=False, capture_output=True)
            shutil.rmtree(directory, ignore_errors=True)


def option(family: str, variant: str, accuracy: float) -> Option:
    return Option(family, variant, "cpu", accuracy, PROFILE)


def loader(variant: str) -> Callable[[str], Callable[[list[Any]], list[Any]]]:
    """Answers say who gives them; items may ask for trouble."""

    def load(device: str) -> Callable[[list[Any]], list[Any]]:
        import os
        import time

        from ray.exceptions import RayActorError

        def answer(item: Any) -> Any:
            """A number with a point is a time in seconds that it takes."""
            if item == "bad":
                raise KeyError("a bad item")
            if item == "other":
                raise RayActorError
            if item == "exit":
                raise SystemExit
            if isinstance(item, float):
                time.sleep(item)
            return variant, device, os.getpid()

        return lambda items: [answer(item) for item in items]

    return load


def two_devices(**options: Any) -> Service:
    """One family on two devices."""
    problem = Problem({"cpu": 2}, [option("cats", "small", 60)], {"cats": 300})
    return started(problem, {"small": loader("small")}, slo_ms=LONG_MS, **options)


def started(problem: Problem, loaders: Mapping[str, Any], **options: Any) -> Service:
    """On half a processor for each device: Ray starts a process for each whole one."""
    options = {"start_timeout_s": START_S, **options}
    return deploy(problem, loaders, actor_options={"cpu": {"num_cpus": 0.5}}, **options)


@pytest.fixture(scope="module")
def service(cluster: None) -> Iterator[Service]:
    """A service for all tests that leave it as it is."""
    with two_devices(queue_size=16) as made:
        yield made


def test_answers_come_from_all_devices_by_all_ways(service: Service) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(service.aio("cats", 0.1) for _ in range(8)))

    answers = asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    answers += [service.submit("cats", 1).result(PATIENCE_S), service.call("cats", 1)]
    assert {answer[:2] for answer in answers} == {("small", "cpu")}
    assert len({answer[2] for answer in answers}) == 2
    stats = service.stats()
    assert stats.families["cats"].answered >= 10
    assert [device.phase for device in stats.devices] == ["ready", "ready"]
    assert all(device.node for device in stats.devices)
    assert stats.plans == 0


def test_errors_are_those_of_the_function_and_of_the_batcher(service: Service) -> None:
    with pytest.raises(KeyError, match="a bad item") as caught:
        service.call("cats", "bad")
    assert "KeyError" in str(caught.value.__cause__)  # the traceback in the actor
    with pytest.raises(ray.exceptions.RayActorError):  # of an actor that the function asked
        service.call("cats", "other")
    with pytest.raises(RuntimeError, match="SystemExit"):
        service.call("cats", "exit")
    assert service.stats().families["cats"].resent == 0
    with pytest.raises(RequestDropped) as dropped:
        service.call("cats", 1, deadline_ms=1e-3)
    assert dropped.value.reason == "hopeless"
    with pytest.raises(TypeError, match="serialize"):
        service.call("cats", threading.Lock())
    with pytest.raises(ValueError, match="'dogs' is no family of this service"):
        service.submit("dogs", 1)
    assert service.call("cats", 1)[0] == "small"


def test_too_many_requests_are_refused_at_once(service: Service) -> None:
    futures = [service.submit("cats", 0.03) for _ in range(80)]
    errors = [future.exception(PATIENCE_S) for future in futures]
    refused = [error for error in errors if error is not None]
    assert refused
    assert all(isinstance(error, QueueFull) for error in refused)


def test_requests_of_a_lost_device_are_answered_by_another_and_it_comes_back(
    cluster: None,
) -> None:
    service = two_devices()
    victim = service.call("cats", 1)[2]
    os.kill(victim, signal.SIGSTOP)
    futures = [service.submit("cats", number) for number in range(8)]
    stuck = 0

    def only_the_victims_are_left() -> bool:
        nonlocal stuck
        stats = service.stats()
        *_, other, stuck = sorted(device.open for device in stats.devices)
        return not other and stats.families["cats"].answered + stuck == 9

    wait_until(only_the_victims_are_left, "the other one's are answered")
    os.kill(victim, signal.SIGKILL)
    answers = [future.result(PATIENCE_S) for future in futures]
    assert victim not in {pid for _, _, pid in answers}
    stats = service.stats().families["cats"]
    assert stats.resent == stuck > 0
    assert stats.failed == 0
    wait_until(
        lambda: [each.phase for each in service.stats().devices] == ["ready", "ready"],
        "Ray starts it again, and it loads",
        timeout_s=START_S,
    )
    again = [service.submit("cats", 0.5) for _ in range(2)]
    assert len({future.result(PATIENCE_S)[2] for future in again}) == 2
    left = service.submit("cats", START_S)
    service.shutdown(timeout_s=0)
    assert isinstance(left.exception(0), BatcherClosed)


def test_a_device_whose_actor_somebody_killed_gets_another(cluster: None) -> None:
    """Found: Ray does not start such an actor anew, and the device was lost for good."""
    with two_devices() as service:
        for actor in list(service._driver._actors):
            ray.kill(actor)
        with pytest.raises(DeviceLost):
            service.call("cats", 1)  # given to both, one after the other
        wait_until(
            lambda: [each.phase for each in service.stats().devices] == ["ready", "ready"],
            "both are there",
            timeout_s=START_S,
        )
        assert service.call("cats", 1)[0] == "small"
        made = list(service._driver._actors)
    for actor in made:  # Ray kills them in its own time: a call may still be answered
        wait_until(lambda actor=actor: has_ended(actor), "no actor is left", timeout_s=START_S)


def has_ended(actor: Any) -> bool:
    try:
        ray.get(actor.ping.remote(), timeout=PATIENCE_S)
    except ray.exceptions.RayActorError:
        return True
    return False


def test_devices_change_with_the_demand_and_no_request_is_lost(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first most devices run cats; then only dogs are asked for."""
    options = [
        option("cats", "small", 60),
        option("cats", "large", 90),
        option("dogs", "other", 80),
    ]
    problem = Problem({"cpu": 3}, options, {"cats": 200, "dogs": 1})
    loaders = {each.variant: loader(each.variant) for each in options}
    monkeypatch.setattr(replanning, "_LEAST_PERIOD_S", 0.5)
    with started(problem, loaders, slo_ms=LONG_MS, replan_s=0.5) as service:
        before = [device.variant for device in service.stats().devices]
        assert before.count("other") == 1
        futures: list[Future[Any]] = []

        def changed() -> bool:
            # A busy machine answers fewer than are asked; the queue takes 1024.
            if sum(not future.done() for future in futures) < 500:
                futures.extend(service.submit("dogs", number) for number in range(25))
            futures.append(service.submit("cats", 1))
            time.sleep(0.05)
            stats = service.stats()
            variants = [device.variant for device in stats.devices]
            return stats.plans > 0 and variants.count("other") == 2

        wait_until(changed, "a second device runs dogs")
        done, missing = wait(futures, PATIENCE_S)
        assert not missing
        assert {future.result()[0] for future in done} <= {"small", "large", "other"}
        stats = service.stats()
        assert stats.loads > 3
        assert stats.families["dogs"].failed == stats.families["dogs"].dropped == 0


def test_the_example_changes_a_device(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    quiet, busy, failed = capsys.readouterr().out.splitlines()
    assert quiet == "few requests are answered by: large"
    assert busy == "many requests are answered by: large, small"
    assert failed == "failed: 0"


def test_a_device_knows_what_its_nodes_daemon_holds(cluster: None, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20))
    content = str(path)

    def load(device: str) -> Callable[[list[Any]], list[Any]]:
        import trims_shim

        handle = trims_shim.open(content)
        return lambda items: [handle.digest for _ in items]

    actor = ray.remote(DeviceActor).options(num_cpus=0.5).remote({"small": load}, None)
    try:
        chosen = option("cats", "small", 60)
        loaded = ray.get(actor.load.remote(1, chosen), timeout=START_S)
        (digest,) = ray.get(actor.answer.remote(1, 7, LONG_MS), timeout=PATIENCE_S)
        assert loaded.digests == {digest}
        assert digest in ray.get(actor.resident.remote(), timeout=PATIENCE_S)
        # What was asked for under another load is not answered.
        assert ray.get(actor.answer.remote(2, 7, LONG_MS), timeout=PATIENCE_S) == ()
        again = ray.get(actor.load.remote(2, chosen), timeout=PATIENCE_S)
        assert again.digests == {digest}
    finally:
        ray.kill(actor)


def test_a_loader_that_fails_ends_the_deployment(cluster: None) -> None:
    """Ray believes that there is a GPU; so does the loader."""

    def load(device: str) -> Any:
        raise OSError(f"no model for {device}")

    problem = Problem({"gpu": 1}, [Option("cats", "small", "gpu", 60, PROFILE)], {"cats": 1})
    with pytest.raises(ClusterError, match=r"small on gpu .* could not be loaded.* for cuda"):
        deploy(problem, {"small": load}, start_timeout_s=START_S)


def test_devices_that_the_cluster_does_not_have_are_named(cluster: None) -> None:
    chosen = Option("cats", "small", "edge", 60, PROFILE)
    problem = Problem({"edge": 1}, [chosen], {"cats": 1})
    with pytest.raises(ClusterError, match="did not start: 1 of kind 'edge'"):
        deploy(problem, {"small": loader("small")}, start_timeout_s=0.2)


def test_shutdown_answers_what_was_asked_and_takes_no_more(cluster: None) -> None:
    service = two_devices()
    futures = [service.submit("cats", 0.2) for _ in range(4)]
    stopping = threading.Thread(target=service.shutdown)
    stopping.start()
    wait_until(lambda: service._driver._end_ns is not None, "it is told")
    with pytest.raises(BatcherClosed):
        service.call("cats", 1)
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert all(future.result(0)[0] == "small" for future in futures)
    service.shutdown()
