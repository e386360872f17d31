"""Devices on the command line, shown and named by canned answers of a daemon."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trims_shim import api, inspection
from trims_shim._version import __version__
from trims_shim.children import NoAnswer
from trims_shim.cli import devices, images, info, status, top
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.client import device_arenas
from trims_shim.client.cache import Cache
from trims_shim.errors import (
    AccessDenied,
    DaemonUnavailable,
    DriverFailure,
    NoSpace,
    TrimsError,
    UnknownDevice,
    UnknownImage,
)
from trims_shim.inspection import Description, DeviceFound, DeviceSupport
from trims_shim.wire.admin import (
    DeviceStatus,
    EvictImageReply,
    EvictImageRequest,
    EvictPreparedReply,
    EvictPreparedRequest,
    GetStatusReply,
    ImageStatus,
    MemoryStatus,
)
from trims_shim.wire.endpoint import Endpoint

from .conftest import Trims

GIB = 1 << 30
FIRST = "GPU-8f6c2d1e-0000-1111-2222-333344445555"
SECOND = "MIG-77aa0b1c-0000-1111-2222-333344445555"
NOW = 1_000_000_000_000


def image(digest: str, tier: str, *, leases: int = 0) -> ImageStatus:
    return ImageStatus(
        digest=digest * 64,
        size_bytes=3 * GIB,
        resident_bytes=3 * GIB + (2 << 20),
        leases=leases,
        is_pinned=False,
        loaded_ns=NOW,
        used_ns=NOW,
        hits=5,
        load_ns=1,
        names=(f"/models/{digest}.pt",),
        tier=tier,
    )


def device(of: str, **changes: Any) -> DeviceStatus:
    plain = DeviceStatus(
        device=of,
        name="NVIDIA H200",
        backend="vmm",
        total_bytes=141 * GIB,
        free_bytes=120 * GIB,
        budget_bytes=100 * GIB,
        headroom_bytes=GIB,
        resident_bytes=6 * GIB,
        reserved_bytes=GIB,
        lingering_bytes=2 * GIB,
    )
    return plain._replace(**changes)


PLAIN = GetStatusReply(
    package="1.0",
    protocol=2,
    pid=4711,
    started_ns=0,
    now_ns=NOW,
    idle_exit_s=600,
    config_hash="0",
    memory=MemoryStatus("tmpfs-huge", "", 10 * GIB, 3 * GIB, 0, -1),
    images=(image("a", "host"),),
    clients=(),
    counters={},
)
WITH_DEVICES = PLAIN._replace(
    images=(image("a", FIRST, leases=2), image("a", "host"), image("b", FIRST, leases=1)),
    counters={
        "client.not_on_device:no_space": 3,
        "client.not_on_device:capturing": 1,
        "client.unshared:optimizer": 7,
        "images_copied_from_peer": 2,
        "peer_copies_failed": 1,
        "images_promoted": 5,
        "images_demoted": 3,
        "evicted_under_pressure": 4,
    },
    devices=(device(FIRST), device(SECOND, free_bytes=-1, lingering_bytes=-1, name="A100 MIG 1g")),
)


def test_the_first_lines_say_when_it_exits_and_why_memory_is_of_its_kind() -> None:
    assert status.headline(PLAIN)[0].endswith("exits when idle for 10 min")
    assert status.headline(PLAIN)[2].startswith("host ")
    reason = "memfd-huge: never"
    told = PLAIN._replace(idle_exit_s=0, memory=PLAIN.memory._replace(reason=reason))
    assert status.headline(told)[0].endswith("stays")
    assert status.headline(told)[2].strip() == f"not {reason}"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Callable[[GetStatusReply], None]:
    """Lets the commands see a canned status."""

    def answer(reply: GetStatusReply) -> None:
        for module in (status, top, images):
            monkeypatch.setattr(module, "ask", lambda: reply)
        for listing in (status, images):
            monkeypatch.setattr(listing, "every_image", lambda _: list(reply.images))

    answer(WITH_DEVICES)
    return answer


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's numbers of the devices, as they would be here."""

    def device_id(index: int) -> str:
        if index > 1:
            raise DriverFailure(f"this process sees no CUDA device {index}; see `trims info`")
        return (SECOND, FIRST)[index]

    monkeypatch.setattr(device_arenas, "device_id", device_id)


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
def test_status_shows_devices_and_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == Exit.OK
    shown = capsys.readouterr().out
    first = shown[shown.index(FIRST) : shown.index(SECOND)]
    assert f"NVIDIA H200, {FIRST}, vmm: 2 images, 3 leases; 120 GiB free of 141 GiB" in shown
    assert "1.0 GiB of it left to programs" in first
    assert "6.0 GiB of 100 GiB resident (#), 1.0 GiB loading (+), 2.0 GiB lingering (~)" in first
    second = shown[shown.index(SECOND) :]
    assert "0 images, 0 leases; free: ? of 141 GiB" in second
    assert "lingering: ?" in second
    counted = "on GPUs 4 (capturing 1, no_space 3) not shared there; made private 7 (optimizer 7)"
    assert counted in " ".join(shown.split()), "in two lines"
    assert (
        "moves     2 from device to device (1 failed, see the log), 5 up from host memory, "
        "3 down to it; 4 evicted under pressure\n"
    ) in shown
    assert "2 images: 1 on host, 2 on GPU-8f6c2d1e, 0 on MIG-77aa0b1c" in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r"[ab]{12} ", line)]
    assert [(row[0][0], row[3]) for row in rows] == [
        ("a", "GPU-8f6c2d1e"),
        ("a", "host"),
        ("b", "GPU-8f6c2d1e"),
    ]


@pytest.mark.parametrize(("package", "is_told"), [("0.0.1", True), (__version__, False)])
def test_status_tells_of_another_version(
    daemon: Callable[[GetStatusReply], None],
    package: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found: after an upgrade under a daemon, only those whose models were refused were told."""
    monkeypatch.setattr(Endpoint, "owner", lambda _: os.geteuid())
    daemon(PLAIN._replace(package=package))
    assert main(["status"]) == Exit.OK
    shown = " ".join(capsys.readouterr().out.split())
    advice = "started, until it is started anew: `trims stop`, or restart its service"
    assert (advice in shown) == is_told


def test_status_without_devices(
    daemon: Callable[[GetStatusReply], None], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(PLAIN)
    assert main(["status"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "\n1 image\n" in shown
    assert not re.search(r"^(device|moves|on GPUs)", shown, re.MULTILINE)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("command", ["status", "top"])
def test_json_has_devices_and_tiers(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == [each._asdict() for each in WITH_DEVICES.devices]
    assert [each["tier"] for each in found["images"]] == [FIRST, "host", FIRST]
    reported = found["clients_reported"]
    assert reported["not_on_device"] == {"no_space": 3, "capturing": 1}
    assert reported["made_private"] == {"optimizer": 7}


@pytest.mark.usefixtures("daemon")
def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == Exit.OK
    titles, *rows = capsys.readouterr().out.splitlines()
    assert [row[titles.index("TIER") :].split()[0] for row in rows] == [
        "GPU-8f6c2d1e",
        "host",
        "GPU-8f6c2d1e",
    ]
    assert main(["ls", "--json"]) == Exit.OK
    assert [each["tier"] for each in json.loads(capsys.readouterr().out)] == [FIRST, "host", FIRST]


def test_ls_of_nothing_has_titles(
    daemon: Callable[[GetStatusReply], None], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(PLAIN._replace(images=()))
    assert main(["ls"]) == Exit.OK
    assert capsys.readouterr().out == "DIGEST  SIZE  TIER  LEASES  HITS  USED  NAMES\n"


@pytest.mark.usefixtures("daemon")
def test_top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--once"]) == Exit.OK
    shown = capsys.readouterr().out
    assert f"NVIDIA H200, {FIRST}" in shown
    assert "tier" in shown
    assert shown.count("GPU-8f6c2d1e ") == 2


@pytest.mark.usefixtures("daemon")
def test_top_where_it_is_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["top", "--once"]) == Exit.OK
    shown = capsys.readouterr().out
    assert shown.count("a" * 12) == 2
    assert "3.0 GiB  GPU-8f6c2d1e" in shown
    assert "…" in shown


# --- which device is meant ------------------------------------------------------------------------


@pytest.mark.usefixtures("numbers")
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cuda", SECOND),
        ("cuda:0", SECOND),
        ("cuda:1", FIRST),
        ("1", FIRST),
        ("GPU", FIRST),
        ("gpu-8F6C", FIRST),
        (SECOND, SECOND),
        ("MIG-7", SECOND),
        (FIRST[:-1] + "9", FIRST[:-1] + "9"),
    ],
)
def test_words_for_a_device(word: str, expected: str) -> None:
    assert devices.device_named(word, [FIRST, SECOND]) == expected
    assert devices.tier_named(word, [FIRST, SECOND]) == expected


@pytest.mark.parametrize("word", ["host", "GPU-9", "", "cuda:x", "cuda:-1", "cpu", "²"])
def test_words_for_no_device(word: str) -> None:
    with pytest.raises(UnknownDevice, match=f"{FIRST}, {SECOND}"):
        devices.device_named(word, [FIRST, SECOND])


def test_a_beginning_of_several(numbers: None) -> None:
    with pytest.raises(UnknownDevice, match="is no device"):
        devices.device_named("", [FIRST])
    with pytest.raises(UnknownDevice, match="are several devices"):
        devices.device_named("GPU-8", [FIRST, FIRST[:-1] + "9"])
    with pytest.raises(UnknownDevice, match="daemon's devices: none"):
        devices.device_named("GPU-8", [])
    with pytest.raises(DriverFailure, match="no CUDA device 7"):
        devices.device_named("cuda:7", [FIRST])
    assert devices.tier_named("host", []) == "host"
    with pytest.raises(UnknownDevice, match=r"'banana' is no device; .* memory is host"):
        devices.tier_named("banana", [FIRST])


# --- warm and evict -------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the commands ask of the daemon."""
    asked: list[Any] = []

    def request(_: Cache, message: Any) -> Any:
        if isinstance(message, EvictPreparedRequest):
            return EvictPreparedReply((), 0)
        asked.append(message)
        return EvictImageReply(("a" * 64,), GIB)

    monkeypatch.setattr(Cache, "request", request)
    return asked


@pytest.mark.usefixtures("daemon", "numbers")
@pytest.mark.parametrize(
    ("words", "tier"),
    [
        (["--all"], ""),
        (["--all", "--tier", "host"], "host"),
        (["--all", "--tier", "GPU-8"], FIRST),
        (["--all", "--device", "cuda:0"], SECOND),
        (["aaaaaaaa", "--device", "GPU-8f6c2d1e"], FIRST),
    ],
    ids=" ".join,
)
def test_evict_from_one_tier(words: list[str], tier: str, requests: list[Any]) -> None:
    assert main(["evict", *words]) == Exit.OK
    assert requests == [EvictImageRequest("" if "--all" in words else words[0], tier)]


@pytest.mark.usefixtures("daemon")
def test_evict_says_what_prepared_models_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: of a directory that had become read-only, only the daemon's log told."""

    def request(_: Cache, message: Any) -> Any:
        if isinstance(message, EvictPreparedRequest):
            raise NoSpace("1 of 1 prepared models cannot be removed")
        return EvictImageReply(("a" * 64,), GIB) if isinstance(message, EvictImageRequest) else None

    monkeypatch.setattr(Cache, "request", request)
    assert main(["evict", "--all", "--json"]) == Exit.FAILED
    captured = capsys.readouterr()
    assert json.loads(captured.out)["digests"] == ["a" * 64]
    assert "prepared models cannot be removed" in captured.err


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        (UnknownImage("aaaaaa means 2 models"), "no resident image; aaaaaa means 2 models"),
        (AccessDenied("not yours"), "no resident image"),
    ],
)
def test_evict_says_why_no_model_is_meant(
    prepared: TrimsError,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found: of prepared models nothing was said, and `trims ls` does not show them."""

    def request(_: Cache, message: Any) -> Any:
        if isinstance(message, EvictPreparedRequest):
            raise prepared
        raise UnknownImage("no resident image")

    monkeypatch.setattr(Cache, "request", request)
    assert main(["evict", "aaaaaa"]) == Exit.FAILED
    assert capsys.readouterr().err == f"trims: {said}\n"


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("where", [("--device", "host"), ("--device", ""), ("--tier", "")])
def test_evict_from_a_device_that_is_none(
    where: tuple[str, str], requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty word is a shell's variable that was not set: it does not mean everything."""
    assert main(["evict", "--all", *where]) == Exit.FAILED
    assert f"daemon's devices: {FIRST}, {SECOND}" in capsys.readouterr().err
    assert requests == []


def test_evict_from_one_place_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["evict", "--all", "--tier", "host", "--device", "cuda:0"])
    assert end.value.code == Exit.USAGE
    assert "not allowed with" in capsys.readouterr().err


class _Opened:
    """What :func:`trims_shim.api.open` gives, as far as ``warm`` looks at it."""

    name = __file__
    digest = "a" * 64
    size_bytes = 17

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("daemon", "numbers")
def test_warm_into_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []

    def open(path: str, *, device: str | None) -> _Opened:
        if path != __file__:
            raise NoSpace("the device is full")
        opened.append(device)
        return _Opened()

    monkeypatch.setattr(api, "open", open)
    assert main(["warm", "--json", "--device", "cuda:1", __file__, "/x.pt"]) == Exit.FAILED
    good, full = json.loads(capsys.readouterr().out)
    assert (good["tier"], good["error"]) == (FIRST, "")
    assert (full["tier"], full["error"]) == (FIRST, "the device is full")
    assert main(["warm", "--json", __file__]) == Exit.OK
    assert json.loads(capsys.readouterr().out)[0]["tier"] == "host"
    assert opened == [FIRST, None]


@pytest.mark.parametrize("failure", [DriverFailure("no driver"), UnknownDevice("not shared")])
@pytest.mark.usefixtures("daemon", "numbers")
def test_warm_ends_at_what_is_true_of_every_file(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def open(path: str, *, device: str | None) -> _Opened:
        calls.append(path)
        raise failure

    monkeypatch.setattr(api, "open", open)
    assert main(["warm", "--device", "GPU", __file__, "/x.pt"]) == Exit.FAILED
    assert calls == [__file__]
    assert f"trims: {failure}" in capsys.readouterr().err


@pytest.mark.usefixtures("numbers")
def test_warm_names_a_device_before_any_daemon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> GetStatusReply:
        raise DaemonUnavailable("no daemon")

    opened = []
    monkeypatch.setattr(images, "ask", nobody)
    monkeypatch.setattr(api, "open", lambda path, *, device: opened.append(device) or _Opened())
    assert main(["warm", "--device", "cuda:0", __file__]) == Exit.OK
    assert main(["warm", "--device", FIRST, __file__]) == Exit.OK
    assert main(["warm", "--device", "GPU-8f", __file__]) == Exit.FAILED
    assert opened == [SECOND, FIRST]


# --- info -----------------------------------------------------------------------------------------


def shown_device(support: DeviceSupport) -> str:
    found = Description({}, (), (), (), (), support, *[None] * 7)  # type: ignore[arg-type]
    return info._device(found)


def test_info_shows_devices() -> None:
    can = DeviceFound(0, FIRST, "NVIDIA H200", 141 * GIB, True, 120 * GIB)
    cannot = DeviceFound(1, SECOND, "Old", GIB, False, -1, is_exclusive=True)
    shown = shown_device(DeviceSupport(True, "", "vmm", "580.82", "", (can, cannot)))
    assert shown.splitlines() == [
        "device memory (TRIMS_DEVICE_BACKEND=vmm)",
        "  weights  can be shared",
        "  driver   580.82",
        "  cuda:0   NVIDIA H200, 141 GiB, 120 GiB free,",
        f"           {FIRST}",
        f"  cuda:1   Old, 1.0 GiB, free: ?, {SECOND};",
        "           cannot export memory (backend vmm); for one process at a time",
        "           (compute mode)",
    ]


def test_info_says_why_not() -> None:
    shown = shown_device(DeviceSupport(False, "no driver", "vmm", "", "not asked", ()))
    assert "weights  not shared: no driver\n" in shown
    assert "driver   version unknown (NVML: not asked)" in shown


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceSupport]:
    """Looks at a machine whose driver answers so, with these settings."""

    def look(answer: Any, **settings: str) -> DeviceSupport:
        from trims_shim import config

        def ask(code: str) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(inspection, "ask_child", ask)
        monkeypatch.setattr(inspection, "is_installed", lambda: True)
        return inspection._device(config.load({}, **settings))

    return look


ROW = [0, FIRST, "NVIDIA H200", 141 * GIB, True, 120 * GIB]


def test_a_machine_that_can_share(machine: Callable[..., DeviceSupport]) -> None:
    found = machine(["", "580.82", [ROW]])
    assert found == DeviceSupport(True, "", "vmm", "580.82", "", (DeviceFound(*ROW),))


def test_why_device_memory_is_not_shared(machine: Callable[..., DeviceSupport]) -> None:
    old = [*ROW[:4], False, -1]
    for answer, settings, problem in (
        (["no libcuda", "", []], {}, "no libcuda"),
        (["", "580.82", []], {}, "CUDA_VISIBLE_DEVICES"),
        (["", "580.82", [old]], {}, "TRIMS_DEVICE_BACKEND=ipc"),
        (["", "580.82", [[*ROW, True]]], {}, "nvidia-smi -c DEFAULT"),
        (["", "580.82", [ROW]], {"device": "0"}, "TRIMS_DEVICE=0 (argument)"),
        (["", "580.82", [ROW]], {"device_backend": "off"}, "TRIMS_DEVICE_BACKEND=off (argument)"),
        (NoAnswer("killed"), {}, "not tried: killed"),
    ):
        found = machine(answer, **settings)
        assert not found.is_available
        assert problem in found.problem
    assert machine(["", "580.82", [old]], device_backend="ipc").is_available
    assert machine(["", "", [ROW]]).nvml == "it does not answer"


def test_devices_are_not_shared_without_nvmls_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from trims_shim import config

    monkeypatch.setattr(inspection, "is_installed", lambda: False)
    monkeypatch.setattr(inspection, "ask_child", lambda code: ["", "", [ROW]])
    found = inspection._device(config.load({}))
    assert not found.is_available
    assert found.nvml == "nvidia-ml-py is not installed"
    assert found.problem.startswith(found.nvml)
    assert "pip install" in found.problem


def test_nvmls_package_may_come_from_another_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon, too, asks only whether it can be imported."""
    from trims_shim import config

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (tmp_path / "pynvml.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(inspection, "ask_child", lambda code: ["", "", [ROW]])
    found = inspection._device(config.load({}))
    assert (found.is_available, found.nvml) == (True, "it does not answer")


def test_info_on_this_machine_leaves_the_driver_alone(trims: Trims) -> None:
    """The child asks; a process that has called cuInit could not give CUDA to its own children."""
    code = (
        "import json, sys, trims_shim; found = trims_shim.info(); "
        "assert 'cuda' not in sys.modules; assert 'pynvml' not in sys.modules; "
        "assert 'libcuda' not in open('/proc/self/maps').read(); print(json.dumps(found))"
    )
    done = trims.python("-c", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["device"]
    assert found["is_available"] == (found["problem"] == "")
    assert not trims.sockets.exists()


def test_info_tells_of_devices_for_one_process(
    trims: Trims, make_emulated_environment: Callable[..., dict[str, str]]
) -> None:
    variables = make_emulated_environment(exclusive=1)
    found = json.loads(trims("info", "--json", **variables).stdout)["device"]
    assert "compute mode" in found["problem"]
    assert [each["is_exclusive"] for each in found["devices"]] == [True]


def test_info_asks_the_driver_of_the_machine(
    trims: Trims, make_emulated_environment: Callable[..., dict[str, str]]
) -> None:
    variables = make_emulated_environment(devices=2)
    found = json.loads(trims("info", "--json", **variables).stdout)["device"]
    assert (found["is_available"], found["problem"]) == (True, "")
    assert [each["index"] for each in found["devices"]] == [0, 1]
    assert all(each["can_export"] and each["free_bytes"] > 0 for each in found["devices"])
    assert found["driver"]
    shown = trims("info", **variables).stdout
    assert "weights  can be shared" in shown
    assert found["devices"][1]["id"] in shown
    masked = trims("info", "--json", **variables, CUDA_VISIBLE_DEVICES="1").stdout
    (only,) = json.loads(masked)["device"]["devices"]
    assert only == found["devices"][1] | {"index": 0}


def test_info_of_a_machine_that_cannot_export(
    trims: Trims, make_emulated_environment: Callable[..., dict[str, str]]
) -> None:
    variables = make_emulated_environment(vmm=0, nvml=0)
    found = json.loads(trims("info", "--json", **variables).stdout)["device"]
    assert "TRIMS_DEVICE_BACKEND=ipc" in found["problem"]
    assert found["nvml"] == "it does not answer"
    assert found["devices"][0]["free_bytes"] == -1
    done = trims("info", "--json", **variables, TRIMS_DEVICE_BACKEND="ipc")
    assert json.loads(done.stdout)["device"]["is_available"]


def test_info_when_the_driver_kills_the_one_who_asks(
    trims: Trims, make_emulated_environment: Callable[..., dict[str, str]]
) -> None:
    variables = make_emulated_environment(fail="cuInit=kill")
    done = trims("info", "--json", **variables)
    assert done.returncode == Exit.OK
    assert "not tried: status -9" in json.loads(done.stdout)["device"]["problem"]
