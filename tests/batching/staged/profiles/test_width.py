"""How wide a device is, is found from batches alone and beside each other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from benchmarks.staged_device import DeviceTime, StageDevice, demand_of_best_size
from trims_shim.batching.drivers.lanes import CpuLane
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.profiles.width import measure_width, width_of

SIZES = (1, 2, 4, 8, 16, 32, 64)
LINE = LatencyProfile.linear(1.0, 20.0, max_batch_size=64)


def beside(width: float, size: int) -> tuple[int, int]:
    """(alone, until two at once have ended) on a simulated device."""

    def demand(profile: LatencyProfile, size: int) -> float:
        return 1 - width * (1 - demand_of_best_size(profile, size))

    device = StageDevice(StagedProfile([LINE]), demand=demand)
    phases = device.cost(0, [Request(number, 0) for number in range(size)])
    ((alone_ns, _),) = phases
    time = DeviceTime[int]()
    for number in range(2):
        time.start(0, number, phases)
    time.end_next()
    both_ns = time.next_end_ns()
    return alone_ns, both_ns


@pytest.mark.parametrize("width", [0.0, 0.2, 0.5, 0.7, 1.0])
def test_what_is_simulated_is_found(width: float) -> None:
    measured = {size: beside(width, size) for size in SIZES}
    alone_ns = {size: alone for size, (alone, _) in measured.items()}
    both_ns = {size: both for size, (_, both) in measured.items()}
    assert width_of(alone_ns, both_ns) == pytest.approx(width, abs=0.01)


def test_noise_stays_within_bounds() -> None:
    alone_ns = {1: 20.0, 8: 40.0, 16: 60.0}
    assert width_of(alone_ns, dict.fromkeys(alone_ns, 1.0)) == 1
    assert width_of(alone_ns, dict.fromkeys(alone_ns, 1e9)) == 0


def test_where_every_batch_fills_the_device_there_is_no_width() -> None:
    assert width_of({1: 1.0, 8: 8.0}, {1: 1.0, 8: 8.0}) == 0


def test_who_does_not_notice_the_other_says_at_least_how_wide_it_is() -> None:
    """A batch that leaves nine tenths: had it left half, two would just have had room."""
    assert width_of({1: 100.0, 64: 640.0}, {1: 100.0}) == pytest.approx(0.5 / 0.9)


class Serial:
    """A device that does one thing at a time, and its clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_ns = 0

    def __call__(self, items: list[int]) -> list[int]:
        with self._lock:
            self._now_ns += 10 + len(items)
        return items

    def clock(self) -> int:
        return self._now_ns


def test_a_serial_device_is_measured_to_be_narrow() -> None:
    device = Serial()
    lanes = [CpuLane(), CpuLane()]
    width = measure_width(
        [device, device],
        lambda size: ([0] * size,),
        (1, 4, 16),
        lanes=lanes,
        clock=device.clock,
        repeats=2,
    )
    assert width == 0


def test_what_a_stage_raises_is_raised() -> None:
    """In whichever thread."""
    here = threading.current_thread()

    def elsewhere(items: Any) -> Any:
        if threading.current_thread() is not here:
            raise ValueError("elsewhere")
        return items

    lanes = [CpuLane(), CpuLane()]
    with pytest.raises(ValueError, match="elsewhere"):
        measure_width([elsewhere], lambda size: ([0] * size,), (1,), lanes=lanes, clock=lambda: 0)
