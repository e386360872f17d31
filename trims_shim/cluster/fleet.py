"""The devices of a cluster: what each runs, and when it may change. Pure.

::

    EMPTY ──► LOADING ──► READY          a placement wants a variant there; it has loaded
      ▲          │  ▲       │
      └──────────┘  └───────┘            its loader raised an error; another variant is wanted
            LOST ◄── any                 its process is gone, and comes back without a variant

A device that changes answers what it was given before, then loads; so nothing waits for it. The
last device that is ready for a family changes after all others, and stays so while another one is
loading for that family. For a variant that could not be loaded, one device at a time gives up what
it runs, and goes back to that at once if it still cannot.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trims_shim.planner import Option, Placement, assign

__all__ = ["Device", "Fleet", "Phase", "Rest"]

_NS_PER_S = 1_000_000_000
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
"""Between attempts to load: each pause is twice the one before."""
_LONGEST_REST_S = 600.0
"""Of a variant that could not be loaded, before it is planned for again: a device that then tries
it is without a variant meanwhile."""
_BATCHES_AHEAD = 2
"""Of the largest size: one that runs, and one that is formed meanwhile. All else waits where any
device can still take it."""


class Phase(enum.Enum):
    """What a device is doing."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Device:
    """One device, as far as is known."""

    number: int
    kind: str
    phase: Phase = Phase.EMPTY
    option: Option | None = None
    """What it runs, loads, or had before it became empty or was lost."""
    before: Option | None = None
    """What it gave up for a variant that could not be loaded before."""
    wanted: Option | None = None
    """What it is to run; None if it is not needed."""
    planned_qps: float = 0.0
    """Its share of the requests."""
    load: int = 0
    """The number of its last load, by which late news of loads before are told apart."""
    open: int = 0
    """Requests that it was given and has not answered."""
    is_away: bool = False
    """Lost, and not heard of since; it may be loading, for all that is known."""
    pause_s: float = 0.0
    """Before the next attempt to load; 0 after one that went well."""
    retry_ns: int = 0

    @property
    def coming(self) -> Option | None:
        """What it will run; one that is not needed keeps what it loads."""
        return self.wanted or (self.option if self.phase is Phase.LOADING else None)

    @property
    def has_room(self) -> bool:
        """Whether it may be given one more request."""
        assert self.option is not None
        return self.open < _BATCHES_AHEAD * self.option.profile.max_batch_size


@dataclass(frozen=True, slots=True)
class Rest:
    """Of a variant that could not be loaded: how long, and until when it is not planned for."""

    pause_s: float
    until_ns: int


class Fleet:
    """Devices are numbered in the order of ``kinds``, which names the kind of each."""

    def __init__(self, kinds: list[str]) -> None:
        self.devices = [Device(number, kind) for number, kind in enumerate(kinds)]
        self.loads = 0
        """How often a variant was loaded."""
        self.unloadable: dict[Option, Rest] = {}
        """Their loaders have raised errors, and no one has loaded since."""
        self._ready: dict[str, list[Device]] = {}

    @property
    def present(self) -> list[Device]:
        """Those that are not away."""
        return [device for device in self.devices if not device.is_away]

    @property
    def is_settled(self) -> bool:
        """Whether every device runs what the placement wants."""
        return all(
            each.wanted is None or (each.phase is Phase.READY and each.option == each.wanted)
            for each in self.devices
        )

    def ready(self, family: str) -> list[Device]:
        """The devices that can answer its requests."""
        return self._ready.get(family, [])

    def is_coming(self, family: str) -> bool:
        """Whether some device can answer its requests, or will when it has loaded."""
        return bool(self.ready(family)) or any(
            device.coming is not None and device.coming.family == family for device in self.devices
        )

    def to_plan(self, options: Sequence[Option], now_ns: int) -> list[Option]:
        """Those that do not rest; all of a family of which all do."""
        awake = {
            option
            for option in options
            if option not in self.unloadable or now_ns >= self.unloadable[option].until_ns
        }
        families = {option.family for option in awake}
        return [each for each in options if each in awake or each.family not in families]

    def place(
        self,
        placement: Placement,
        is_warm: Callable[[Device, Option], bool] = lambda device, option: False,
    ) -> None:
        """Have this placement from now on, on the devices that are present.

        Others are to come back as they were. Raises ValueError if there are too few.
        """
        devices = self.present
        shares = {group.option: group.device_qps for group in placement.groups}
        chosen = assign(
            placement,
            [device.kind for device in devices],
            [device.option for device in devices],
            is_warm=lambda index, option: is_warm(devices[index], option),
        )
        for device in self.devices:
            device.wanted, device.planned_qps = device.option, 0.0
        for device, option in zip(devices, chosen, strict=True):
            device.wanted = option
            device.planned_qps = 0.0 if option is None else shares[option]

    def begin_loads(self, now_ns: int) -> Iterator[Device]:
        """Yield the devices that load from now on what is their ``option`` then."""
        while due := [device for device in self.devices if self._may_load(device, now_ns)]:
            device = min(due, key=self._is_last)
            is_trying = device.phase is Phase.READY and device.wanted in self.unloadable
            device.before = device.option if is_trying else None
            device.option = device.wanted
            device.load += 1
            self.loads += 1
            self._enter(device, Phase.LOADING)
            yield device

    def loaded(self, device: Device, load: int) -> None:
        """The device has done its load of this number."""
        if self._is_current(device, load):
            assert device.option is not None
            device.pause_s, device.is_away = 0.0, False
            self.unloadable.pop(device.option, None)
            self._enter(device, Phase.READY)

    def failed(self, device: Device, load: int, now_ns: int) -> None:
        """The loader has raised an error. It is tried again after a pause."""
        if self._is_current(device, load):
            assert device.option is not None
            self._rest(device.option, now_ns)
            device.is_away = False
            self._pause(device, now_ns)
            if device.before is not None and device.wanted == device.option:
                device.wanted, device.retry_ns = device.before, now_ns
            self._enter(device, Phase.EMPTY)

    def lost(self, device: Device, load: int, now_ns: int) -> None:
        """The device's process is gone, or has no variant as if it were new."""
        if device.load == load and device.phase in (Phase.LOADING, Phase.READY):
            device.is_away = True
            device.wanted = device.wanted or device.option  # else it would be away for ever
            self._pause(device, now_ns)
            self._enter(device, Phase.LOST)

    def next_retry_ns(self) -> int | None:
        """When to call :meth:`begin_loads` next if nothing happens before."""
        return min(
            (
                device.retry_ns
                for device in self.devices
                if device.phase in (Phase.EMPTY, Phase.LOST) and device.wanted is not None
            ),
            default=None,
        )

    def _may_load(self, device: Device, now_ns: int) -> bool:
        if device.wanted is None or device.phase is Phase.LOADING:
            return False
        if device.phase is Phase.READY:
            may_change = device.wanted != device.option and self._may_try(device, now_ns)
            return may_change and not self._has_to_stay(device)
        return now_ns >= device.retry_ns

    def _may_try(self, device: Device, now_ns: int) -> bool:
        """Whether it may give up what it runs for what is wanted, which may not load."""
        if device.wanted not in self.unloadable:
            return True
        return now_ns >= self.unloadable[device.wanted].until_ns and not any(
            each.phase is not Phase.READY and each.wanted == device.wanted for each in self.present
        )

    def _has_to_stay(self, device: Device) -> bool:
        """Whether it is the last one that is ready for its family, and another will be soon."""
        return self._is_last(device) and any(
            each.phase is Phase.LOADING and _family(each) == _family(device)
            for each in self.present
        )

    def _is_last(self, device: Device) -> bool:
        """Whether no other device is ready for its family."""
        return self.ready(_family(device)) == [device]

    def _is_current(self, device: Device, load: int) -> bool:
        return device.phase is Phase.LOADING and device.load == load

    def _pause(self, device: Device, now_ns: int) -> None:
        device.pause_s = min(_LONGEST_PAUSE_S, 2 * device.pause_s or _FIRST_PAUSE_S)
        device.retry_ns = now_ns + round(device.pause_s * _NS_PER_S)

    def _rest(self, option: Option, now_ns: int) -> None:
        rest = self.unloadable.get(option, Rest(0.0, now_ns))
        if now_ns >= rest.until_ns:  # else several devices have failed at once
            pause_s = min(_LONGEST_REST_S, 2 * rest.pause_s or _FIRST_PAUSE_S)
            self.unloadable[option] = Rest(pause_s, now_ns + round(pause_s * _NS_PER_S))

    def _enter(self, device: Device, phase: Phase) -> None:
        device.phase = phase
        self._ready = {}
        for each in self.devices:
            if each.phase is Phase.READY:
                self._ready.setdefault(_family(each), []).append(each)


def _family(device: Device) -> str:
    return "" if device.option is None else device.option.family
