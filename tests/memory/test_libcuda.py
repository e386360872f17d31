"""The declarations of libcuda: what they say is what cuda.h says, by NVIDIA's own package."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import emulated_cuda as emulation
import pytest

from trims_shim.memory import libcuda
from trims_shim.memory.libcuda import Library

ENUMERATIONS = {
    "CU_COMPUTEMODE_": "CUcomputemode",
    "CUDA_SUCCESS": "CUresult",
    "CU_DEVICE_ATTRIBUTE_": "CUdevice_attribute",
    "CU_DEVICE_P2P_ATTRIBUTE_": "CUdevice_P2PAttribute",
    "CU_IPC_MEM_": "CUipcMem_flags",
    "CU_MEM_ACCESS_FLAGS_": "CUmemAccess_flags",
    "CU_MEM_ALLOCATION_TYPE_": "CUmemAllocationType",
    "CU_MEM_ALLOC_GRANULARITY_": "CUmemAllocationGranularity_flags",
    "CU_MEM_HANDLE_TYPE_": "CUmemAllocationHandleType",
    "CU_MEM_LOCATION_TYPE_": "CUmemLocationType",
    "CU_STREAM_CAPTURE_MODE_": "CUstreamCaptureMode",
    "CU_STREAM_NON_BLOCKING": "CUstream_flags",
}
CONSTANTS = [
    name
    for name in libcuda.__all__
    if name.startswith(("CU_", "CUDA_")) and name != "CU_IPC_HANDLE_SIZE"
]


ENUMERATIONS_OF_PARAMETERS = (
    "CUdevice_P2PAttribute",
    "CUdevice_attribute",
    "CUmemAllocationGranularity_flags",
    "CUmemAllocationHandleType",
    "CUresult",
    "CUstreamCaptureMode",
)
BYTES = {
    **dict.fromkeys(("int", "unsigned int", "CUdevice", *ENUMERATIONS_OF_PARAMETERS), 4),
    **dict.fromkeys(("size_t", "unsigned long long", "CUdeviceptr"), 8),
    **dict.fromkeys(("CUmemGenericAllocationHandle", "CUcontext", "CUstream", "CUevent"), 8),
    "unsigned char": 1,
    "CUuuid": 16,
    "CUipcMemHandle": 64,
}
"""Of what functions take, by its name in cuda.h."""
TABLE = Path(__file__).resolve().parents[2] / "native" / "driver.hpp"


def of_nvidia() -> Any:
    from cuda.bindings import driver

    return driver


def offsets(structure: Any) -> dict[str, tuple[int, int]]:
    fields = [name for name, _ in structure._fields_]
    return {
        name: (getattr(structure, name).offset, getattr(structure, name).size) for name in fields
    }


def parameters(name: str) -> list[str]:
    """The types of a function's parameters, by NVIDIA's declaration of it."""
    found = importlib.util.find_spec("cuda.bindings")
    assert found is not None
    assert found.submodule_search_locations is not None
    text = Path(found.submodule_search_locations[0], "cydriver.pxd").read_text()
    match = re.search(rf"^cdef CUresult {name}\((.*?)\)", text, re.MULTILINE)
    assert match is not None, name
    declared = (each.removeprefix("const ") for each in match[1].split(", ") if each)
    return [each.rpartition(" ")[0].replace(" *", "*") for each in declared]


def width(kind: str) -> int:
    return 8 if kind.endswith("*") else BYTES[kind]


@pytest.mark.parametrize("name", libcuda.FUNCTIONS)
def test_parameters(name: str) -> None:
    function, declared = libcuda.FUNCTIONS[name], parameters(name)
    outputs = [] if function.output is None else [ctypes.POINTER(function.output)]
    kinds = [*outputs, *function.inputs]
    assert [ctypes.sizeof(each) for each in kinds] == list(map(width, declared))
    pointee = declared[0].removesuffix("*") if outputs else ""
    if pointee in BYTES:  # else the caller says how large the memory is, or what is in it
        assert ctypes.sizeof(function.output) == BYTES[pointee]


def test_the_table_in_c() -> None:
    """What the copy engine says of the functions that it calls."""
    table = TABLE.read_text()
    ours = re.findall(r"X\(\w+, (\w+), \((.*?)\)\)", table)
    assert len(ours) == table.count("\n  X(") > 0
    for symbol, text in ours:
        kinds = [each.removeprefix("const ") for each in text.split(", ")]
        names = {"unsigned": "unsigned int", "CuAddress": "CUdeviceptr"}
        named = [
            names.get(each) or re.sub("^Cu(.)", lambda found: f"CU{found[1].lower()}", each)
            for each in kinds
        ]
        declared = parameters(symbol.removesuffix("_v2"))
        assert list(map(width, named)) == list(map(width, declared)), symbol
        assert [each.count("*") for each in named] == [each.count("*") for each in declared], symbol


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    (kind,) = {kind for start, kind in ENUMERATIONS.items() if name.startswith(start)}
    assert getattr(libcuda, name) == int(getattr(getattr(of_nvidia(), kind), name))


def test_layouts() -> None:
    """By a C compiler, of cuda.h of CUDA 13.0 on x86-64."""
    assert ctypes.sizeof(libcuda.CUuuid) == 16
    assert ctypes.sizeof(libcuda.CUipcMemHandle) == libcuda.CU_IPC_HANDLE_SIZE == 64
    assert ctypes.sizeof(libcuda.CUmemLocation) == 8
    assert offsets(libcuda.CUmemLocation) == {"type": (0, 4), "id": (4, 4)}
    assert ctypes.sizeof(libcuda.CUmemAccessDesc) == 12
    assert offsets(libcuda.CUmemAccessDesc) == {"location": (0, 8), "flags": (8, 4)}
    assert ctypes.sizeof(libcuda.CUmemAllocationProp) == 32
    assert offsets(libcuda.CUmemAllocationProp) == {
        "type": (0, 4),
        "requestedHandleTypes": (4, 4),
        "location": (8, 8),
        "win32HandleMetaData": (16, 8),
        "allocFlags": (24, 8),
    }
    assert offsets(dict(libcuda.CUmemAllocationProp._fields_)["allocFlags"]) == {
        "compressionType": (0, 1),
        "gpuDirectRDMACapable": (1, 1),
        "usage": (2, 2),
        "reserved": (4, 4),
    }


def test_structures_are_written_as_nvidia_writes_them() -> None:
    nvidia = of_nvidia()
    theirs = nvidia.CUmemAllocationProp()
    theirs.type = nvidia.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.requestedHandleTypes = (
        nvidia.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    theirs.location.type = nvidia.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 0x01020304
    ours = libcuda.CUmemAllocationProp(
        type=libcuda.CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes=libcuda.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location=libcuda.CUmemLocation(libcuda.CU_MEM_LOCATION_TYPE_DEVICE, 0x01020304),
    )
    assert bytes(ours) == ctypes.string_at(int(theirs.getPtr()), ctypes.sizeof(ours))
    rights = nvidia.CUmemAccessDesc()
    rights.location.type = nvidia.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    rights.location.id = 0x01020304
    rights.flags = nvidia.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    access = libcuda.CUmemAccessDesc(ours.location, libcuda.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    assert bytes(access) == ctypes.string_at(int(rights.getPtr()), ctypes.sizeof(access))


def test_every_function_is_there(emulated_cuda: emulation.Emulated) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, function in libcuda.FUNCTIONS.items():
        assert function.symbol in (name, f"{name}_v2")
        assert hasattr(driver, function.symbol)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("cuInit", (-1,)),
        ("cuInit", (1 << 32,)),
        ("cuDeviceGet", (1 << 31,)),
        ("cuDeviceGet", (-(1 << 31) - 1,)),
        ("cuMemRelease", (-1,)),
        ("cuMemRelease", (1 << 64,)),
        ("cuMemRelease", (2.0,)),
        ("cuMemRelease", (None,)),
        ("cuMemAlloc", (1 << 64,)),
        ("cuMemAlloc", ("1",)),
        ("cuMemCreate", (1 << 21, libcuda.CUmemLocation(), 0)),
        ("cuMemSetAccess", (1 << 21, 1 << 21, libcuda.CUmemAllocationProp(), 1)),
        ("cuIpcOpenMemHandle", (bytes(64), 1)),
        ("cuThreadExchangeStreamCaptureMode", (2,)),
    ],
)
def test_what_does_not_fit_its_parameter_is_refused(
    emulated_cuda: emulation.Emulated, name: str, inputs: tuple[Any, ...]
) -> None:
    library = Library()
    assert library.call("cuInit", 0) == (libcuda.CUDA_SUCCESS, None)
    with pytest.raises(ctypes.ArgumentError):
        library.call(name, *inputs)


@pytest.mark.parametrize("value", [0, 1, (1 << 64) - 1])
def test_what_fits_arrives_unchanged(value: int) -> None:
    library = Library()
    library._found["cuMemRelease"] = lambda handle: handle.value
    assert library.call("cuMemRelease", value) == (value, None)


def test_an_interrupt_of_a_call_stays_one(emulated_cuda: emulation.Emulated) -> None:
    """Found: ctypes made a refused number of what was raised while it took the arguments."""
    library = Library()
    library.call("cuInit", 0)
    for turn in itertools.count():
        points = itertools.count()

        def interrupt(_: Any, event: str, __: Any, points: Any = points, turn: int = turn) -> None:
            if event in ("call", "c_return") and next(points) == turn:
                raise KeyboardInterrupt

        try:
            sys.setprofile(interrupt)
            library.call("cuInit", 0)
        except KeyboardInterrupt:
            continue
        finally:
            sys.setprofile(None)
        break
    assert turn > 3  # from Python 3.12 on, a comprehension is no call


def test_results_have_names(emulated_cuda: emulation.Emulated) -> None:
    assert Library().name_of(700) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert Library().name_of(12345) == "CUresult 12345"
