"""Devices on the command line: what words mean one, and how device tiers are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from trims_shim.cli.text import bar, counted, size
from trims_shim.errors import UnknownDevice
from trims_shim.specs import HOST_TIER, DeviceId
from trims_shim.wire import admin
from trims_shim.wire.admin import DeviceStatus, GetStatusReply, MemoryStatus

__all__ = [
    "account",
    "device_lines",
    "device_named",
    "image_count",
    "image_total",
    "short",
    "tier_named",
]

_ID_CHARACTERS = len("GPU-") + 36
_INDEX = re.compile(r"(?:cuda(?::(\d+))?|(\d+))", re.ASCII)


# --- words ----------------------------------------------------------------------------------------


def device_named(word: str, known: Iterable[DeviceId]) -> DeviceId:
    """The device meant by ``cuda:1`` or ``1`` (CUDA's numbers in this shell), or by an id.

    A unique beginning of an id in ``known`` is enough. Raises UnknownDevice, DriverFailure.
    """
    found = _INDEX.fullmatch(word)
    if found is not None:
        from trims_shim.client.device_arenas import device_id

        return device_id(int(found[1] or found[2] or 0))
    ids = list(known)
    matches = [each for each in ids if word and each.lower().startswith(word.lower())]
    if len(matches) == 1:
        return matches[0]
    if len(word) == _ID_CHARACTERS and not matches:
        return word
    what = "are several devices" if matches else "is no device"
    seen = ", ".join(ids) or "none"
    raise UnknownDevice(f"{word!r} {what}; say cuda:0, or one of the daemon's devices: {seen}")


def tier_named(word: str, known: Iterable[DeviceId]) -> str:
    """``host``, or a device as :func:`device_named`."""
    if word == HOST_TIER:
        return HOST_TIER
    try:
        return device_named(word, known)
    except UnknownDevice as error:
        raise UnknownDevice(f"{error}; the tier of the machine's memory is {HOST_TIER}") from None


# --- text -----------------------------------------------------------------------------------------


def short(tier: str) -> str:
    """``host``, ``GPU-8f6c2d1e``: unique on any one machine."""
    return "-".join(tier.split("-")[:2])


def device_lines(reply: GetStatusReply) -> list[str]:
    """Two lines for each device tier, and one for the moves between tiers."""
    if not reply.devices:
        return []
    lines = [line for device in reply.devices for line in _lines(device, reply)]
    return [*lines, _moves(reply.counters)]


def _moves(counters: Mapping[str, int]) -> str:
    count = counters.get
    failed = count("peer_copies_failed", 0)
    return (
        f"moves     {count('images_copied_from_peer', 0)} from device to device"
        + (f" ({failed} failed, see the log)" if failed else "")
        + f", {count('images_promoted', 0)} up from host memory, "
        f"{count('images_demoted', 0)} down to it; "
        f"{count('evicted_under_pressure', 0)} evicted under pressure"
    )


def _lines(device: DeviceStatus, reply: GetStatusReply) -> tuple[str, str]:
    images = [image for image in reply.images if image.tier == device.device]
    leases = sum(image.leases for image in images)
    free = f"{size(device.free_bytes)} free" if device.free_bytes >= 0 else "free: ?"
    return (
        f"device    {device.name}, {device.device}, {device.backend}: "
        f"{counted(len(images), 'image')}, {counted(leases, 'lease')}; "
        f"{free} of {size(device.total_bytes)}, "
        f"{size(device.headroom_bytes)} of it left to programs",
        f"          {account(device)}",
    )


def account(memory: DeviceStatus | MemoryStatus) -> str:
    """A bar of a tier's budget, and what the characters in it stand for."""
    lingering = max(0, memory.lingering_bytes)
    parts = (
        (memory.resident_bytes, "#"),
        (memory.reserved_bytes, "+"),
        (lingering, "~"),
    )
    text = f"{size(memory.resident_bytes)} of {size(memory.budget_bytes)} resident (#)"
    if memory.reserved_bytes:
        text += f", {size(memory.reserved_bytes)} loading (+)"
    if memory.lingering_bytes < 0:
        text += ", lingering: ?"
    elif lingering:
        text += f", {size(lingering)} lingering (~)"
    return f"{bar(parts, memory.budget_bytes)} {text}"


def image_total(reply: GetStatusReply) -> str:
    """``3 images``; ``or more`` if the reply has no room for any others."""
    count = counted(len({image.digest for image in reply.images}), "image")
    return f"{count} or more" if len(reply.images) >= admin.IMAGES_IN_REPLY else count


def image_count(reply: GetStatusReply) -> str:
    """``3 images``, and where they are if there are devices."""
    count = image_total(reply)
    tiers = [HOST_TIER, *(device.device for device in reply.devices)]
    if len(tiers) == 1:
        return count
    places = (
        f"{sum(image.tier == tier for image in reply.images)} on {short(tier)}" for tier in tiers
    )
    return f"{count}: {', '.join(places)}"
