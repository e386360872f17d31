"""What is wrong with a deployment is said before anything is started. No Ray."""

from __future__ import annotations

import math
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.making import LARGE, OTHER, SMALL
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.cluster import deploy
from trims_shim.cluster.deploying import _kill, _usual_options, _wait_until_loaded, _with_objectives
from trims_shim.errors import ClusterError, FormatError, PlanningError
from trims_shim.planner import Problem

PROBLEM = Problem({"gpu": 2}, [SMALL, LARGE, OTHER], {"cats": 10, "dogs": 5})
MS = 1_000_000

FILE = """
slo_ms = 300
[devices]
cpu = 1
[families.cats]
demand_qps = 5
[families.cats.variants.small]
accuracy = 60
latency_ms.cpu = { 1 = 20, 8 = 200 }
"""


def load(device: str) -> object:
    raise AssertionError("nothing is started")


LOADERS = {"small": load, "large": load, "other": load}


def test_objectives_are_for_all_families_or_for_each() -> None:
    # Batches of two take 10 ms, or 50 ms with LARGE and OTHER.
    same, slo_ns = _with_objectives(PROBLEM, 90)
    assert slo_ns == {"cats": 90 * MS, "dogs": 90 * MS}
    assert [each.variant for each in same.options] == ["small"]
    own, slo_ns = _with_objectives(PROBLEM, {"cats": 90})
    assert slo_ns == {"cats": 90 * MS, "dogs": NEVER_NS}
    assert [each.variant for each in own.options] == ["small", "other"]
    assert _with_objectives(PROBLEM, {"cats": 90, "dogs": None}) == (own, slo_ns)
    unlimited, slo_ns = _with_objectives(PROBLEM, None)
    assert unlimited.options == PROBLEM.options
    assert set(slo_ns.values()) == {NEVER_NS}


def test_a_file_has_the_objectives(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    problem, slo_ns = _with_objectives(path, None)
    assert slo_ns == {"cats": 300 * MS}
    assert problem.options[0].profile.max_batch_size < 8
    with pytest.raises(ValueError, match="a file has the objectives"):
        deploy(path, LOADERS, slo_ms=100)
    path.write_text("devices = 3")
    with pytest.raises(FormatError, match="devices is not a table"):
        deploy(path, LOADERS)


def test_what_a_device_takes_by_default() -> None:
    assert _usual_options("gpu") == {"num_gpus": 1}
    assert _usual_options("cpu") == {"num_cpus": 1}
    assert _usual_options("edge") == {"resources": {"edge": 1}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo_ms": {"birds": 1}}, "slo_ms has 'birds', which is no family"),
        ({"slo_ms": 0}, "slo_ms is 0"),
        ({"actor_options": {"gpus": {}}}, "actor_options has 'gpus', which is no kind of device"),
        ({"replan_s": 0}, "replan_s is 0"),
        ({"replan_s": math.nan}, "replan_s"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"policy": "autoo"}, "there is no policy 'autoo'"),
        ({"headroom": 0}, "headroom is 0"),
        ({"loaders": {"small": load}}, "none for large, other"),
    ],
)
def test_unusable_arguments_are_refused(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=message):
        deploy(PROBLEM, **{"loaders": LOADERS, **options})  # type: ignore[arg-type]


def test_a_loader_that_is_no_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: with the name of a file, Ray was started first."""
    monkeypatch.setitem(sys.modules, "ray", None)
    loaders: Any = LOADERS | {"large": "large.pt"}
    with pytest.raises(TypeError, match=r"loader of large is 'large\.pt'; it has to be a function"):
        deploy(PROBLEM, loaders)


def test_a_family_that_no_device_serves_in_time_cannot_be_planned() -> None:
    with pytest.raises(PlanningError, match="'dogs'"):
        deploy(PROBLEM, LOADERS, slo_ms=90)


def test_a_loader_that_takes_too_long_is_named_as_the_cause() -> None:
    driver = SimpleNamespace(started=Future())
    with pytest.raises(ClusterError, match=r"in 0\.01 s, not all variants have loaded"):
        _wait_until_loaded(driver, 0.01)  # type: ignore[arg-type]


def test_actors_of_a_ray_before_this_one_are_gone() -> None:
    def kill(actor: object) -> None:
        raise ValueError("ActorHandle objects are not valid across Ray sessions")

    _kill(SimpleNamespace(is_initialized=lambda: True, kill=kill), [object()])


def test_an_interrupt_while_an_actor_is_ended_leaves_no_other() -> None:
    asked: list[int] = []

    def kill(actor: int) -> None:
        asked.append(actor)
        raise KeyboardInterrupt if len(asked) == 2 else ValueError

    with pytest.raises(KeyboardInterrupt):
        _kill(SimpleNamespace(is_initialized=lambda: True, kill=kill), [1, 2, 3])
    assert sorted(asked) == [1, 2, 3]


def test_ray_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"trims-shim\[cluster\]"):
        deploy(PROBLEM, LOADERS)
