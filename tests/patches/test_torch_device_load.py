"""torch.load onto an emulated device: the same state dict as torch's, over shared memory.

Tensors are compared with what torch itself loads to the CPU; what cannot be served ends in torch's
own code, with torch's own errors, and says why.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import pickle
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import LARGE, Devices, reasons, shared

from trims_shim import patches
from trims_shim.client import arenas
from trims_shim.errors import DaemonTimeout, NotServed, UnknownDevice
from trims_shim.patches import (
    torch_device,
    torch_device_load,
    torch_from_file,
    torch_load,
    torch_repoint,
)

COUNT = LARGE // 4  # float32
CUDA_NAMES = {
    "string": "cuda",
    "string with index": "cuda:0",
    "device": torch.device("cuda"),
    "device with index": torch.device("cuda", 0),
    "dict": {"cpu": "cuda:0"},
    "dict with other entries": {"cpu": "cuda", "cuda:7": "cpu"},
}


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    with emulation.emulated(monkeypatch, *torch_load.POINTS[:2]) as devices:
        yield devices


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., str]:
    def save(value: Any, *, location: str = "cpu", name: str = "model.pt") -> str:
        path = tmp_path / name
        if location == "cpu":
            torch.save(value, path)
            return str(path)
        # torch asks the registry where a storage is; the checkpoint says it was on a device.
        registry = torch.serialization._package_registry
        kept = list(registry)
        registry[:] = [(0, lambda storage: location, kept[0][2])]
        try:
            torch.save(value, path)
        finally:
            registry[:] = kept
        return str(path)

    return save


def state() -> OrderedDict[str, torch.Tensor]:
    """Sizes on both sides of the limit, several dtypes, a view and a tie."""
    table = torch.randn(4, COUNT)
    return OrderedDict(
        table=table,
        row=table[1],
        tied=table,
        half=torch.randn(2 * LARGE).half(),
        flags=torch.arange(LARGE) % 3 == 0,
        small=torch.randn(7),
        counter=torch.tensor(3),
        empty=torch.empty(0, 5),
        parameter=torch.nn.Parameter(torch.randn(COUNT)),
        frozen=torch.nn.Parameter(torch.randn(COUNT), requires_grad=False),
    )


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    for key, value in expected.items():
        other = actual[key]
        assert type(other) is type(value), key
        assert torch.equal(other, value), key
        assert (other.dtype, other.stride(), other.storage_offset()) == (
            value.dtype,
            value.stride(),
            value.storage_offset(),
        )
        assert other.requires_grad == value.requires_grad, key
        assert other.untyped_storage().nbytes() == value.untyped_storage().nbytes(), key


# --- it is served ---------------------------------------------------------------------------------


@pytest.mark.parametrize("location", CUDA_NAMES.values(), ids=CUDA_NAMES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_every_form_that_names_a_device(
    devices: Devices, save: Callable[..., str], location: Any, weights_only: bool
) -> None:
    path = save(state())
    expected = torch.load(path)
    actual = torch.load(path, map_location=location, weights_only=weights_only)
    assert_same(actual, expected)
    assert [device for _, device in devices.opened] == ["GPU-0"]
    assert [key for key, value in actual.items() if shared(value)] == [
        *("table", "row", "tied", "half", "flags", "parameter", "frozen")
    ]
    assert actual["tied"].data_ptr() == actual["table"].data_ptr()
    assert actual["row"].data_ptr() == actual["table"].data_ptr() + 4 * COUNT


def test_a_torch_that_says_whether_it_is_weights_only(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.14 does."""
    saying = functools.partial(torch.serialization._load, weights_only=True)
    path = save(state())
    with monkeypatch.context() as patching:
        patching.setattr(torch.serialization, "_load", saying)
        assert shared(torch.load(path, map_location="cuda")["table"])


def test_garbage_is_collected_while_a_load_waits_for_the_daemon(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = devices.open_device, []

    def open_device(*args: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return original(*args, **options)

    monkeypatch.setattr(devices, "open_device", open_device)
    assert shared(torch.load(save(state()), map_location="cuda")["table"])
    assert seen == [True]


def test_no_index_is_the_current_device(devices: Devices, save: Callable[..., str]) -> None:
    devices.runtime.current = 1
    torch.load(save(state()), map_location="cuda")
    assert [device for _, device in devices.opened] == ["GPU-1"]
    assert devices.runtime.made_ready == [1]


def test_a_checkpoint_that_was_saved_on_a_device(
    devices: Devices, save: Callable[..., str]
) -> None:
    path = save(state(), location="cuda:1")
    expected = torch.load(path, map_location="cpu")
    assert devices.opened == []
    assert_same(torch.load(path), expected)
    assert_same(torch.load(path, map_location={"cuda:1": "cuda:0"}), expected)
    assert_same(torch.load(path, map_location={"cuda:0": "cpu"}), expected)
    assert [device for _, device in devices.opened] == ["GPU-1", "GPU-0", "GPU-1"]


def test_a_checkpoint_saved_on_the_cpu_stays_there(
    devices: Devices, save: Callable[..., str]
) -> None:
    path = save({"a": torch.randn(COUNT), "cuda": torch.randn(3)})
    for location in (None, {}, {"cuda:0": "cuda:1"}, "cpu", torch.device("cpu")):
        assert not shared(torch.load(path, map_location=location)["a"])
    assert devices.opened == []


def test_loads_of_one_file_share_the_memory(devices: Devices, save: Callable[..., str]) -> None:
    path = save(state())
    first = torch.load(path, map_location="cuda")
    second = torch.load(path, map_location="cuda")
    assert first["table"].data_ptr() == second["table"].data_ptr()
    assert first["small"].data_ptr() != second["small"].data_ptr()
    assert first["table"].untyped_storage()._cdata != second["table"].untyped_storage()._cdata
    assert len(devices.mappings) == 1


def test_mmap(devices: Devices, save: Callable[..., str]) -> None:
    path = save(state())
    assert_same(torch.load(path, map_location="cuda", mmap=True), torch.load(path))
    assert len(devices.opened) == 1


@pytest.fixture
def mapping(devices: Devices) -> Iterator[Devices]:
    """With the patch of what torch.load maps files with."""
    undo = emulation.apply(*torch_from_file.POINTS)
    yield devices
    undo()


def test_a_mapping_for_a_device_loads_no_host_image(
    mapping: Devices, save: Callable[..., str]
) -> None:
    path = save(state())
    actual = torch.load(path, map_location="cuda", mmap=True)
    assert (len(mapping.opened), mapping.opened_on_host) == (1, [])
    assert shared(actual["table"])
    assert_same(actual, torch.load(path, map_location="cpu"))


@pytest.mark.parametrize("location", [None, "cpu", {"cuda:0": "cpu"}])
def test_a_mapping_for_the_cpu_is_the_caches(
    mapping: Devices, save: Callable[..., str], location: Any
) -> None:
    path = save(state())
    actual = torch.load(path, map_location=location, mmap=True)
    assert mapping.opened_on_host == [path]
    assert arenas.find(actual["table"].data_ptr(), 1) is not None
    assert_same(actual, torch.load(path))


def test_a_mapping_that_the_device_refuses_is_the_caches(
    mapping: Devices, save: Callable[..., str]
) -> None:
    """Torch copies from it then, if it can."""
    mapping.refusal = NotServed("device_off", "")
    path = save(state())
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, map_location="cuda", mmap=True)
    assert mapping.opened_on_host == [path]


def test_a_mapping_of_a_file_that_was_replaced_meanwhile_is_torchs(
    mapping: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch.load unpickles is that of the file which it has opened."""
    path, other = (
        save({"steps": {step}, "w": torch.full((COUNT,), step)}, name=f"{step}.pt")
        for step in (1, 2)
    )

    def refuse(*_: Any, **__: Any) -> None:
        os.replace(other, path)

    monkeypatch.setattr(torch_device_load, "may_apply", lambda _: True)
    monkeypatch.setattr(torch_device_load, "build", refuse)
    actual = torch.load(path, mmap=True, weights_only=False)
    assert actual["steps"] == {1}
    assert actual["w"].eq(1).all()


def test_a_mapping_for_other_pickles_is_the_caches(
    mapping: Devices, save: Callable[..., str]
) -> None:
    """Torch itself unpickles what is no state dict, over the cache's bytes."""
    path = save({"weights": [torch.randn(COUNT)], "set": {1, 2}})
    actual = torch.load(path, mmap=True, weights_only=False)
    assert mapping.opened_on_host == [path]
    assert arenas.find(actual["weights"][0].data_ptr(), 1) is not None


def test_other_mappings_are_served_at_once(mapping: Devices, save: Callable[..., str]) -> None:
    path = save(state())
    storage = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
    assert mapping.opened_on_host == [path]
    assert arenas.find(storage.data_ptr(), 1) is not None


def test_an_open_file_is_left_where_torch_leaves_it(
    devices: Devices, save: Callable[..., str]
) -> None:
    path = save(state())
    with open(path, "rb") as theirs, open(path, "rb") as ours:
        torch.load(theirs)
        torch.load(ours, map_location="cuda")
        assert ours.tell() == theirs.tell()
    assert len(devices.opened) == 1


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_default_device_changes_nothing(
    devices: Devices, save: Callable[..., str], default: str
) -> None:
    path = save(state())
    expected = torch.load(path)
    with torch.device(default):
        actual = torch.load(path, map_location="cuda")
    assert_same(actual, expected)
    assert shared(actual["table"])


def test_nested_containers_and_no_tensors(devices: Devices, save: Callable[..., str]) -> None:
    value = {"model": state(), "epoch": 3, "names": ["a", ("b", None)], "lr": 0.5}
    actual = torch.load(save(value), map_location="cuda")
    assert_same(actual["model"], value["model"])
    assert (actual["epoch"], actual["names"], actual["lr"]) == (3, ["a", ("b", None)], 0.5)
    assert torch.load(save({"epoch": 3}), map_location="cuda") == {"epoch": 3}
    assert len(devices.opened) == 1


# --- lifetime and access --------------------------------------------------------------------------


def test_the_memory_is_held_by_its_tensors(devices: Devices, save: Callable[..., str]) -> None:
    actual = torch.load(save(state()), map_location="cuda")
    found = torch_device.find(actual["table"])
    assert found is not None
    arena = weakref.ref(found[0])
    del found
    row = actual["row"]
    actual.clear()
    gc.collect()
    assert arena() is not None
    assert torch_device.is_any_shared()
    del row
    assert arena() is None
    assert not torch_device.is_any_shared()


def test_small_tensors_alone_hold_nothing(devices: Devices, save: Callable[..., str]) -> None:
    actual = torch.load(save({"a": torch.randn(5), "b": torch.zeros(3)}), map_location="cuda")
    assert not shared(actual["a"])
    assert not torch_device.is_any_shared()
    assert devices.runtime.settled == 1, "programs may go on with them on any stream"
    actual["a"].add_(1)


@pytest.mark.parametrize("by", ["setting", "context"])
def test_private_access(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    path = save(state())
    expected = torch.load(path)
    if by == "setting":
        emulation.prepare(monkeypatch, devices, min_bytes="1", device_access="private")
        actual = torch.load(path, map_location="cuda")
    else:
        token = torch_device.access.set("private")
        actual = torch.load(path, map_location="cuda")
        torch_device.access.reset(token)
    assert_same(actual, expected)
    assert not any(shared(value) for value in actual.values())
    assert actual["tied"].data_ptr() == actual["table"].data_ptr()
    actual["table"].zero_()
    assert len(devices.opened) == 1


def test_checkpoints_of_training_are_private(devices: Devices, save: Callable[..., str]) -> None:
    net = torch.nn.Linear(COUNT, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(1, COUNT)).sum().backward()
    optimizer.step()
    path = save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    actual = torch.load(path, map_location="cuda")
    assert_same(actual["model"], net.state_dict())
    assert len(devices.opened) == 1
    assert reasons() == {"checkpoint_of_training": 1}
    assert not torch_device.is_any_shared()
    actual["model"]["weight"].zero_()


def test_an_image_takes_no_room_that_private_copies_need(
    devices: Devices, save: Callable[..., str]
) -> None:
    """Torch alone needs room for one copy, and has to find it."""
    path = save({**state(), "param_groups": []})
    size_bytes = os.path.getsize(path)
    devices.runtime.free = 2 * size_bytes - 1
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path, map_location="cuda")
    assert not devices.opened
    assert reasons() == {"checkpoint_of_training": 1, "no_room_for_copies": 1}
    devices.runtime.free = 2 * size_bytes
    torch.load(path, map_location="cuda")
    assert len(devices.opened) == 1


def test_torch_save_and_deepcopy_and_pickle(devices: Devices, save: Callable[..., str]) -> None:
    import copy

    actual = torch.load(save(state()), map_location="cuda")
    buffer = io.BytesIO()
    torch.save(actual["half"], buffer)
    assert len(buffer.getvalue()) < 3 * actual["half"].nbytes
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), actual["half"])
    for duplicate in (copy.deepcopy(actual), pickle.loads(pickle.dumps(actual))):
        assert_same(duplicate, actual)
        assert not any(shared(value) for value in duplicate.values())


def test_resizing_is_refused_by_torch(devices: Devices, save: Callable[..., str]) -> None:
    actual = torch.load(save(state()), map_location="cuda")
    with pytest.raises(RuntimeError, match="not resizable"):
        actual["half"].untyped_storage().resize_(1)


# --- it is torch's --------------------------------------------------------------------------------


def outcome(function: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011  compared with the other one's
        function()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "location",
    ["cuda:5", torch.device("cuda:9"), {"cpu": "cuda:5"}, "cuda0", "cuda:x", {"cpu": b"cuda"}],
    ids=str,
)
def test_torchs_own_errors(devices: Devices, save: Callable[..., str], location: Any) -> None:
    path = save(state())
    token = patches.overridden.set(False)
    theirs = outcome(lambda: torch.load(path, map_location=location))
    patches.overridden.reset(token)
    assert outcome(lambda: torch.load(path, map_location=location)) == theirs
    assert devices.opened == []


def _to_device(storage: Any, location: str) -> Any:
    return storage.clone()


@pytest.mark.parametrize(
    "location",
    [_to_device, lambda storage, location: None, defaultdict(lambda: "cpu")],
    ids=["callable", "callable that declines", "subclass of dict"],
)
def test_what_only_torch_can_map(devices: Devices, save: Callable[..., str], location: Any) -> None:
    path = save(state())
    assert_same(torch.load(path, map_location=location), torch.load(path))
    assert devices.opened == []


class Odd:
    """Something that no state dict holds."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


def test_a_pickle_that_is_more_than_a_state_dict(
    devices: Devices, save: Callable[..., str]
) -> None:
    path = save({"odd": Odd(), "a": torch.randn(COUNT)})
    _, message = outcome(lambda: torch.load(path, map_location="cuda", weights_only=False))
    assert "torch.cuda.is_available() is False" in message
    assert devices.opened == []
    assert reasons() == {"unsupported_format": 1}


def test_several_devices(devices: Devices, save: Callable[..., str]) -> None:
    registry = torch.serialization._package_registry
    kept = list(registry)
    path = save({"a": torch.randn(COUNT)})
    locations = iter(["cuda:0", "cuda:1", "cpu"])
    registry[:] = [(0, lambda storage: next(locations), kept[0][2])]
    try:
        torch.save({key: torch.randn(COUNT) for key in "abc"}, path)
    finally:
        registry[:] = kept
    outcome(lambda: torch.load(path))
    outcome(lambda: torch.load(path, map_location={"cpu": "cuda:1"}))
    outcome(lambda: torch.load(path, map_location={"cuda:1": "cuda:0"}))  # and the CPU
    assert devices.opened == []
    assert reasons() == {"several_devices": 3}
    same = torch.load(path, map_location={"cpu": "cuda:1", "cuda:0": "cuda:1"})
    assert all(shared(value) for value in same.values())


@pytest.mark.parametrize("refusal", [NotServed("small_file", "small"), UnknownDevice("GPU-0")])
def test_a_refusal_ends_in_torchs_own_code(
    devices: Devices, save: Callable[..., str], refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation.prepare(monkeypatch, devices, min_bytes="1")
    devices.refusal = refusal
    path = save(state())
    name, message = outcome(lambda: torch.load(path, map_location="cuda"))
    assert (name, "CUDA" in message) == ("RuntimeError", True)
    assert reasons() == {refusal.reason: 1}


def test_a_fault_warns_once(
    devices: Devices,
    save: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    emulation.prepare(monkeypatch, devices, min_bytes="1")
    monkeypatch.setattr(torch_device.skip, "warned", set())
    path = save(state())
    for refusal in (DaemonTimeout("it hangs"), DaemonTimeout("it hangs"), ZeroDivisionError("?")):
        devices.refusal = refusal
        outcome(lambda: torch.load(path, map_location="cuda"))
    assert reasons() == {"daemon_timeout": 2, "internal_error": 1}
    assert [each.levelname for each in caplog.records if "not shared" in each.message] == [
        "WARNING",
        "WARNING",
    ]


def test_switched_off(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation.prepare(monkeypatch, devices, device="0")
    path = save(state())
    outcome(lambda: torch.load(path, map_location="cuda"))
    assert devices.opened == []
    assert reasons() == {"device_off": 1}


@pytest.mark.parametrize(
    "enter",
    [
        lambda: torch.inference_mode(),
        lambda: torch.serialization.skip_data(),
        lambda: Watching(),
    ],
    ids=["inference", "skip_data", "a mode"],
)
def test_who_watches_gets_torchs_own(
    devices: Devices, save: Callable[..., str], enter: Callable[[], Any]
) -> None:
    path = save(state())
    with enter():
        outcome(lambda: torch.load(path, map_location="cuda"))
    assert devices.opened == []


@pytest.mark.parametrize("is_of_thread", [False, True], ids=["older", "2.15"])
def test_sparse_tensors_that_a_failed_load_left_are_torchs_to_validate(
    devices: Devices,
    save: Callable[..., str],
    is_of_thread: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[torch.Tensor] = []
    older = (torch._utils, "_sparse_tensors_to_validate")
    newer = (torch.serialization._serialization_tls, "sparse_tensors_to_validate")
    there, absent = (newer, older) if is_of_thread else (older, newer)
    monkeypatch.setattr(*there, left, raising=False)
    monkeypatch.delattr(*absent, raising=False)
    assert torch_load.POINTS[1].probe() is None
    path = save(state())
    assert shared(torch.load(path, map_location="cuda")["table"])
    left.append(torch.eye(3).to_sparse())
    outcome(lambda: torch.load(path, map_location="cuda"))
    assert len(devices.opened) == 1


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_buffers_and_parts_of_files_are_torchs(devices: Devices, save: Callable[..., str]) -> None:
    path = save(state())
    with open(path, "rb") as file:
        content = file.read()
    outcome(lambda: torch.load(io.BytesIO(content), map_location="cuda"))
    with open(path, "wb") as file:
        file.write(b"before" + content)
    with open(path, "rb") as file:
        file.seek(6)
        outcome(lambda: torch.load(file, map_location="cuda"))
    assert devices.opened == []


def test_a_file_that_is_another_meanwhile(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save({"a": torch.randn(COUNT)})
    other = save({"b": torch.randn(COUNT)}, name="other.pt")
    open_device = devices.open_device

    def open_other(cache: Any, descriptor: int, **options: Any) -> Any:
        swapped = os.open(other, os.O_RDONLY)
        try:
            return open_device(cache, swapped, **options)
        finally:
            os.close(swapped)

    monkeypatch.setattr(devices, "open_device", open_other)
    outcome(lambda: torch.load(path, map_location="cuda"))
    assert reasons() == {"unsupported_format": 1}


def test_big_endian_files_are_torchs(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        path = save({"a": torch.randn(COUNT)})
    _, message = outcome(lambda: torch.load(path, map_location="cuda"))
    assert "torch.cuda.is_available() is False" in message
    assert reasons() == {"unsupported_format": 1}


def test_without_cuda_nothing_is_asked(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.runtime, "is_built", lambda: False)
    assert not torch_device_load.may_apply("cuda")
    assert not torch_device_load.may_apply(None)
    path = save(state())
    outcome(lambda: torch.load(path, map_location="cuda"))
    assert devices.opened == []
    assert reasons() == {}


def test_a_torch_that_cannot_take_memory_back_shares_none(
    devices: Devices, save: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards against writes are skipped there, so a write would be fatal."""
    monkeypatch.setattr(torch_device, "missing_capability", lambda: "no way")
    path = save(state())
    outcome(lambda: torch.load(path, map_location="cuda"))
    assert devices.opened == []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch.cuda says of itself on a machine with two devices."""
    says: dict[str, Any] = {
        "_is_in_bad_fork": False,
        "is_available": True,
        "current_device": 1,
        "device_count": 2,
        "is_initialized": True,
        "is_current_stream_capturing": False,
    }
    for name in says:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: says[name])
    return says


def test_the_real_runtime_with_cuda(cuda: dict[str, Any]) -> None:
    runtime = torch_device.CudaRuntime()
    assert runtime.index(torch.device("cuda")) == 1
    assert runtime.index(torch.device("cuda:0")) == 0
    assert runtime.device(1) == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_is_in_bad_fork", True, "forked"),
        ("is_available", False, "no_such_device"),
        ("device_count", 1, "no_such_device"),
        ("is_current_stream_capturing", True, "capturing"),
    ],
)
def test_the_real_runtime_leaves_alone(
    cuda: dict[str, Any], name: str, value: Any, reason: str
) -> None:
    cuda[name] = value
    with pytest.raises(NotServed) as caught:
        torch_device.CudaRuntime().index(torch.device("cuda"))
    assert caught.value.reason == reason


def test_a_stream_is_not_asked_before_cuda_is_set_up(cuda: dict[str, Any]) -> None:
    cuda.update(is_initialized=False, is_current_stream_capturing=True)
    assert torch_device.CudaRuntime().index(torch.device("cuda:0")) == 0


def test_a_torch_without_the_means_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "runtime", emulation.EmulatedRuntime())
    assert torch_device.missing_capability() is None
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    assert "_construct_storage_from_data_pointer" in str(torch_device.missing_capability())


def test_a_torch_that_cannot_move_tensors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "runtime", emulation.EmulatedRuntime())
    monkeypatch.setattr(torch_repoint, "missing_capability", lambda: "no way")
    assert torch_device.missing_capability() == "no way"


def test_a_torch_that_behaves_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = torch_device._broken_promise.__wrapped__
    assert probe() is None
    kept = []
    original = torch_device._storage_over

    def leaking(*args: Any) -> torch.UntypedStorage:
        kept.append(original(*args))
        return kept[-1]

    monkeypatch.setattr(torch_device, "_storage_over", leaking)
    assert "outlives" in probe()


def test_the_real_runtime_without_cuda_leaves_everything_to_torch() -> None:
    runtime = torch_device.CudaRuntime()
    assert runtime.is_built() == (torch.version.cuda is not None)
    if not torch.cuda.is_available():
        with pytest.raises(NotServed):
            runtime.index(torch.device("cuda"))
    with pytest.raises(NotServed):
        runtime.index(torch.device("meta"))
