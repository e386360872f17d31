"""Capsules over memory of ours: described truly, used in place, and given up exactly once.

The consumer is onnxruntime, over host memory; what it does on a device is for tests/gpu. In place
means that what is written to the memory afterwards is seen in the output.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from forks import passes_in_child
from harness import PATIENCE_S
from onnx_models import perceptron, save_external
from onnxruntime.capi import _pybind_state

from trims_shim.formats.onnx_directory import DTYPES, ELEMENT_BYTES
from trims_shim.memory import dlpack
from trims_shim.memory.dlpack import DeviceType, DlpackTensor

TESTS = str(Path(__file__).resolve().parents[1])
DTYPE_NAMES = {
    "BFLOAT16": "bfloat16",
    "DOUBLE": "double",
    "FLOAT": "float",
    "FLOAT16": "float16",
    **{name: name.lower() for name in DTYPES.values() if "INT" in name},
}
"""As onnxruntime calls them."""


class Owner:
    """Memory, and the moments at which it was given up."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.given_up: list[int] = []
        weakref.finalize(self, self.given_up.append, 1).atexit = False


def tensor_of(array: Any, dtype: str = "FLOAT", **others: Any) -> DlpackTensor:
    others = {"device": DeviceType.CPU, **others}
    return DlpackTensor(array.ctypes.data, dtype, array.shape, **others)


def value_of(array: Any, owner: object, **others: Any) -> Any:
    return dlpack.offer(tensor_of(array, **others), owner, take)


def take(capsule: Any) -> Any:
    return onnxruntime.OrtValue(dlpack.ort_value(_pybind_state.OrtValue, capsule))


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    """Whatever a test did, no consumer holds anything after it."""
    gc.collect()
    before = dlpack.offered()
    yield
    gc.collect()
    assert dlpack.offered() == before


class TestOffering:
    def test_what_a_capsule_says(self) -> None:
        array = np.arange(6, dtype=np.float16).reshape(2, 3)
        seen: list[Any] = []

        def look(capsule: Any) -> None:
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            managed = dlpack._ManagedTensor.from_address(pointer(capsule, b"dltensor"))
            tensor = managed.dl_tensor
            seen.extend([tensor.data, tensor.device.device_type, tensor.device.device_id])
            seen.extend([tensor.shape[:2], bool(tensor.strides), tensor.byte_offset, tensor.ndim])
            seen.extend([tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes])
            assert managed.deleter

        dlpack.offer(tensor_of(array, "FLOAT16", device=DeviceType.CUDA, index=3), object(), look)
        assert seen == [array.ctypes.data, 2, 3, [2, 3], False, 0, 2, 2, 16, 1]

    def test_what_is_not_taken_is_given_up(self) -> None:
        owner = Owner(np.zeros(3, np.float32))
        given_up = owner.given_up
        capsules = [dlpack.offer(tensor_of(owner.array), owner, lambda capsule: capsule)]
        del owner
        assert given_up == [1]
        assert dlpack.offered() == 0
        del capsules

    def test_who_raises_has_not_taken_it(self) -> None:
        owner = Owner(np.zeros(3, np.float32))
        given_up = owner.given_up

        def refuse(capsule: Any) -> None:
            raise KeyError("no")

        with pytest.raises(KeyError, match="no"):
            dlpack.offer(tensor_of(owner.array), owner, refuse)
        del owner
        assert given_up == [1]

    def test_every_element_is_what_onnxruntime_calls_by_that_name(self) -> None:
        assert set(dlpack.ELEMENTS) == set(ELEMENT_BYTES) == set(DTYPES.values())
        for name, (_, bits) in dlpack.ELEMENTS.items():
            array = np.zeros(2 * bits // 8, np.uint8)
            tensor = DlpackTensor(array.ctypes.data, name, (2,), DeviceType.CPU)
            value = dlpack.offer(tensor, array, take)
            assert value.data_type() == f"tensor({DTYPE_NAMES[name]})"
            assert bits == 8 * ELEMENT_BYTES[name]

    def test_numbers_of_dtypes_are_those_of_onnx(self) -> None:
        from onnx import TensorProto

        assert {TensorProto.DataType.Name(each): each for each in DTYPES} == {
            name: number for number, name in DTYPES.items()
        }


class TestValues:
    def test_a_value_is_the_memory(self) -> None:
        owner = Owner(np.arange(6, dtype=np.float32).reshape(2, 3))
        value = value_of(owner.array, owner)
        assert value.data_ptr() == owner.array.ctypes.data
        assert (value.shape(), value.device_name()) == ([2, 3], "cpu")
        owner.array[1, 2] = 50
        assert value.numpy()[1, 2] == 50

    def test_it_is_given_up_once_when_the_value_goes(self) -> None:
        owner = Owner(np.zeros(3, np.float32))
        value, given_up = value_of(owner.array, owner), owner.given_up
        del owner
        gc.collect()
        assert given_up == []
        assert dlpack.offered() == 1
        del value
        assert given_up == [1]

    def test_two_values_of_one_owner(self) -> None:
        owner = Owner(np.zeros(3, np.float32))
        values, given_up = [value_of(owner.array, owner) for _ in range(2)], owner.given_up
        del owner
        values.pop()
        assert (given_up, dlpack.offered()) == ([], 1)
        values.pop()
        assert given_up == [1]

    def test_scalars_have_no_shape(self) -> None:
        array = np.array(7, np.float32)
        assert value_of(array, array).shape() == []

    def test_another_thread_gives_it_up(self) -> None:
        owner = Owner(np.zeros(3, np.float32))
        values, given_up = [value_of(owner.array, owner)], owner.given_up
        del owner
        thread = threading.Thread(target=values.clear)
        thread.start()
        thread.join(PATIENCE_S)
        assert given_up == [1]

    def test_a_device_value_is_described_and_not_read(self) -> None:
        """The address is no memory at all."""
        tensor = DlpackTensor(0x7E57_0000, "FLOAT", (4,), DeviceType.CUDA, 1)
        owner = Owner(None)
        value, given_up = dlpack.offer(tensor, owner, take), owner.given_up
        del owner
        assert (value.device_name(), value.data_ptr()) == ("cuda", 0x7E57_0000)
        assert given_up == []
        del value
        assert given_up == [1]


class Model:
    """A perceptron on disk, its weights in arrays, and sessions that are given these."""

    def __init__(self, directory: Path) -> None:
        self.sample = perceptron()
        self.path = directory / "model.onnx"
        save_external(self.sample)(self.path)
        self.arrays = {
            each.name: np.frombuffer(each.raw_data, np.float32).reshape(each.dims).copy()
            for each in self.sample.model.graph.initializer
        }

    def session(self, owners: dict[str, Owner], **options: str) -> Any:
        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        for name, value in options.items():
            settings.add_session_config_entry(name, value)
        values = [(name, value_of(each.array, each)) for name, each in owners.items()]
        for name, value in values:
            settings.add_initializer(name, value)
        return onnxruntime.InferenceSession(self.path, settings, providers=["CPUExecutionProvider"])

    def run(self, session: Any, number: int = 1) -> bytes:
        output: bytes = session.run(None, self.sample.feeds[number])[0].tobytes()
        return output

    def plain(self) -> bytes:
        return self.run(self.session({}))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


class TestSessions:
    def test_in_place_and_alive_for_as_long_as_the_session(self, model: Model) -> None:
        owners = {name: Owner(array) for name, array in model.arrays.items()}
        session = model.session(owners)
        assert model.run(session) == model.plain()
        table = owners["table"]
        given_up = table.given_up
        table.array += 1
        assert model.run(session) != model.plain()
        table.array -= 1
        del owners, table
        model.arrays.clear()
        gc.collect()
        assert given_up == []
        model.run(session)
        del session
        gc.collect()
        assert given_up == [1]

    def test_what_is_packed_is_given_up_at_once(self, model: Model) -> None:
        """So memory that holds nothing else need not stay."""
        owners = {"first": Owner(model.arrays["first"]), "table": Owner(model.arrays["table"])}
        first, table = (each.given_up for each in owners.values())
        session = model.session(owners)
        owners.clear()
        gc.collect()
        assert (first, table) == ([1], [])
        assert model.run(session) == model.plain()

    def test_without_packing_it_stays(self, model: Model) -> None:
        owners = {"first": Owner(model.arrays["first"])}
        given_up = owners["first"].given_up
        session = model.session(owners, **{"session.disable_prepacking": "1"})
        owners.clear()
        gc.collect()
        assert given_up == []
        del session
        gc.collect()
        assert given_up == [1]

    def test_a_session_that_cannot_be_made(self, model: Model) -> None:
        owners = {"table": Owner(model.arrays["table"])}
        given_up = owners["table"].given_up
        (model.path.parent / "weights.bin").unlink()
        with pytest.raises(Exception, match=r"weights\.bin"):
            model.session(owners)
        owners.clear()
        gc.collect()
        assert given_up == [1]

    def test_two_sessions_on_one_memory(self, model: Model) -> None:
        owner = Owner(model.arrays["table"])
        sessions = [model.session({"table": owner}) for _ in range(2)]
        given_up = owner.given_up
        del owner
        sessions.pop()
        gc.collect()
        assert given_up == []
        assert model.run(sessions[0]) == model.plain()
        sessions.clear()
        gc.collect()
        assert given_up == [1]

    def test_memory_of_a_device_is_not_for_a_host_session(
        self, model: Model, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """It warns, reads the file instead, and gives the value up."""
        owner = Owner(None)
        shape = model.arrays["table"].shape
        tensor = DlpackTensor(0x7E57_0000, "FLOAT", shape, DeviceType.CUDA)
        value, given_up = dlpack.offer(tensor, owner, take), owner.given_up
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_initializer("table", value)
        session = onnxruntime.InferenceSession(model.path, options)
        del owner, value
        gc.collect()
        assert given_up == [1]
        assert "Cannot use user supplied initializer with name: (table)" in capfd.readouterr().err
        assert model.run(session) == model.plain()


ENDINGS: dict[str, str] = {
    "a global": "kept = session",
    "a cycle": "class C: pass\nc = C()\nc.self, c.session = c, session",
    "a class": "class C:\n    kept = session",
    "the library's module": "onnxruntime.kept = session",
    "a module of the standard library": "import json; json.kept = session",
    "builtins": "import builtins; builtins.kept = session",
    "a thread that waits": "import threading\n"
    "threading.Thread(target=lambda kept: threading.Event().wait(), args=(session,), "
    "daemon=True).start()",
    "an exit handler": "import atexit; atexit.register(lambda kept: None, session)",
    "this package's own module": "dlpack.kept = session",
    "a value that nobody uses": "kept = value",
    "an error": "raise SystemExit(session and 0)",
}
_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import pathlib
from memory.test_dlpack import Model, Owner, value_of, dlpack, onnxruntime
model = Model(pathlib.Path({directory!r}))
owners = {{name: Owner(array) for name, array in model.arrays.items()}}
session = model.session(owners)
value = value_of(model.arrays["table"], owners["table"])
assert dlpack.offered() > 1
model.run(session)
del model, owners
"""


@pytest.mark.parametrize("holder", ENDINGS)
def test_the_interpreter_ends_while_a_session_lives(tmp_path: Path, holder: str) -> None:
    """Whoever holds it: no crash, nothing on standard error."""
    script = _SCRIPT.format(tests=TESTS, directory=str(tmp_path)) + ENDINGS[holder]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(TESTS).parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_gives_up_its_own(model: Model) -> None:
    owner = Owner(model.arrays["table"])
    values, given_up = [value_of(owner.array, owner)], owner.given_up
    del owner

    def give_up() -> bool:
        values.clear()
        return given_up == [1]

    assert passes_in_child(give_up)
    assert given_up == []
    values.clear()
    assert given_up == [1]
