"""``trims info`` and :func:`trims_shim.info`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from trims_shim import config, inspection, patches
from trims_shim.cli import info
from trims_shim.cli.exits import Exit
from trims_shim.client.cache import Cache
from trims_shim.errors import AccessDenied, DaemonUnavailable, TrimsError
from trims_shim.inspection import (
    DaemonStatus,
    Description,
    DeviceFound,
    DeviceSupport,
    MemoryKind,
    WrapperChain,
)
from trims_shim.wire.messages import PROTOCOL_VERSION, Welcome

from .conftest import Trims

SECTIONS = ("in short", "versions", "patch points", "host memory", "daemon", "limits", "settings")

HOST = ("torch", "safetensors")


def test_info_without_torch_daemon_or_side_effects(trims: Trims) -> None:
    code = (
        "import json, sys, trims_shim; found = trims_shim.info(); "
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules); print(json.dumps(found))"
    )
    done = trims.python("-c", code, TRIMS_PATCHES="torch")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not trims.sockets.exists()
    states = {point["target"]: point["state"] for point in found["patches"]}
    assert states["torch.serialization:_load"] == "waiting"
    assert states["safetensors.numpy:load_file"] == "off"
    assert not found["daemon"]["is_running"]
    assert "does not exist yet" in found["socket"]["problem"]
    assert any(kind["is_available"] for kind in found["memory"])
    assert all(kind["is_available"] or kind["reason"] for kind in found["memory"])
    settings = {setting["name"]: setting for setting in found["settings"]}
    assert settings.keys() == {setting.name for setting in config.SETTINGS}
    assert settings["patches"]["source"] == "environment TRIMS_PATCHES"
    assert settings["host_bytes"]["is_read_at_daemon_start"]


def test_why_copies_are_not_elided(trims: Trims) -> None:
    found = json.loads(trims("info", "--json", TRIMS_ELIDE_COPIES="0").stdout)
    reasons = {each["target"]: each["reason"] for each in found["patches"]}
    expected = "TRIMS_ELIDE_COPIES=0 (environment TRIMS_ELIDE_COPIES)"
    assert reasons["torch.storage:UntypedStorage.resize_"] == expected


def test_info_for_people(warmed: Trims) -> None:
    done = warmed("info")
    assert done.returncode == Exit.OK
    assert all(f"\n{name}" in f"\n{done.stdout}" for name in SECTIONS)
    assert "same settings as here" in done.stdout
    assert "applies when torch is imported" in done.stdout
    assert "mode 0700" in done.stdout
    assert "trims.toml, not there)" in done.stdout
    assert "  copy engine " in done.stdout
    settings = done.stdout[done.stdout.index("\nsettings") :].splitlines()[2:]
    assert f"  TRIMS_SOCKET_DIR={warmed.sockets} (environment)" in settings
    assert "  TRIMS_INGEST_THREADS=0 (default; read when the daemon starts)" in settings
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line]
    assert [line for line in long if " " in line.strip()] == []  # a name is not cut
    assert "`trims stop`" in warmed("info", TRIMS_IDLE_EXIT="9").stdout


def test_the_verdict_comes_first(warmed: Trims, trims: Trims) -> None:
    def verdict(text: str) -> dict[str, str]:
        _, *lines = text[text.index("in short") :].partition("\n\n")[0].splitlines()
        assert all(len(line) <= 80 for line in lines)
        return {line[2:17].strip(): line[17:] for line in lines}

    running = verdict(warmed("info").stdout)
    assert running["shim"].startswith("active; patch points: ")
    assert "waiting for their libraries" in running["shim"]
    assert running["host memory"].startswith("shared (")
    assert running["daemon"].startswith("runs (")
    off = {"TRIMS_ENABLED": "0", "TRIMS_AUTOSTART": "0"}
    idle = verdict(trims("info", TRIMS_SOCKET_DIR=str(trims.sockets / "other"), **off).stdout)
    assert idle["shim"].startswith("inactive; ")
    assert idle["daemon"] == "none answers; no load starts one"
    assert verdict(trims("info", TRIMS_ENABLED="yes").stdout)["shim"].startswith("active; ")
    assert verdict(trims("info", TRIMS_STRIKT="1").stdout)["shim"].startswith("inactive; ")


def test_the_memory_that_is_used_is_the_daemons_or_what_one_would_take(
    new_trims: Callable[[], Trims], model: Path
) -> None:
    def used(**variables: str) -> tuple[str, list[str]]:
        text = trims("info", **variables).stdout
        (short,) = [line for line in text.splitlines() if line.startswith("  host memory ")]
        kinds = [line.split()[0] for line in text.splitlines() if "works, and is used" in line]
        return short.split(maxsplit=2)[-1], kinds

    trims = new_trims()
    assert used(TRIMS_MEMORY_KIND="memfd") == ("shared (memfd)", ["memfd"])
    assert trims("warm", str(model), TRIMS_MEMORY_KIND="memfd").returncode == Exit.OK
    assert used() == ("shared (memfd)", ["memfd"])


def test_memory_of_a_daemon_that_may_do_more_than_this_process() -> None:
    kinds = (MemoryKind("tmpfs-huge", False, "no root", True), MemoryKind("memfd", True, "", False))
    found = replace(inspection.look(), memory=kinds)
    _, theirs, ours = info._memory(found).splitlines()
    assert theirs.split(maxsplit=1) == ["tmpfs-huge", "the daemon's; here: no root"]
    assert ours.split() == ["memfd", "works"]
    assert "shared (tmpfs-huge)" in info._in_short(found)


NONE = DaemonStatus(False, 0, "", 0, False, True, True, "there is none")
OWN = DaemonStatus(True, 7, "1.0", 2, True, True, False, "")


@pytest.mark.parametrize(
    ("daemon", "in_short", "whole"),
    [
        (NONE, "none runs; a load starts one", "not reachable: there is none"),
        (replace(NONE, can_start=False), "none answers; no load starts one", "there is none"),
        (OWN, "runs (7)", "same settings as here"),
        (replace(OWN, has_same_settings=False), "runs (7)", "`trims stop`"),
        (replace(OWN, has_same_settings=False, is_own=False), "runs (7)", "another user's, with"),
        (replace(OWN, problem="older", can_start=True), "a load replaces it", "7; older"),
        (replace(OWN, problem="newer"), "another protocol; no load is served", "7; newer"),
    ],
)
def test_what_it_says_of_a_daemon(daemon: DaemonStatus, in_short: str, whole: str) -> None:
    assert info._daemon_in_short(daemon).endswith(in_short)
    assert whole in info._running(daemon)


@pytest.mark.parametrize(
    ("protocol", "is_own", "autostart", "can_start"),
    [
        (PROTOCOL_VERSION - 1, True, "1", True),
        (PROTOCOL_VERSION - 1, True, "0", False),
        (PROTOCOL_VERSION - 1, False, "1", False),
        (PROTOCOL_VERSION + 1, True, "1", False),
    ],
)
def test_only_an_older_daemon_of_ones_own_is_replaced(
    monkeypatch: pytest.MonkeyPatch, protocol: int, is_own: bool, autostart: str, can_start: bool
) -> None:
    welcome = Welcome(protocol, "1.0", 7, "instance", b"token")
    monkeypatch.setattr(inspection, "_welcome", lambda of: (welcome, "other protocol"))
    monkeypatch.setattr(inspection, "_is_own", lambda of: is_own)
    found = inspection._daemon(Cache(config.load({}, autostart=autostart)))
    assert (found.is_running, found.is_own, found.can_start) == (True, is_own, can_start)


@pytest.mark.parametrize(
    ("error", "can_start"),
    [(DaemonUnavailable("none"), True), (AccessDenied("another user's"), False)],
)
def test_a_load_starts_one_only_where_none_is_there(
    monkeypatch: pytest.MonkeyPatch, error: TrimsError, can_start: bool
) -> None:
    def fail(of: Cache) -> NoReturn:
        raise error

    monkeypatch.setattr(inspection, "_welcome", fail)
    for autostart, expected in (("1", can_start), ("0", False)):
        found = inspection._daemon(Cache(config.load({}, autostart=autostart)))
        assert (found.is_running, found.can_start) == (False, expected)
        assert found.problem == str(error)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enabled": "0"}, "TRIMS_ENABLED=0 (argument)"),
        ({"patches": "safetensors"}, "TRIMS_PATCHES=safetensors (argument)"),
        ({"elide_copies": "0"}, "TRIMS_ELIDE_COPIES=0 (argument)"),
        ({}, "trims_shim.disable() was called"),
    ],
)
def test_why_a_patch_file_is_off(settings: dict[str, str], reason: str) -> None:
    found = config.load({}, **settings)
    assert inspection._why_off(found, "torch_module", ("torch",), ()) == reason


def test_what_a_daemon_says_does_not_steer_the_terminal() -> None:
    """It may be another user's."""
    hostile = "\x1b]0;mine\x07"
    for daemon in (NONE, OWN):
        assert "\x1b" not in info._running(replace(daemon, package=hostile, problem=hostile))
    said = info._running(replace(OWN, package=hostile, is_own=False))
    assert r"trims_shim \x1b]0;mine\x07, protocol 2" in said


def test_the_verdict_on_device_memory() -> None:
    device = DeviceFound(3, "GPU-0", "NVIDIA H200", 1 << 30, True, 1 << 30)
    for is_available, expected in ((True, "shared (cuda:3)"), (False, "not shared")):
        support = DeviceSupport(is_available, "", "vmm", "", "", (device,))
        rest = {"memory": (), "daemon": NONE}
        found = Description({}, (), (), (), (), support, *[None] * 7)  # type: ignore[arg-type]
        lines = info._in_short(replace(found, **rest)).splitlines()
        assert [line.split("  ")[-1].strip() for line in lines if "device mem" in line] == [
            expected
        ]


def test_what_it_says_of_a_device() -> None:
    device = DeviceFound(3, "GPU-0", "NVIDIA H200", 2 << 30, True, 1 << 30)
    assert info._found(device) == "NVIDIA H200, 2.0 GiB, 1.0 GiB free, GPU-0"
    unknown = info._found(replace(device, free_bytes=-1, can_export=False))
    assert unknown == "NVIDIA H200, 2.0 GiB, free: ?, GPU-0; cannot export memory (backend vmm)"


def test_functions_that_are_wrapped_are_listed_and_no_others() -> None:
    chains = WrapperChain("torch:load", ("a.py:1", "b.py:2")), WrapperChain("torch:save", ("c:3",))
    found = info._sections(replace(inspection.look(), wrappers=chains))
    text = "wrapped functions, outermost first\n  torch:load\n    a.py:1\n    b.py:2"
    assert text in found
    assert not any("torch:save" in section for section in found)


def test_a_limit_below_the_memory_of_the_machine_is_told_of() -> None:
    found = inspection.look()
    for physical, expected in (
        (1, "1.0 GiB"),
        (2, "1.0 GiB (cgroup limit; the machine has 2.0 GiB)"),
    ):
        limits = replace(found.limits, memory_bytes=1 << 30, physical_memory_bytes=physical << 30)
        assert info._limits(replace(found, limits=limits)).endswith(f"  {expected}")


def test_info_with_settings_that_cannot_be_used(trims: Trims) -> None:
    broken = {"TRIMS_HOST_BYTES": "plenty", "TRIMS_STRIKT": "1"}
    done = trims("info", "--json", **broken)
    assert done.returncode == Exit.USAGE
    found = json.loads(done.stdout)
    size, name = found["problems"]
    assert "TRIMS_HOST_BYTES" in size
    assert "did you mean TRIMS_STRICT?" in name
    assert {point["reason"] for point in found["patches"]} == {"a setting cannot be used"}
    assert found["socket"]["directory"] == str(trims.sockets), "what can be used is used"
    assert "plenty" in trims("info", **broken).stdout


def test_probe_really_patches(trims: Trims) -> None:
    found = json.loads(trims("info", "--probe", "--json").stdout)
    # Without a GPU, the patches of the device tier say so; transformers and torch.export are not
    # imported to look.
    device = ("this torch is built without CUDA", "torch_module does it")
    host = [p for p in found["patches"] if p["reason"] not in device and p["library"] in HOST]
    host = [p for p in host if not p["target"].startswith("torch.export.")]
    assert {(p["state"], p["reason"]) for p in host} == {("applied", "")}
    chains = {each["target"]: each["chain"] for each in found["wrappers"]}
    ours, theirs = chains["torch.nn.modules.module:Module.load_state_dict"]
    assert "trims_shim" in ours
    assert "trims_shim" not in theirs


@pytest.mark.parametrize("patch_file", [file for file, *_ in patches.PATCH_FILES])
def test_what_info_reads_from_the_source_of_a_patch_file(patch_file: str) -> None:
    points = importlib.import_module(f"trims_shim.patches.{patch_file}").POINTS
    declared = inspection._declared(patch_file)
    if patch_file == "onnxruntime_options":
        points = points[:4]  # The others depend on the version of onnxruntime.
    assert declared == [(each.target, each.supported) for each in points]
