"""NVML answers for the device with this id, whatever its number; where it cannot, it says None."""

from __future__ import annotations

import sys
import time

import emulated_cuda as emulation
import pytest
from forks import passes_in_child

from trims_shim.memory import nvml
from trims_shim.memory.driver import driver

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

GRANULE = emulation.GRANULARITY
TWO = {"devices": 2, "memory_bytes": (64 << 20, 32 << 20), "names": "Large,Small"}


@pytest.mark.parametrize("emulated_environment", [TWO], indirect=True)
def test_the_free_memory_of_devices(emulated_cuda: emulation.Emulated) -> None:
    large, small = emulated_cuda.ids
    handle = driver().create(1, 3 * GRANULE)
    assert nvml.free_bytes(large) == 64 << 20
    assert nvml.free_bytes(small) == (32 << 20) - 3 * GRANULE
    driver().release(handle)
    assert nvml.free_bytes(small) == 32 << 20


@pytest.mark.parametrize("emulated_environment", [TWO | {"nvml_order": "1,0"}], indirect=True)
def test_its_own_numbering_makes_no_difference(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (visible,) = driver().devices()
    assert nvml.free_bytes(visible.id) == visible.total_bytes == 32 << 20


@pytest.mark.parametrize("emulated_environment", [{"mig": 2}], indirect=True)
def test_a_mig_instance_has_its_own_memory(emulated_cuda: emulation.Emulated) -> None:
    (visible,) = driver().devices()
    free_bytes = nvml.free_bytes(visible.id)
    assert free_bytes == visible.total_bytes < emulation.DEFAULT_MEMORY_BYTES


@pytest.mark.parametrize("device", ["", "GPU-", "GPU-00000000-7e57-4cda-8000-0000000000ff", "host"])
def test_an_unknown_device_is_none(emulated_cuda: emulation.Emulated, device: str) -> None:
    assert nvml.free_bytes(device) is None


def test_the_version_of_the_driver(emulated_cuda: emulation.Emulated) -> None:
    assert nvml.driver_version() == "580.00-emulated"


@pytest.mark.parametrize("emulated_environment", [{"nvml": 0}], indirect=True)
def test_nvml_out_of_order_is_none(emulated_cuda: emulation.Emulated) -> None:
    assert nvml.free_bytes(emulated_cuda.ids[0]) is None
    assert nvml.driver_version() is None


def test_the_package_missing_is_none(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.free_bytes(emulated_cuda.ids[0]) is None


def test_it_is_initialised_once_and_after_a_while_again_if_that_failed(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    tries: list[int] = []
    initialise, now_s = pynvml.nvmlInit, 1000.0

    def fail() -> None:
        tries.append(1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def succeed() -> None:
        tries.append(2)
        initialise()

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert [nvml.driver_version() for _ in range(3)] == [None] * 3
    assert tries == [1]
    monkeypatch.setattr(pynvml, "nvmlInit", succeed)
    now_s += 29
    assert nvml.driver_version() is None
    now_s += 1
    assert [nvml.driver_version() for _ in range(2)] == ["580.00-emulated"] * 2
    now_s += 100
    assert nvml.driver_version() == "580.00-emulated"
    assert tries == [1, 2]


def test_a_forked_child_asks_only_what_its_parent_has_not_used(
    emulated_cuda: emulation.Emulated,
) -> None:
    device = emulated_cuda.ids[0]
    assert passes_in_child(lambda: nvml.free_bytes(device) is not None)
    assert nvml.free_bytes(device) is not None
    assert passes_in_child(
        lambda: (
            nvml.free_bytes(device) is None
            and nvml.driver_version() is None
            and passes_in_child(lambda: nvml.free_bytes(device) is None)
        )
    )
    assert nvml.free_bytes(device) is not None
