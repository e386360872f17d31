"""The memory a process may use, and what is left of it, on machines that are made up."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable

import pytest

from trims_shim.memory.limits import available_bytes, memory_limit_bytes

V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"
RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MEMINFO = {"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   64 kB\nHugePages_Total: 0\n"}


def on(files: dict[str, str], function: Callable[[], int]) -> int:
    def fake_open(path: str, *_: object, **__: object) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", fake_open)
        return function()


class TestLimit:
    @pytest.mark.parametrize(
        "files", [{}, {"/proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "max\n"}]
    )
    def test_ram_without_cgroups(self, files: dict[str, str]) -> None:
        assert on(files, memory_limit_bytes) == RAM

    def test_the_tightest_of_version_2(self) -> None:
        files = {
            "/proc/self/cgroup": "0::/outer/inner\n",
            f"{V2}/outer/inner/memory.max": "9000\n",
            f"{V2}/outer/memory.max": "5000\n",
            f"{V2}/memory.max": "7000\n",
        }
        assert on(files, memory_limit_bytes) == 5000

    def test_where_processes_are_slowed_down(self) -> None:
        files = {
            "/proc/self/cgroup": "0::/a\n",
            f"{V2}/a/memory.max": "9000\n",
            f"{V2}/a/memory.high": "8000\n",
        }
        assert on(files, memory_limit_bytes) == 8000

    def test_at_the_root_of_a_container(self) -> None:
        files = {"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "4096\n"}
        assert on(files, memory_limit_bytes) == 4096

    def test_version_1(self) -> None:
        files = {
            "/proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/a\nnonsense\n",
            f"{V1}/a/memory.limit_in_bytes": "8192",
            f"{V1}/x/memory.limit_in_bytes": "1",
        }
        assert on(files, memory_limit_bytes) == 8192


class TestAvailable:
    def test_that_of_the_machine(self) -> None:
        assert on(MEMINFO, available_bytes) == 64 << 10

    def test_unknown_is_no_reason_to_refuse(self) -> None:
        assert on({}, available_bytes) > RAM

    def test_the_least_room_of_version_2(self) -> None:
        """The outer cgroup is larger and fuller. Its page cache can be had, its tmpfs cannot."""
        files = MEMINFO | {
            "/proc/self/cgroup": "0::/outer/inner\n",
            f"{V2}/outer/inner/memory.max": "30000\n",
            f"{V2}/outer/inner/memory.current": "10000\n",
            f"{V2}/outer/memory.max": "50000\n",
            f"{V2}/outer/memory.current": "49000\n",
            f"{V2}/outer/memory.stat": (
                "anon 9\nfile 9000\nshmem 3000\ninactive_anon 3000\nactive_anon 9\n"
                "inactive_file 2000\nactive_file 4000\n"
            ),
        }
        assert on(files, available_bytes) == 7000

    def test_version_1(self) -> None:
        """Totals include the cgroups below, as the usage does."""
        files = MEMINFO | {
            "/proc/self/cgroup": "4:memory:/a\n0::/\n",
            f"{V1}/a/memory.limit_in_bytes": "9000",
            f"{V1}/a/memory.usage_in_bytes": "8000",
            f"{V1}/a/memory.stat": (
                "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 30\n"
            ),
            f"{V1}/memory.limit_in_bytes": "9223372036854771712",
            f"{V1}/memory.usage_in_bytes": "9000",
        }
        assert on(files, available_bytes) == 1230

    def test_a_cgroup_beyond_its_limit(self) -> None:
        files = MEMINFO | {
            "/proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "4000\n",
            f"{V2}/memory.current": "5000\n",
        }
        assert on(files, available_bytes) == 0

    def test_what_a_cgroup_does_not_say_is_no_reason_to_refuse(self) -> None:
        files = MEMINFO | {"/proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "4000\n"}
        assert on(files, available_bytes) == 64 << 10
