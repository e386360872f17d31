"""Which Python a client runs, by the word of the kernel, and on which processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import PATIENCE_S, wait_until

from trims_shim.daemon import clock
from trims_shim.daemon.prepared import interpreters
from trims_shim.daemon.prepared.interpreters import cpu_identity, interpreter_of, namespace_problem
from trims_shim.errors import NotServed


class TestInterpreter:
    def test_this_process(self) -> None:
        found = interpreter_of(os.getpid(), os.getuid())
        assert os.path.samefile(found, sys.executable)

    def test_another_user(self) -> None:
        with pytest.raises(NotServed) as caught:
            interpreter_of(os.getpid(), os.getuid() + 1)
        assert caught.value.reason == "other_user"

    @pytest.mark.parametrize(("pid", "reason"), [(0, "other_namespace"), (2**22 + 5, "other_user")])
    def test_a_process_that_cannot_be_seen(self, pid: int, reason: str) -> None:
        with pytest.raises(NotServed) as caught:
            interpreter_of(pid, os.getuid())
        assert caught.value.reason == reason

    def test_a_process_of_another_pid_namespace(self) -> None:
        """Found: people were told that there is no /proc/0/ns/mnt."""
        assert namespace_problem(0) == "the client is in another PID namespace (a container?)"

    def test_another_process_of_the_same_number(self) -> None:
        """Found: a client that had ended was taken for whichever process got its number."""
        connected_ns = clock.now_ns()
        assert namespace_problem(os.getpid(), connected_ns) == ""
        time.sleep(0.05)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            assert namespace_problem(child.pid, clock.now_ns()) == ""
            assert "another process" in namespace_problem(child.pid, connected_ns)
        finally:
            child.communicate(b"\n", PATIENCE_S)

    def test_another_program(self) -> None:
        child = subprocess.Popen(["sleep", "600"])
        try:
            wait_until(lambda: "sleep" in os.readlink(f"/proc/{child.pid}/exe"), "the program runs")
            with pytest.raises(NotServed) as caught:
                interpreter_of(child.pid, os.getuid())
            assert caught.value.reason == "not_python"
        finally:
            child.kill()
            child.wait(PATIENCE_S)

    def test_a_name_that_is_another_file_by_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be started in the place of the program that the client runs."""
        other = tmp_path / "python3"
        other.touch()
        monkeypatch.setattr(os, "readlink", lambda _: str(other))
        with pytest.raises(NotServed, match="was replaced") as caught:
            interpreter_of(os.getpid(), os.getuid())
        assert caught.value.reason == "not_python"

    def test_a_program_that_embeds_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ours, when it is the same version's library that it has loaded."""
        monkeypatch.setattr(interpreters, "_LIBRARY", "libc.so")
        child = subprocess.Popen(["sleep", "600"])
        try:
            wait_until(
                lambda: "libc.so" in Path(f"/proc/{child.pid}/maps").read_text(), "libc is there"
            )
            assert interpreter_of(child.pid, os.getuid()) == sys.executable
        finally:
            child.kill()
            child.wait(PATIENCE_S)

    def test_other_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of another mount namespace or root; making one needs rights that tests may lack."""
        same = interpreters._is_same
        monkeypatch.setattr(interpreters, "_is_same", lambda a, b: "ns/mnt" not in a and same(a, b))
        with pytest.raises(NotServed) as caught:
            interpreter_of(os.getpid(), os.getuid())
        assert caught.value.reason == "other_namespace"

    def test_a_program_that_was_replaced(self, tmp_path: Path) -> None:
        program = tmp_path / "python3"
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o700)
        child = subprocess.Popen([program, "600"])
        try:
            wait_until(
                lambda: str(program) == os.readlink(f"/proc/{child.pid}/exe"), "the program runs"
            )
            assert interpreter_of(child.pid, os.getuid()) == str(program)
            program.unlink()
            with pytest.raises(NotServed, match="replaced") as caught:
                interpreter_of(child.pid, os.getuid())
            assert caught.value.reason == "not_python"
        finally:
            child.kill()
            child.wait(PATIENCE_S)


class TestCpu:
    def test_it_is_the_same_twice(self) -> None:
        assert cpu_identity() == cpu_identity()
        assert os.uname().machine in cpu_identity()

    @pytest.mark.parametrize(
        ("line", "counts"),
        [
            ("model name\t: Another CPU\n", True),
            ("flags\t\t: fpu avx512f\n", True),
            ("Features\t: fp asimd sve\n", True),
            ("cpu MHz\t\t: 2000.1\n", False),
            ("bogomips\t: 4000\n", False),
            ("processor\t: 77\n", False),
        ],
    )
    def test_what_counts(
        self, line: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = cpu_identity()
        path = tmp_path / "cpuinfo"
        path.write_text(Path("/proc/cpuinfo").read_text() + line)
        real_open = open
        monkeypatch.setattr(
            interpreters, "open", lambda _, **rest: real_open(path, **rest), raising=False
        )
        assert (cpu_identity() != before) == counts
