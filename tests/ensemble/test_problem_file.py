"""What is saved is what is loaded, and nothing else is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest

from tests.ensemble.making import random_problem
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.ensemble import (
    Device,
    Footprint,
    MemberProfile,
    Problem,
    load_problem,
    save_problem,
)
from trims_shim.errors import FormatError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ensemble.json"
    save_problem(path, random_problem(Random(1), devices=2, members=3))
    return path


def test_a_link_stays_one(saved: Path) -> None:
    link = saved.with_name("link.json")
    link.symlink_to(saved.name)
    save_problem(link, random_problem(Random(2), devices=3, members=3))
    assert link.is_symlink()
    assert len(load_problem(saved).devices) == 3


def test_there_and_back(saved: Path) -> None:
    assert load_problem(saved) == random_problem(Random(1), devices=2, members=3)


def test_estimates_are_those_of_what_was_measured(tmp_path: Path) -> None:
    """Of some sizes, the second of which was slower than the third."""
    footprints = random_problem(Random(1), devices=1, members=1).members["m0"].footprints
    (kind,) = footprints
    latencies = LatencyProfile.measured({1: 10e6, 8: 33e6, 16: 31e6, 64: 90e6}, pads=False)
    measured = MemberProfile(footprints, {kind: latencies})
    problem = Problem([Device("x", 1 << 40, kind=kind)], {"a": measured}, (8, 16, 64))
    save_problem(tmp_path / "p.json", problem)
    assert load_problem(tmp_path / "p.json") == problem


def test_many_latencies(tmp_path: Path) -> None:
    """Three members, which were measured with the largest batches."""
    (member,) = random_problem(Random(1), devices=1, members=1).members.values()
    (kind,) = member.footprints
    latencies = {kind: LatencyProfile.linear(0.1, 100, max_batch_size=1 << 16)}
    measured = MemberProfile(member.footprints, latencies)
    problem = Problem([Device("x", 1 << 40, kind=kind)], dict.fromkeys("abc", measured), (1 << 16,))
    save_problem(tmp_path / "p.json", problem)
    assert load_problem(tmp_path / "p.json") == problem


def test_members_without_latencies_and_other_pools(tmp_path: Path) -> None:
    footprints = random_problem(Random(1), devices=1, members=1).members["m0"].footprints
    device = Device("x", 1 << 40, kind="gpu", pool="p", is_reserve=True)
    save_problem(tmp_path / "p.json", Problem([device], {"a": MemberProfile(footprints)}, (4,)))
    found = load_problem(tmp_path / "p.json")
    assert found.devices[0] == device
    assert found.members["a"] == MemberProfile(footprints)


@pytest.mark.parametrize(
    ("given", "loaded"),
    [(16e9, 16 * 10**9), (numpy.int64(5), 5), (math.inf, 1 << 60), (1 << 61, 1 << 60)],
)
def test_bytes_are_whole_in_a_file(tmp_path: Path, given: Any, loaded: int) -> None:
    """Found: what was saved was refused when it was loaded, or numbers of numpy's when saved."""
    sizes = tuple(numpy.array([8, 16]))
    members = {"a": MemberProfile({"x": Footprint(given, 1, given)})}
    save_problem(tmp_path / "p.json", Problem([Device("x", given)], members, sizes))
    found = load_problem(tmp_path / "p.json")
    assert found.devices == [Device("x", loaded)]
    assert found.members["a"].footprints == {"x": Footprint(loaded, 1, loaded)}
    assert found.batch_sizes == (8, 16)


Change = Callable[[dict[str, Any]], object]
CHANGES: list[Change] = [
    lambda fields: fields.update(format="other"),
    lambda fields: fields.update(version=2),
    lambda fields: fields.pop("devices"),
    lambda fields: fields.update(devices={}),
    lambda fields: fields.update(devices=[]),
    lambda fields: fields.update(devices=["cpu"]),
    lambda fields: fields["devices"][0].pop("name"),
    lambda fields: fields["devices"][0].update(name=3),
    lambda fields: fields["devices"][0].update(memory_bytes=-1),
    lambda fields: fields["devices"][0].update(memory_bytes="much"),
    lambda fields: fields["devices"][0].update(memory_bytes=True),
    lambda fields: fields["devices"][0].update(name=fields["devices"][1]["name"]),
    lambda fields: fields.update(members=[]),
    lambda fields: fields["members"].update(m0=3),
    lambda fields: fields["members"]["m0"].update(gpu=3),
    lambda fields: fields["members"]["m0"]["gpu"].pop("weights_bytes"),
    lambda fields: fields["members"]["m0"]["gpu"].update(sample_bytes=1 << 61),
    lambda fields: fields["members"]["m0"]["gpu"].update(latencies_ns={}),
    lambda fields: fields["members"]["m0"]["gpu"].update(latencies_ns={"0": 1}),
    lambda fields: fields["members"]["m0"]["gpu"].update(latencies_ns={"8": -1}),
    lambda fields: fields.update(batch_sizes=[]),
    lambda fields: fields.update(batch_sizes=[0]),
    lambda fields: fields.update(batch_sizes=[True]),
    lambda fields: fields.update(batch_sizes=[1 << 17]),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_is_refused_by_name(saved: Path, change: Change) -> None:
    fields = json.loads(saved.read_text())
    change(fields)
    saved.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match=r"ensemble\.json"):
        load_problem(saved)
