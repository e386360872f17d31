"""Names of devices, and what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trims_shim.children import NoAnswer
from trims_shim.ensemble import Device, devices, find_devices
from trims_shim.ensemble.devices import cores_of
from trims_shim.errors import EnsembleError
from trims_shim.memory.driver import Driver


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})


@pytest.mark.usefixtures("six_cores")
def test_cores() -> None:
    assert cores_of("cpu:0-3,8") == {0, 1, 2, 3, 8}
    assert cores_of("cpu:9") == {9}
    assert cores_of("cpu") == cores_of("cuda:1") == set()


@pytest.mark.usefixtures("six_cores")
@pytest.mark.parametrize(
    "name", ["cpu:x", "cpu:3-1", "cpu:1-", "cpu:1,,2", "cpu:0-999999999999", f"cpu:0-{1 << 64}"]
)
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


@pytest.mark.parametrize("given", [("cpu",), {"cpu"}, {"cpu": 1}.keys(), np.array(["cpu"])])
def test_names_in_what_is_no_list(given: Any) -> None:
    (found,) = find_devices(given)
    assert found.name == "cpu"


@pytest.mark.parametrize("given", [(), {}, np.array([])])
def test_no_names(given: Any) -> None:
    with pytest.raises(ValueError, match="devices is empty"):
        find_devices(given)


@pytest.mark.parametrize("given", ["cpu", 2])
def test_no_list(given: Any) -> None:
    with pytest.raises(TypeError, match=f"devices is {given!r}; it has to be a list of names"):
        find_devices(given)


@pytest.mark.parametrize("given", [0, None])
def test_no_name(given: Any) -> None:
    with pytest.raises(TypeError, match=f"a device is {given!r}; give its name"):
        find_devices(["cpu", given])


@pytest.mark.parametrize("name", ["tpu:0", "cuda:x", "", "gpu"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match="is no device; there are cpu, cpu:0-3"):
        find_devices([name])


def test_the_memory_of_gpus_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ask_child", lambda code: [[100, 30], [200, None]])
    first, second = Device("cuda:0", 30), Device("cuda:1", 200)
    assert find_devices(["cuda", "cuda:1"]) == [first, second]
    with pytest.raises(ValueError, match="no GPU 'cuda:2': this process may use 2"):
        find_devices(["cuda:2"])
    *found, processor = find_devices()
    assert found == [first, second]
    assert processor.is_reserve


def test_another_process_asks_the_driver(
    monkeypatch: pytest.MonkeyPatch, make_emulated_environment: Callable[..., dict[str, str]]
) -> None:
    variables = make_emulated_environment(devices=2, memory_bytes=1 << 30)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Driver, "__init__", lambda driver: pytest.fail("this process asked"))
    first, second, _ = find_devices()
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert 0 < first.memory_bytes <= 1 << 30
    assert find_devices(["cuda:1", "cpu"])[0] == second


def test_where_it_cannot_be_known_which_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(code: str) -> Any:
        raise NoAnswer("no answer within 20 s")

    monkeypatch.setattr(devices, "ask_child", ask)
    with pytest.raises(EnsembleError, match="which GPUs there are: no answer within 20 s"):
        find_devices()
    (processor,) = find_devices(["cpu"])
    assert processor.name == "cpu"


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="no GPU 'cuda:3': this process may use 0"):
        find_devices(["cuda:3"])
