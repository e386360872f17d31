"""Profiles of staged models as files: what ``trims stage profile`` writes.

A file has the latencies of each stage by batch size, for each measured length of items. It also has
what follows from them, preferred batch sizes and diversities: these are for human readers, and are
computed anew when the file is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import (
    JsonFormat,
    largest_of,
    latencies_of,
)
from trims_shim.batching.staged.profiles.diversity import Diversity, preferred_size
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.errors import CorruptFile
from trims_shim.replacing import target_of

__all__ = [
    "SavedStages",
    "StageLatencies",
    "load_saved_stages",
    "save_staged_profile",
    "staged_profile",
]

_FORMAT = JsonFormat("trims staged profile", "staged profile", 1, "trims stage profile")
_LARGEST_LENGTH = 1 << 40
_LIMIT_ENTRIES = 1 << 22
"""The most entries of all tables together: a small file must not fill the memory."""

StageLatencies = Sequence[Mapping[int, float]]
"""For each stage, nanoseconds by batch size."""


def staged_profile(
    latencies_ns: StageLatencies, *, max_batch_size: int, width: float | None = None
) -> StagedProfile:
    """Make a profile of measured latencies, with the preferred size of each stage.

    Sizes between two measured ones are interpolated linearly. Raises ValueError for a stage without
    latencies.
    """
    stages = [
        LatencyProfile.measured(each, max_batch_size=max_batch_size, pads=False)
        for each in latencies_ns
    ]
    preferred = [preferred_size(stage) for stage in stages]
    return StagedProfile(stages, preferred=preferred, width=width)


@dataclass(frozen=True, slots=True)
class SavedStages:
    """The content of a staged profile's file."""

    latencies_ns: Mapping[int | None, StageLatencies]
    """By the length of items, ascending; the only key is None if lengths were not measured."""
    max_batch_size: int
    stages: tuple[str, ...] = ()
    """A description of each stage, for readers."""
    name: str = ""
    machine: str = ""
    note: str = ""
    width: float | None = None
    """The width of the device, see :class:`StagedProfile`; None if it was not measured."""

    @property
    def lengths(self) -> list[int]:
        """The measured lengths, ascending; empty if lengths were not measured."""
        return [length for length in self.latencies_ns if length is not None]

    @property
    def profile(self) -> StagedProfile:
        """The profile of the longest items, so that no batch takes longer than predicted."""
        return self.profiles()[-1]

    @property
    def diversity(self) -> Diversity:
        """What this model can gain from being staged."""
        return Diversity.of(self.profiles())

    def profile_for(self, length: int) -> StagedProfile:
        """Return the profile of the next measured length from ``length`` on, or of the longest."""
        fitting = [each for each in self.lengths if each >= length]
        return self._profile(fitting[0]) if fitting else self.profile

    def profiles(self) -> list[StagedProfile]:
        """One for each length, ascending."""
        return [self._profile(length) for length in self.latencies_ns]

    def _profile(self, length: int | None) -> StagedProfile:
        return staged_profile(
            self.latencies_ns[length], max_batch_size=self.max_batch_size, width=self.width
        )


def save_staged_profile(path: str | os.PathLike[str], saved: SavedStages) -> None:
    """Write or replace a user's file; a link stays one. Raises OSError."""
    fields = {
        "name": saved.name,
        "machine": saved.machine,
        "note": saved.note,
        "max_batch_size": saved.max_batch_size,
        "width": saved.width,
        "diversity": asdict(saved.diversity),
        "inputs": [
            {"length": length, "stages": _described(saved, latencies_ns, profile)}
            for (length, latencies_ns), profile in zip(
                saved.latencies_ns.items(), saved.profiles(), strict=True
            )
        ],
    }
    _FORMAT.write(target_of(path), fields)


def _described(
    saved: SavedStages, latencies_ns: StageLatencies, profile: StagedProfile
) -> list[dict[str, Any]]:
    names = saved.stages or [""] * len(latencies_ns)
    return [
        {
            "name": name,
            "preferred": preferred,
            "latencies_ns": {str(size): round(taken_ns) for size, taken_ns in each.items()},
        }
        for name, preferred, each in zip(names, profile.preferred, latencies_ns, strict=True)
    ]


def load_saved_stages(path: str | os.PathLike[str]) -> SavedStages:
    """Read a staged profile's file. Raises OSError, and FormatError if it is not one."""
    name, fields = os.fspath(path), _FORMAT.read(path)
    inputs = _list_of(name, fields, "inputs")
    latencies_ns = {_length(name, each): _stages(name, each) for each in inputs}
    lengths = [length for length in latencies_ns if length is not None]
    is_one = len(latencies_ns) == 1
    if len(latencies_ns) != len(inputs) or (len(lengths) != len(inputs) and not is_one):
        raise CorruptFile(f"{name} has several inputs of the same length")
    if lengths != sorted(lengths):
        raise CorruptFile(f"{name} has inputs whose lengths do not ascend")
    if len({len(stages) for stages in latencies_ns.values()}) > 1:
        raise CorruptFile(f"{name} has inputs of different numbers of stages")
    largest, count = largest_of(name, fields), sum(map(len, latencies_ns.values()))
    if largest * count > _LIMIT_ENTRIES:
        raise CorruptFile(f"{name} has {count} stages of batches up to {largest}: too much")
    texts = {each: str(fields.get(each, "")) for each in ("name", "machine", "note")}
    stages = tuple(str(each.get("name", "")) for each in inputs[0]["stages"])
    return SavedStages(latencies_ns, largest, stages, **texts, width=_width(name, fields))


def _list_of(name: str, fields: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    found = fields.get(field)
    if not isinstance(found, list) or not found:
        raise CorruptFile(f"{name} has no {field}")
    if not all(isinstance(each, dict) for each in found):
        raise CorruptFile(f"{name} has {field} that are no objects")
    return found


def _stages(name: str, fields: Mapping[str, Any]) -> StageLatencies:
    return tuple(latencies_of(name, stage) for stage in _list_of(name, fields, "stages"))


def _length(name: str, fields: Mapping[str, Any]) -> int | None:
    length = fields.get("length")
    if length is not None and (type(length) is not int or not 1 <= length <= _LARGEST_LENGTH):
        raise CorruptFile(f"{name} has a length of {str(length)[:40]}")
    return length


def _width(name: str, fields: Mapping[str, Any]) -> float | None:
    width = fields.get("width")  # files of earlier versions have none
    if width is None:
        return None
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 <= width <= 1:
        raise CorruptFile(f"{name} has a width of {str(width)[:40]}")
    return float(width)
