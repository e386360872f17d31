"""Names of devices, and what this machine has."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from trims_shim.ensemble import Device, devices, find_devices
from trims_shim.ensemble.devices import cores_of


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})


@pytest.mark.usefixtures("six_cores")
def test_cores() -> None:
    assert cores_of("cpu:0-3,8") == {0, 1, 2, 3, 8}
    assert cores_of("cpu:9") == {9}
    assert cores_of("cpu") == cores_of("cuda:1") == set()


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize("name", ["cpu:x", "cpu:3-1", "cpu:1-", "cpu:1,,2", "cpu:0-999999999999"])
def test_what_names_no_cores(name: str) -> None:
    with pytest.raises(ValueError, match="names no cores; write cpu:0-3,8"):
        cores_of(name)


@pytest.mark.usefixtures("six_cores")
def test_cores_of_others() -> None:
    with pytest.raises(ValueError, match="'cpu:3-5': this process may not use core 4, 5"):
        cores_of("cpu:3-5")


@pytest.mark.usefixtures("six_cores")
def test_parts_of_the_processor_share_its_memory() -> None:
    given = Device("mine", 5)
    one, other, mine = find_devices(["cpu:0", "cpu:1-3", given])
    assert (one.pool, one.memory_bytes) == (other.pool, other.memory_bytes)
    assert one.memory_bytes > 0
    assert mine is given


def test_without_gpus_the_processor_is_no_reserve() -> None:
    (found,) = find_devices()
    assert (found.name, found.is_reserve) == ("cpu", False)


@pytest.mark.parametrize("name", ["tpu:0", "cuda:x", "", "gpu"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="is no device; there are cpu, cpu:0-3"):
        find_devices([name])


def test_the_memory_of_gpus_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [SimpleNamespace(id="a", total_bytes=100), SimpleNamespace(id="b", total_bytes=200)]
    monkeypatch.setattr(devices, "driver", lambda: SimpleNamespace(devices=lambda: there))
    monkeypatch.setattr(devices.nvml, "free_bytes", {"a": 30}.get)
    first, second = Device("cuda:0", 30), Device("cuda:1", 200)
    assert find_devices(["cuda", "cuda:1"]) == [first, second]
    *found, processor = find_devices()
    assert found == [first, second]
    assert processor.is_reserve


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="no GPU 'cuda:3': this process may use 0"):
        find_devices(["cuda:3"])
