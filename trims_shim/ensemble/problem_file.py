"""Problems of allocation as JSON files. Content is not trusted: what is wrong is a FormatError."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import (
    LARGEST_SIZE,
    JsonFormat,
    latencies_of,
)
from trims_shim.ensemble.allocation import Device, Footprint, MemberProfile, Problem
from trims_shim.errors import CorruptFile
from trims_shim.replacing import target_of

__all__ = ["load_problem", "save_problem"]

_FORMAT = JsonFormat(
    name="trims-ensemble",
    noun="problem of an ensemble",
    version=1,
    command="trims_shim.ensemble.save_problem",
    limit_bytes=64 << 20,  # a member's latencies of the largest batches are up to 2 MB
)
_MOST_BYTES = 1 << 60


def save_problem(path: str | os.PathLike[str], problem: Problem) -> None:
    """Write or replace a file; a link stays one. Raises OSError."""
    members = {
        name: {
            kind: _fields(footprint) | _latencies(profile.latencies.get(kind))
            for kind, footprint in profile.footprints.items()
        }
        for name, profile in problem.members.items()
    }
    _FORMAT.write(
        target_of(path),
        {
            "batch_sizes": list(map(int, problem.batch_sizes)),
            "devices": [_fields(device) for device in problem.devices],
            "members": members,
        },
    )


def _fields(part: Device | Footprint) -> dict[str, Any]:
    """Bytes may be 16e9, a number of numpy's, or infinite; files have whole ones."""
    return {
        key: int(min(value, _MOST_BYTES)) if key.endswith("_bytes") else value
        for key, value in dataclasses.asdict(part).items()
    }


def _latencies(profile: LatencyProfile | None) -> dict[str, Any]:
    """Of all sizes: what was measured of some is smoothed, and does not lie between these."""
    if profile is None:
        return {}
    sizes = range(1, profile.max_batch_size + 1)
    return {"latencies_ns": {str(size): profile.taken_ns(size) for size in sizes}}


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read what :func:`save_problem` wrote. Raises OSError and FormatError."""
    name, fields = os.fspath(path), _FORMAT.read(path)
    try:
        return Problem(
            [Device(**_device(name, each)) for each in _list(name, fields, "devices")],
            {
                member: _member(name, each)
                for member, each in _table(name, fields, "members").items()
            },
            tuple(_size(name, each) for each in _list(name, fields, "batch_sizes")),
        )
    except (TypeError, ValueError) as error:
        raise CorruptFile(f"{name} is no {_FORMAT.noun}: {error}") from None


def _device(name: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise CorruptFile(f"{name} has a device that is no table")
    texts = {key: fields[key] for key in ("name", "kind", "pool") if key in fields}
    if not texts.get("name") or not all(isinstance(each, str) for each in texts.values()):
        raise CorruptFile(f"{name} has a device without a name")
    is_reserve = bool(fields.get("is_reserve"))
    return texts | {"memory_bytes": _bytes(name, fields, "memory_bytes"), "is_reserve": is_reserve}


def _member(name: str, fields: Any) -> MemberProfile:
    if not isinstance(fields, dict):
        raise CorruptFile(f"{name} has a member that is no table")
    footprints, latencies = {}, {}
    for kind in fields:
        inner = _table(name, fields, kind)
        footprints[kind] = Footprint(
            *(_bytes(name, inner, each.name) for each in dataclasses.fields(Footprint))
        )
        if "latencies_ns" in inner:
            measured = latencies_of(name, inner)
            latencies[kind] = LatencyProfile.measured(measured, pads=False)
    return MemberProfile(footprints, latencies)


def _list(name: str, fields: dict[str, Any], key: str) -> list[Any]:
    found = fields.get(key)
    if not isinstance(found, list):
        raise CorruptFile(f"{name} has no list of {key}")
    return found


def _table(name: str, fields: dict[str, Any], key: str) -> dict[str, Any]:
    found = fields.get(key)
    if not isinstance(found, dict):
        raise CorruptFile(f"{name} has no table of {key}")
    return found


def _bytes(name: str, fields: dict[str, Any], key: str) -> int:
    found = fields.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _MOST_BYTES:
        raise CorruptFile(f"{name} has {str(found)[:40]} as {key}")
    return found


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise CorruptFile(f"{name} has a batch size of {str(value)[:40]}")
    return value
