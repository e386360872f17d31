"""``trims info``: :mod:`trims_shim.inspection`, for people."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import Counter
from dataclasses import asdict

from trims_shim.cli.exits import Exit
from trims_shim.cli.status import RESTART_HINT
from trims_shim.cli.text import print_json, printable, size
from trims_shim.inspection import DaemonStatus, Description, DeviceFound, PatchStatus, look

__all__ = ["info"]


def info(arguments: argparse.Namespace) -> Exit:
    """Show everything; status 2 when a setting cannot be used."""
    found = look(with_libraries=arguments.probe)
    if arguments.json:
        print_json(asdict(found))
    else:
        print("\n\n".join(_sections(found)))
    return Exit.USAGE if found.problems else Exit.OK


def _sections(found: Description) -> list[str]:
    sections = []
    if found.problems:
        lines = "\n".join(f"  {problem}" for problem in found.problems)
        sections.append(f"SETTINGS THAT CANNOT BE USED (the shim is inactive)\n{lines}")
    sections.append(_in_short(found))
    sections.append("versions\n" + _pairs(list(found.versions.items())))
    sections.append(_patches(found))
    wrapped = [each for each in found.wrappers if len(each.chain) > 1]
    if wrapped:
        lines = "\n".join(f"  {each.target}\n    " + "\n    ".join(each.chain) for each in wrapped)
        sections.append(f"wrapped functions, outermost first\n{lines}")
    machine = (_memory, _device, _prepared, _remote, _daemon, _limits, _settings)
    return [*sections, *(each(found) for each in machine)]


_STATES = {
    "applied": "applied",
    "waiting": "waiting for their libraries",
    "skipped": "skipped",
    "undone": "undone",
    "off": "off",
}


def _in_short(found: Description) -> str:
    """What most people want to know; the other sections say why."""
    counts = Counter(each.state for each in found.patches)
    points = ", ".join(
        f"{counts[state]} {text}" for state, text in _STATES.items() if counts[state]
    )
    is_on = counts["off"] < len(found.patches)
    kind = next((each.kind for each in found.memory if each.is_used), "")
    devices = ", ".join(f"cuda:{each.index}" for each in found.device.devices)
    lines = [
        ("shim", f"{'active' if is_on else 'inactive'}; patch points: {points}"),
        ("host memory", f"shared ({kind})" if kind else "not shared"),
        ("device memory", f"shared ({devices})" if found.device.is_available else "not shared"),
    ]
    lines.append(("daemon", _daemon_in_short(found.daemon)))
    return "in short\n" + _pairs(lines)


def _daemon_in_short(daemon: DaemonStatus) -> str:
    if not daemon.is_running:
        return f"none {'runs; a' if daemon.can_start else 'answers; no'} load starts one"
    if not daemon.problem:
        return f"runs ({daemon.pid})"
    effect = "a load replaces it" if daemon.can_start else "no load is served"
    return f"runs ({daemon.pid}), but with another protocol; {effect}"


def _patches(found: Description) -> str:
    """The points grouped by state: most are in the same state for the same reason."""
    groups: dict[str, list[PatchStatus]] = {}
    for each in found.patches:
        state = f"{each.state}: {each.reason}" if each.reason else each.state
        groups.setdefault(state, []).append(each)
    lines = ["patch points"]
    for state, points in groups.items():
        lines += _wrapped(state, 2, more=0)
        for each in points:
            lines += _wrapped(f"{each.target} ({each.supported})", 4, more=2)
    return "\n".join(lines)


def _memory(found: Description) -> str:
    lines = []
    for each in found.memory:
        what = "works" if each.is_available else each.reason
        if each.is_used:
            what = "works, and is used" if each.is_available else f"the daemon's; here: {what}"
        lines.append((each.kind, what))
    chosen = next(each.value for each in found.settings if each.name == "memory_kind")
    return f"host memory, best first (TRIMS_MEMORY_KIND={chosen})\n" + _pairs(lines)


def _device(found: Description) -> str:
    device = found.device
    lines = [
        ("weights", "can be shared" if device.is_available else f"not shared: {device.problem}"),
        ("driver", device.driver or f"version unknown (NVML: {device.nvml})"),
        *((f"cuda:{each.index}", _found(each)) for each in device.devices),
    ]
    return f"device memory (TRIMS_DEVICE_BACKEND={device.backend})\n" + _pairs(lines)


def _found(device: DeviceFound) -> str:
    free = f"{size(device.free_bytes)} free" if device.free_bytes >= 0 else "free: ?"
    export = "" if device.can_export else "; cannot export memory (backend vmm)"
    exclusive = "; for one process at a time (compute mode)" if device.is_exclusive else ""
    return f"{device.name}, {size(device.total_bytes)}, {free}, {device.id}{export}{exclusive}"


def _prepared(found: Description) -> str:
    prepared = found.prepared
    place = prepared.directory + ("" if prepared.exists else " (made when it is needed)")
    lines = [
        ("models", "can be prepared" if prepared.is_available else f"off: {prepared.problem}"),
        ("directory", place),
        ("budget", f"{size(prepared.budget_bytes)}, {size(max(0, prepared.spare_bytes))} to spare"),
    ]
    return "prepared ONNX models (TRIMS_CACHE_DIR)\n" + _pairs(lines)


def _remote(found: Description) -> str:
    remote = found.remote
    lines = [
        ("directory", remote.directory),
        ("copies", f"{remote.copies}, {size(remote.size_bytes)} of {size(remote.budget_bytes)}"),
    ]
    return "copies of remote models (TRIMS_REMOTE_BYTES)\n" + _pairs(lines)


def _daemon(found: Description) -> str:
    socket = found.socket
    access = f"mode {socket.mode}, owner {socket.owner}" if socket.exists else ""
    lines = [
        ("directory", ", ".join(filter(None, (socket.directory, access, socket.problem)))),
        ("handover", socket.handover),
        ("daemon", _running(found.daemon)),
    ]
    return "daemon\n" + _pairs(lines)


def _running(daemon: DaemonStatus) -> str:
    # It may be another user's, and chooses these words.
    package, problem = printable(daemon.package), printable(daemon.problem)
    if not daemon.is_running:
        return f"not reachable: {problem}"
    if problem:
        return f"{daemon.pid}; {problem}"
    same = "same settings as here" if daemon.has_same_settings else RESTART_HINT
    if not daemon.is_own:
        same = "another user's, with settings of its own"
    return f"{daemon.pid}, trims_shim {package}, protocol {daemon.protocol}; {same}"


def _limits(found: Description) -> str:
    limits = found.limits
    memory = size(limits.memory_bytes)
    if limits.memory_bytes < limits.physical_memory_bytes:
        memory += f" (cgroup limit; the machine has {size(limits.physical_memory_bytes)})"
    return "limits\n" + _pairs(
        [
            ("open files", f"{limits.open_files_soft} (up to {limits.open_files_hard})"),
            ("memory", memory),
        ]
    )


def _settings(found: Description) -> str:
    lines = []
    for each in found.settings:
        source = each.source.removesuffix(f" {each.variable}")  # environment TRIMS_STRICT
        when = "; read when the daemon starts" if each.is_read_at_daemon_start else ""
        lines.append(f"  {each.variable}={each.value} ({source}{when})")
        lines += _wrapped(each.help, 6, more=0)
    there = "" if os.path.exists(found.config_file) else ", not there"
    return "\n".join([f"settings (file: {found.config_file}{there})", *lines])


def _pairs(pairs: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    lines = (_wrapped(f"{name.ljust(width)}  {value}", 2, more=width + 2) for name, value in pairs)
    return "\n".join(line for each in lines for line in each)


def _wrapped(text: str, indent: int, *, more: int) -> list[str]:
    """In lines of a terminal; ``more`` spaces are before all but the first."""
    return textwrap.wrap(
        text,
        79,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + more),
        break_long_words=False,
        break_on_hyphens=False,
    )
