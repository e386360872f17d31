"""The emulated NVML: all devices whatever CUDA shows, found by their ids, with their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pynvml
import pytest

import emulated_cuda as emulation
from emulated_cuda.calls import MIB, call, create
from emulated_cuda.conftest import Child


@pytest.fixture
def nvml(emulated_cuda: emulation.Emulated) -> Iterator[emulation.Emulated]:
    """The machine, with NVML initialised in this process."""
    pynvml.nvmlInit()
    yield emulated_cuda
    pynvml.nvmlShutdown()


def test_nothing_works_before_init(emulated_cuda: emulation.Emulated) -> None:
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlShutdown()


@pytest.mark.parametrize("emulated_environment", [{"nvml": 0}], indirect=True)
def test_a_machine_without_nvml(emulated_cuda: emulation.Emulated) -> None:
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    call("cuInit", 0)


def test_a_device_says_what_it_is(nvml: emulation.Emulated) -> None:
    device = pynvml.nvmlDeviceGetHandleByUUID(nvml.ids[0])
    assert pynvml.nvmlDeviceGetUUID(device) == nvml.ids[0]
    assert pynvml.nvmlDeviceGetName(device) == "Emulated GPU"
    assert pynvml.nvmlSystemGetDriverVersion() == "580.00-emulated"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000


def test_what_is_not_there(nvml: emulation.Emulated) -> None:
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID(nvml.ids[0][:12])
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByIndex(0), 0)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetName(ctypes.c_void_p(0))


@pytest.mark.parametrize("emulated_environment", [{"devices": 2}], indirect=True)
def test_memory_is_that_of_all_processes(
    nvml: emulation.Emulated, spawn: Callable[..., Child]
) -> None:
    def used(number: int) -> int:
        device = pynvml.nvmlDeviceGetHandleByUUID(nvml.ids[number])
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        newer = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
        assert memory.total == memory.used + memory.free == emulation.DEFAULT_MEMORY_BYTES
        assert (newer.total, newer.used, newer.free) == (memory.total, memory.used, memory.free)
        return int(memory.used)

    child = spawn("start(1); create(6 * MIB, 1); call('cuMemAlloc', 1); say(); hear()")
    child.hear()
    call("cuInit", 0)
    handle = create(2 * MIB)
    assert [used(0), used(1)] == [2 * MIB, 8 * MIB]
    child.kill()
    call("cuMemRelease", handle)
    assert [used(0), used(1)] == [0, 0]


@pytest.mark.parametrize(
    "emulated_environment", [{"devices": 3, "nvml_order": "2,0,1"}], indirect=True
)
def test_indices_are_not_those_of_cuda(
    emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pynvml.nvmlInit()
    found = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(3)
    ]
    assert found == [emulated_cuda.ids[number] for number in (2, 0, 1)]
    pynvml.nvmlShutdown()


@pytest.mark.parametrize(
    "emulated_environment", [{"devices": 2, "mig": 2, "memory_bytes": 64 * MIB}], indirect=True
)
def test_mig_instances_lie_below_their_gpu(nvml: emulation.Emulated) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2
    found = []
    for index in range(2):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert pynvml.nvmlDeviceGetUUID(gpu) == emulation.device_ids(2)[index]
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        for part in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, part)
            found.append(pynvml.nvmlDeviceGetUUID(instance))
    assert tuple(found) == nvml.ids
    call("cuInit", 0)
    handle = create(2 * MIB)
    instance = pynvml.nvmlDeviceGetHandleByUUID(nvml.ids[0])
    memory = pynvml.nvmlDeviceGetMemoryInfo(instance)
    assert (memory.total, memory.used) == (32 * MIB, 2 * MIB)
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    assert (memory.total, memory.used) == (64 * MIB, 2 * MIB)
    call("cuMemRelease", handle)
