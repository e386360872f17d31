"""What is measured before any request: medians, in the time that there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trims_shim.batching.profiles.profiling import measure, sizes_to_measure

MS = 1_000_000


class Machine:
    """A clock that moves when something runs."""

    def __init__(self, duration_ns: Callable[[int, int], int]) -> None:
        self.now_ns = 0
        self.ran: list[int] = []
        self._duration_ns = duration_ns

    def clock(self) -> int:
        return self.now_ns

    def run(self, size: int) -> None:
        self.now_ns += self._duration_ns(size, self.ran.count(size))
        self.ran.append(size)


def test_measuring_leaves_the_first_run_and_pauses_out() -> None:
    machine = Machine(lambda size, times: (100 if times in (0, 2) else size) * MS)
    found = measure(machine.run, [4, 1], repeats=3, clock=machine.clock)
    assert found == {1: MS, 4: 4 * MS}
    assert machine.ran == [1, 1, 4, 4, 1, 4, 1, 4]


def test_measuring_ends_in_time_with_what_there_is() -> None:
    machine = Machine(lambda size, times: size * MS)
    sizes = sizes_to_measure(64)
    found = measure(machine.run, sizes, clock=machine.clock, limit_ns=20 * MS)
    assert found == {1: MS, 2: 2 * MS, 4: 4 * MS, 8: 8 * MS}
    assert measure(machine.run, [8], clock=machine.clock, limit_ns=0) == {8: 8 * MS}


def test_an_error_of_the_function_ends_measuring() -> None:
    def run(size: int) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        measure(run, [1], clock=lambda: 0)


def test_sizes_to_measure() -> None:
    assert sizes_to_measure(1) == [1]
    assert sizes_to_measure(8) == [1, 2, 4, 8]
    assert sizes_to_measure(24) == [1, 2, 4, 8, 16, 24]
