"""In a cgroup with a limit: what runs without the cache is not killed because of it.

Needs a kernel that lets this process make cgroups of its own, as root has it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PATIENCE_S, World, process_state, wait_until

MIB = 1 << 20
IMAGE_BYTES = 128 * MIB

JOIN = """
with open({cgroup!r} + '/cgroup.procs', 'w') as file:
    file.write(str(os.getpid()))
"""
WRITE_ALL = """
try:
    arena = open_file({path!r})
    served, weights = True, arena.buffer
except errors.NoSpace as error:
    served, weights = str(error), bytearray({size})
    open({path!r}, 'rb').readinto(weights)
view = memoryview(weights).cast('B')
for place in range(0, len(view), 4096):
    view[place] = 1
say(served)
"""


class Limited:
    """A cgroup, of either version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_v1 = (path / "memory.limit_in_bytes").exists()

    def limit(self, limit_bytes: int) -> None:
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.path / name).write_text(str(limit_bytes))

    def kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        text = (self.path / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def processes(self) -> list[int]:
        return [int(each) for each in (self.path / "cgroup.procs").read_text().split()]


@pytest.fixture
def limited() -> Iterator[Limited]:
    name = f"trims-test-{os.getpid()}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        is_memory = "memory" in controllers.split(",")
        if is_memory or number == "0":
            root = "/sys/fs/cgroup/memory" if is_memory else "/sys/fs/cgroup"
            path = Path(root + own) / name
            with contextlib.suppress(OSError):
                path.mkdir()
                if any((path / each).exists() for each in ("memory.limit_in_bytes", "memory.max")):
                    break
                path.rmdir()
    else:
        pytest.skip("this process may make no cgroup with a memory limit")
    cgroup = Limited(path)
    yield cgroup
    wait_until(lambda: not cgroup.processes(), "its processes have ended")
    deadline_s = time.monotonic() + PATIENCE_S
    while path.exists():
        with contextlib.suppress(OSError):  # Their memory is given back a moment later.
            path.rmdir()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_program_that_writes_all_weights_is_not_killed(world: World, limited: Limited) -> None:
    """Found: the image and the program's copy of it were too much for the limit."""
    path = world.sparse_file(IMAGE_BYTES)
    world.settings["host_bytes"] = "1G"
    script = JOIN.format(cgroup=str(limited.path))
    script += WRITE_ALL.format(path=path, size=IMAGE_BYTES)
    outcomes = []
    for limit_bytes in (208 * MIB, 256 * MIB, 448 * MIB):
        limited.limit(limit_bytes)
        outcomes.append(world.run(script))
        world.kill_daemon()
        wait_until(lambda: not limited.processes(), "its processes have ended")
    assert "lower TRIMS_HOST_HEADROOM_BYTES" in outcomes[0]
    assert "lower TRIMS_HOST_HEADROOM_BYTES" in outcomes[1]
    assert outcomes[2] is True
    assert limited.kills() == 0


def test_the_daemon_is_killed_before_the_program(world: World, limited: Limited) -> None:
    """A moment later its memory is free. Often, not always, that is soon enough for the program."""
    path = world.sparse_file(IMAGE_BYTES)
    world.settings["host_bytes"] = "1G"
    limited.limit(448 * MIB)
    script = (
        f"arena = open_file({path!r})\n"
        "say(cache().welcome().pid)\n"
        "held = bytearray(180 << 20)\n"  # beside the image, and what Python takes
        "view = memoryview(arena.buffer).cast('B')\n"
        "for place in range(0, len(view), 4096): view[place] = 1\n"
        "hear()\n"
    )
    program = world.spawn(JOIN.format(cgroup=str(limited.path)) + script)
    pid = program.hear()
    wait_until(lambda: process_state(pid) in ("", "Z"), "the daemon is gone")
    assert "ends" not in world.log()
    assert limited.kills() in (1, 2)
    program.kill()
