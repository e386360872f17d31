"""Start, devices and contexts: what works only in which order, and what each process sees."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import wait_until

import emulated_cuda as emulation
from emulated_cuda.calls import api, call, create, failure, properties, start
from emulated_cuda.conftest import Child

P2P = api.CUdevice_P2PAttribute
VISIBLE = """
call("cuInit", 0)
names = [bytes(call("cuDeviceGetName", 64, i)).split(bytes(1))[0].decode()
         for i in range(call("cuDeviceGetCount"))]
ids = [bytes(call("cuDeviceGetUuid", i).bytes).hex() for i in range(len(names))]
say(";".join(f"{name} {id}" for name, id in zip(names, ids)))
"""


def hexadecimal(device: str) -> str:
    """The octets of an id, as cuDeviceGetUuid gives them."""
    return device.partition("-")[2].replace("-", "")


class TestStart:
    def test_nothing_works_before_init(self, emulated_cuda: emulation.Emulated) -> None:
        assert failure("cuDeviceGetCount") == "NOT_INITIALIZED"
        assert failure("cuMemCreate", 2 << 20, properties(), 0) == "NOT_INITIALIZED"
        assert failure("cuCtxSynchronize") == "NOT_INITIALIZED"
        assert call("cuDriverGetVersion") == 13000
        call("cuInit", 0)
        assert call("cuDeviceGetCount") == 1

    def test_without_a_machine_there_is_no_device(
        self, emulated_cuda: emulation.Emulated, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRIMS_TEST_CUDA_DIR")
        assert failure("cuInit", 0) == "NO_DEVICE"

    def test_what_is_not_emulated_is_not_found(self, cuda: emulation.Emulated) -> None:
        with pytest.raises(RuntimeError, match="cuModuleLoad is not found"):
            api.cuModuleLoad(b"kernel.ptx")

    def test_every_exported_call_is_found_by_name(self, cuda: emulation.Emulated) -> None:
        sources = Path(emulation.__file__).parent / "src"
        listed = re.findall(r'\{"(\w+)", (\d+), "(\w+)"\}', (sources / "symbols.c").read_text())
        driver = ctypes.CDLL(f"{emulation.build()}/libcuda.so.1")
        for name, version, exported in listed:
            found = ctypes.c_void_p()
            wanted = ctypes.cast(getattr(driver, exported), ctypes.c_void_p)
            lookup = (name.encode(), ctypes.byref(found), int(version), ctypes.c_uint64(0), None)
            assert driver.cuGetProcAddress_v2(*lookup) == 0
            assert found.value == wanted.value, exported
        text = "".join(each.read_text() for each in sources.glob("*.c"))
        defined = set(re.findall(r"EXPORT CUresult (cu\w+)\(", text))
        assert defined == {exported for _, _, exported in listed}

    def test_an_old_version_of_a_call_is_not_found(self, cuda: emulation.Emulated) -> None:
        status = api.CUdriverProcAddressQueryResult
        insufficient = status.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
        unknown = status.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
        assert call("cuGetProcAddress", b"cuMemAlloc", 2000, 0) == [0, insufficient]
        assert call("cuGetProcAddress", b"cuMemAlloc_v2", 13000, 0) == [0, unknown]
        assert failure("cuGetProcAddress", b"cuMemAlloc", 13050, 0) == "INVALID_VALUE"

    def test_errors_have_names(self, cuda: emulation.Emulated) -> None:
        assert call("cuGetErrorName", api.CUresult(700)) == b"CUDA_ERROR_ILLEGAL_ADDRESS"
        assert call("cuGetErrorString", api.CUresult(2)) == b"out of memory"

    def test_a_forked_child_has_no_driver(self, spawn: Callable[..., Child]) -> None:
        child = spawn(
            "start(); pid = os.fork()\n"
            "if pid == 0:\n"
            "    try: found = {failure('cuInit', 0), failure('cuDeviceGetCount')}\n"
            "    finally: os._exit(0 if found == {'NOT_INITIALIZED'} else 1)\n"
            "say(str(os.waitpid(pid, 0)[1])); call('cuCtxSynchronize')"
        )
        assert child.hear()[0] == "0"
        assert child.wait() == 0, child.errors


class TestDevices:
    def test_a_device_says_what_it_is(self, cuda: emulation.Emulated) -> None:
        assert bytes(call("cuDeviceGetName", 64, 0)).rstrip(b" \0") == b"Emulated GPU"
        assert bytes(call("cuDeviceGetUuid", 0).bytes).hex() == hexadecimal(cuda.ids[0])
        assert call("cuDeviceTotalMem", 0) == emulation.DEFAULT_MEMORY_BYTES
        shareable = (
            api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        )
        assert call("cuDeviceGetAttribute", shareable, 0) == 1

    def test_there_is_no_other_device(self, cuda: emulation.Emulated) -> None:
        assert failure("cuDeviceGet", 1) == "INVALID_DEVICE"
        assert failure("cuDeviceGet", -1) == "INVALID_DEVICE"
        assert failure("cuDevicePrimaryCtxRetain", 1) == "INVALID_DEVICE"
        assert failure("cuMemCreate", 2 << 20, properties(1), 0) == "INVALID_DEVICE"

    @pytest.mark.parametrize(
        ("visible", "numbers"),
        [
            ("1,0", (1, 0)),
            ("2", (2,)),
            ("2, 1", (2, 1)),
            ("0,7,1", (0,)),
            ("0,-1,1", (0,)),
            ("{2},{0}", (2, 0)),
            ("{1:12}", (1,)),
            ("{1},GPU-nonsense,{0}", (1,)),
            ("1,{0}", (1, 0)),
        ],
    )
    @pytest.mark.parametrize(
        "emulated_environment", [{"devices": 3, "names": "a,b,c"}], indirect=True
    )
    def test_visible_devices_are_chosen_and_renumbered(
        self, spawn: Callable[..., Child], visible: str, numbers: tuple[int, ...]
    ) -> None:
        ids = emulation.device_ids(3)
        short = [id[:12] for id in ids]
        visible = visible.replace("{1:12}", short[1])
        child = spawn(VISIBLE, CUDA_VISIBLE_DEVICES=visible.format(*ids))
        expected = [f"{'abc'[number]} {hexadecimal(ids[number])}" for number in numbers]
        assert child.hear()[0].split(";") == expected

    @pytest.mark.parametrize("visible", ["", "-1", "9", "1,1", "GPU-", "MIG-0"])
    @pytest.mark.parametrize("emulated_environment", [{"devices": 3}], indirect=True)
    def test_no_visible_device_is_an_error_of_init(
        self, spawn: Callable[..., Child], visible: str
    ) -> None:
        child = spawn('say(failure("cuInit", 0))', CUDA_VISIBLE_DEVICES=visible)
        assert child.hear()[0] == "NO_DEVICE"

    @pytest.mark.parametrize("emulated_environment", [{"devices": 2, "mig": 3}], indirect=True)
    def test_a_process_sees_one_mig_instance(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        assert len(machine.ids) == 6
        gpu = emulation.device_ids(2)[1]
        expected = {
            machine.ids[4]: machine.ids[4],
            f"{machine.ids[4]},{machine.ids[5]}": machine.ids[4],
            gpu: machine.ids[3],
            "1": machine.ids[3],
            "1,0": machine.ids[3],
        }
        for visible, found in expected.items():
            child = spawn(VISIBLE, CUDA_VISIBLE_DEVICES=visible)
            name = "Emulated GPU MIG 1g.0gb"
            assert child.hear()[0] == f"{name} {hexadecimal(found)}"

    @pytest.mark.parametrize(
        ("emulated_environment", "can"),
        [({"devices": 2}, 1), ({"devices": 2, "peer": 0}, 0)],
        indirect=["emulated_environment"],
    )
    def test_peers(self, cuda: emulation.Emulated, can: int) -> None:
        assert call("cuDeviceCanAccessPeer", 0, 1) == can
        assert call("cuDeviceCanAccessPeer", 0, 0) == 0
        access = P2P.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
        assert call("cuDeviceGetP2PAttribute", access, 0, 1) == can
        assert failure("cuDeviceGetP2PAttribute", access, 0, 0) == "INVALID_DEVICE"
        assert failure("cuDeviceGetP2PAttribute", access, 0, 2) == "INVALID_DEVICE"

    @pytest.mark.parametrize("emulated_environment", [{"devices": 3}], indirect=True)
    def test_neighbours_have_the_best_link(self, cuda: emulation.Emulated) -> None:
        rank = P2P.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
        ranks = [call("cuDeviceGetP2PAttribute", rank, *pair) for pair in ((0, 1), (2, 0), (1, 2))]
        assert ranks == [0, 1, 0]


class TestContexts:
    def test_work_wants_a_current_context(self, emulated_cuda: emulation.Emulated) -> None:
        call("cuInit", 0)
        for name, *arguments in (
            ("cuMemAlloc", 4096),
            ("cuMemHostAlloc", 4096, 0),
            ("cuMemcpyHtoD", 4096, b"data", 4),
            ("cuStreamCreate", 0),
            ("cuEventCreate", 0),
            ("cuMemGetInfo",),
            ("cuCtxSynchronize",),
            ("cuCtxGetDevice",),
            ("cuStreamSynchronize", 0),
        ):
            assert failure(name, *arguments) == "INVALID_CONTEXT", name
        call("cuMemRelease", create())

    def test_the_current_context_is_a_stack(self, cuda: emulation.Emulated) -> None:
        context = call("cuCtxGetCurrent")
        call("cuCtxPushCurrent", context)
        assert int(call("cuCtxPopCurrent")) == int(context)
        assert int(call("cuCtxGetDevice")) == 0
        call("cuCtxSetCurrent", 0)
        assert int(call("cuCtxGetCurrent")) == 0
        assert failure("cuCtxPopCurrent") == "INVALID_CONTEXT"

    def test_the_last_release_destroys_a_context(self, cuda: emulation.Emulated) -> None:
        start()
        call("cuDevicePrimaryCtxRelease", 0)
        assert call("cuDevicePrimaryCtxGetState", 0) == [0, 1]
        call("cuMemAlloc", 4096)
        call("cuDevicePrimaryCtxRelease", 0)
        assert call("cuDevicePrimaryCtxGetState", 0) == [0, 0]
        assert failure("cuMemAlloc", 4096) == "CONTEXT_IS_DESTROYED"
        assert failure("cuDevicePrimaryCtxRelease", 0) == "INVALID_CONTEXT"
        assert cuda.used_bytes(0) == 0

    @pytest.mark.parametrize("emulated_environment", [{"context_bytes": 64 << 20}], indirect=True)
    def test_a_context_takes_memory_while_it_is_active(self, cuda: emulation.Emulated) -> None:
        assert [each.kind for each in cuda.allocations()] == ["context"]
        free, total = call("cuMemGetInfo")
        assert total - free == cuda.used_bytes(0) == 64 << 20
        call("cuDevicePrimaryCtxRelease", 0)
        assert cuda.used_bytes(0) == 0

    @pytest.mark.parametrize("emulated_environment", [{"exclusive": 1}], indirect=True)
    def test_in_an_exclusive_mode_one_process_has_a_context(
        self, cuda: emulation.Emulated, spawn: Callable[..., Child]
    ) -> None:
        child = spawn(
            'call("cuInit", 0)\n'
            'say(failure("cuDevicePrimaryCtxRetain", 0))\n'
            "hear(); start(); say()\n"
        )
        assert child.hear()[0] == "DEVICE_UNAVAILABLE"
        call("cuDevicePrimaryCtxRelease", 0)
        child.say()
        child.hear()

    @pytest.mark.parametrize("emulated_environment", [{"exclusive": 1, "mps": 1}], indirect=True)
    def test_mps_shares_its_context(
        self, cuda: emulation.Emulated, spawn: Callable[..., Child]
    ) -> None:
        spawn("start(); say()").hear()

    @pytest.mark.parametrize(
        "emulated_environment", [{"context_bytes": 64 << 20, "copy_delay_ms": 100}], indirect=True
    )
    def test_a_context_is_made_after_the_end_of_the_one_before(
        self, cuda: emulation.Emulated
    ) -> None:
        """Although that one has copies to wait for: both are in the same place."""
        call("cuMemsetD8", call("cuMemAlloc", 4096), 1, 4096)
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(call, "cuDevicePrimaryCtxRelease", 0)
            wait_until(lambda: call("cuDevicePrimaryCtxGetState", 0) == [0, 0], "the release")
            start()
            stream = call("cuStreamCreate", 1)
            end.result()
        call("cuStreamSynchronize", stream)
        assert [each.kind for each in cuda.allocations()] == ["context"]
        call("cuDevicePrimaryCtxRelease", 0)
        assert cuda.used_bytes(0) == 0


class TestFaults:
    @pytest.mark.parametrize(
        "emulated_environment",
        [{"fail": "cuMemCreate:2,cuCtxSynchronize:2+=719,cuMemRelease=801"}],
        indirect=True,
    )
    def test_ordered_failures(self, cuda: emulation.Emulated) -> None:
        create()
        assert failure("cuMemCreate", 2 << 20, properties(), 0) == "OUT_OF_MEMORY"
        handle = create()
        call("cuCtxSynchronize")
        assert [failure("cuCtxSynchronize") for _ in range(2)] == ["LAUNCH_FAILED"] * 2
        assert failure("cuMemRelease", handle) == "NOT_SUPPORTED"
        emulation.reset()
        call("cuInit", 0)

    @pytest.mark.parametrize(
        "emulated_environment", [{"fail": "cuMemcpyHtoD:2=kill"}], indirect=True
    )
    def test_a_call_can_kill(
        self, spawn: Callable[..., Child], machine: emulation.Emulated
    ) -> None:
        child = spawn(
            "start(); address = call('cuMemAlloc', 4096)\n"
            "for _ in range(2): call('cuMemcpyHtoD', address, b'data', 4); say('done')"
        )
        assert child.hear()[0] == "done"
        assert child.wait() == -9
        assert machine.used_bytes() == 0

    def test_unknown_settings_are_refused(self) -> None:
        with pytest.raises(TypeError, match="copy_delay_us"):
            emulation.environment("/dev/shm/never", copy_delay_us=1)
