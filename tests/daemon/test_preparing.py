"""The daemon's side of a preparer: whatever the process does, there is an answer and no trace."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401  first of all: it opens files of its own, which are no leak
import pytest
from blake3 import blake3
from harness import PATIENCE_S, process_name, process_state, wait_until
from onnx_models import perceptron, save
from prepare_requests import request

import trims_shim
from trims_shim import children
from trims_shim.daemon.prepared import preparing
from trims_shim.daemon.prepared.interpreters import interpreter_of
from trims_shim.daemon.prepared.preparing import Order, Preparer
from trims_shim.wire import frames
from trims_shim.wire.duties import PrepareReply, SourceHashed

DIGEST = "0" * 64
PRELUDE = f"""\
import os, signal, socket, sys, time
sys.path.insert(0, {str(Path(trims_shim.__file__).parents[1])!r})
from trims_shim.wire import frames, messages, duties
connection = socket.socket(fileno=int(sys.argv[-3]))
request = frames.receive(connection)
def say(message): frames.send(connection, message)
def hear(): return frames.receive(connection)
def write(*names):
    for name in names or ("model.onnx", "weights.bin"):
        open(os.path.join(request.directory, name), "w").close()
hashed = duties.SourceHashed({DIGEST!r})
"""


class Fakes:
    """Preparations by programs that are no preparer."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.preparers: list[Preparer] = []
        self.hashed: list[SourceHashed] = []

    def order(self, code: str = "", *, interpreter: str = "") -> Order:
        """For a model, by this code or the real preparer."""
        model = self.tmp_path / "model.onnx"
        if not model.exists():
            save(perceptron())(model)
        directory = self.tmp_path / "made"
        directory.mkdir(exist_ok=True)
        return Order(
            request(model, directory, source=os.open(model, os.O_RDONLY)),
            interpreter=interpreter or self.interpreter(code),
            search_path=tuple(sys.path),
        )

    def interpreter(self, code: str) -> str:
        script = self.tmp_path / "fake.py"
        script.write_text(PRELUDE + code)
        program = self.tmp_path / "python3"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {script} "$@"\n')
        program.chmod(0o700)
        return str(program)

    def preparer(self, timeout_s: float = 60.0, *, gives_way: bool = False) -> Preparer:
        self.preparers.append(Preparer(timeout_s=timeout_s, gives_way=gives_way))
        return self.preparers[-1]

    def run(
        self, code: str, *, timeout_s: float = 60.0, is_wanted: bool = True
    ) -> PrepareReply | None:
        """The answer to a program."""

        def decide(hashed: SourceHashed) -> bool:
            self.hashed.append(hashed)
            return is_wanted

        order = self.order(code)
        try:
            return self.preparer(timeout_s).run(order, decide)
        finally:
            os.close(order.request.source)

    def close(self) -> None:
        for each in self.preparers:
            assert not each._children
            each.close()


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(tmp_path)
    yield made
    made.close()


def yes(hashed: SourceHashed) -> bool:
    return True


class TestConversation:
    def test_a_model(self, fakes: Fakes, no_leak: None) -> None:
        code = (
            "say(hashed); assert hear() == duties.ContentWanted()\n"
            "write(); say(duties.PrepareReply(probe='p'))"
        )
        assert fakes.run(code) == PrepareReply(probe="p")
        assert fakes.hashed == [SourceHashed(DIGEST)]

    def test_the_request(self, fakes: Fakes) -> None:
        code = (
            "content = os.pread(request.source, 1 << 30, 0)\n"
            "from blake3 import blake3\n"
            "say(duties.SourceHashed(blake3(content).hexdigest()))\n"
            "hear(); say(duties.PrepareReply(reason='x', message=repr(request)))\n"
        )
        reply = fakes.run(code)
        assert reply is not None
        assert str(fakes.tmp_path / "made") in reply.message
        content = (fakes.tmp_path / "model.onnx").read_bytes()
        assert fakes.hashed == [SourceHashed(blake3(content).hexdigest())]

    def test_onnxruntime_is_not_told_what_the_daemon_was_told(
        self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ORT_DISABLE_FLASH_ATTENTION", "1")
        monkeypatch.setenv("TRIMS_OTHER", "1")
        code = (
            "found = [name for name in os.environ if name.startswith(('ORT_', 'TRIMS_O'))]\n"
            "say(duties.PrepareReply(reason='x', message=repr(sorted(found))))\n"
        )
        reply = fakes.run(code)
        assert reply is not None
        assert reply.message == "['ORT_DISABLE_TELEMETRY', 'TRIMS_OTHER']"

    def test_it_cannot_fill_the_disk(self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
        class Status:
            f_bavail, f_frsize = 1000, 1000

        monkeypatch.setattr(preparing.os, "statvfs", lambda _: Status)
        code = (
            "try:\n"
            "    with open(os.path.join(request.directory, 'weights.bin'), 'wb') as file:\n"
            "        file.write(bytes(1_000_000))\n"
            "except OSError as error:\n"
            "    size = os.stat(os.path.join(request.directory, 'weights.bin')).st_size\n"
            "    say(duties.PrepareReply(reason='x', message=f'{error.errno} {size}'))\n"
        )
        reply = fakes.run(code)
        assert reply is not None
        assert reply.message == f"{errno.EFBIG} 450000"

    def test_a_lower_limit_of_its_user_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[tuple[int, int]] = []

        def prlimit(pid: int, kind: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
            made.extend([] if limits is None else [limits])
            return 100, 200

        monkeypatch.setattr(preparing.resource, "prlimit", prlimit)
        preparing._limit_files(os.getpid(), str(tmp_path))
        assert made == [(200, 200)]

    def test_it_may_use_the_room_that_was_made_for_it(
        self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Status:
            f_bavail, f_frsize = 0, 1000

        def decide(hashed: SourceHashed) -> bool:
            Status.f_bavail = 1000
            return True

        monkeypatch.setattr(preparing.os, "statvfs", lambda _: Status)
        code = (
            "say(hashed); hear()\n"
            "with open(os.path.join(request.directory, 'weights.bin'), 'wb') as file:\n"
            "    file.write(bytes(400_000))\n"
            "say(duties.PrepareReply(reason='x', message='written'))\n"
        )
        order = fakes.order(code)
        reply = fakes.preparer().run(order, decide)
        os.close(order.request.source)
        assert reply is not None
        assert reply.message == "written"

    def test_one_that_is_not_wanted(self, fakes: Fakes) -> None:
        code = "say(hashed); hear(); time.sleep(600)"
        assert fakes.run(code, is_wanted=False) is None

    def test_a_reason(self, fakes: Fakes) -> None:
        code = "say(hashed); hear(); say(duties.PrepareReply('invalid_model', 'why', True))"
        assert fakes.run(code) == PrepareReply("invalid_model", "why", True)

    def test_a_reason_before_the_model_is_hashed(self, fakes: Fakes) -> None:
        code = "say(duties.PrepareReply('file_changed', is_lasting=False))"
        assert fakes.run(code) == PrepareReply("file_changed", is_lasting=False)
        assert fakes.hashed == []

    @pytest.mark.parametrize("kind", [KeyError, FileNotFoundError, TimeoutError])
    def test_what_decide_raises(self, fakes: Fakes, kind: type[Exception]) -> None:
        """It is not taken for what the preparer has done."""

        def decide(hashed: SourceHashed) -> bool:
            raise kind("decided")

        order = fakes.order("say(hashed); hear(); time.sleep(600)")
        with pytest.raises(kind, match="decided"):
            fakes.preparer().run(order, decide)
        os.close(order.request.source)

    def test_what_is_given_up_has_no_process(self, fakes: Fakes) -> None:
        """Though nobody goes on with it: the server of the model's file may be gone."""
        preparer = fakes.preparer()
        statuses: list[int] = []

        def decide(hashed: SourceHashed) -> bool:
            (child,) = preparer._children
            preparer.give_up()
            statuses.append(child.wait(PATIENCE_S))
            return False

        order = fakes.order("say(hashed); hear(); time.sleep(600)")
        assert preparer.run(order, decide) is None
        os.close(order.request.source)
        assert statuses == [-signal.SIGKILL]


class TestDistrust:
    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("", "preparer_died"),
            ("sys.exit(3)", "preparer_died"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", "preparer_died"),
            ("say(hashed); hear(); os.abort()", "preparer_died"),
            ("os.kill(os.getpid(), signal.SIGKILL)", "preparer_killed"),
            ("say(hashed); os._exit(1)", "preparer_died"),
            ("connection.send(b'\\1'); os._exit(1)", "preparer_confused"),
            ("connection.send(b'\\xff' * 100)", "preparer_confused"),
            ("say(messages.DrainRequest('x'))", "preparer_confused"),
            ("say(hashed); hear(); say(hashed)", "preparer_confused"),
            ("say(duties.SourceHashed('ABC'))", "preparer_confused"),
            ("say(duties.SourceHashed('../../x' * 9 + 'x'))", "preparer_confused"),
            ("say(duties.PrepareReply())", "preparer_confused"),
            ("write('model.onnx'); say(duties.PrepareReply())", "preparer_confused"),
            (
                "write('model.onnx'); os.symlink('/etc/passwd', request.directory + '/weights.bin')"
                "; say(duties.PrepareReply())",
                "preparer_confused",
            ),
            (
                "write(); os.link(request.directory + '/model.onnx', request.directory + '/kept')"
                "; say(duties.PrepareReply())",
                "preparer_confused",
            ),
            ("say(duties.PrepareReply('Not A Reason'))", "preparer_confused"),
            ("say(duties.PrepareReply('x' * 65))", "preparer_confused"),
        ],
    )
    def test_what_a_preparer_may_do(
        self, code: str, reason: str, fakes: Fakes, no_leak: None
    ) -> None:
        reply = fakes.run(code)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == (reason, False), reply
        assert reply.message

    @pytest.mark.parametrize(
        ("location", "path", "digest"),
        [
            ("", "/a", DIGEST),
            ("a", "", DIGEST),
            ("a", "relative", DIGEST),
            ("a", "/a", "digest"),
            ("a" * 4097, "/a", DIGEST),
            ("a\0", "/a", DIGEST),
        ],
    )
    def test_external_files(self, location: str, path: str, digest: str, fakes: Fakes) -> None:
        code = (
            "identity = messages.Identity(1, 2, 3, 4, 5)\n"
            f"external = duties.ExternalFile({location!r}, {path!r}, {digest!r}, identity)\n"
            "say(duties.SourceHashed(hashed.digest, (external,)))\n"
        )
        reply = fakes.run(code)
        assert reply is not None
        assert reply.reason == "preparer_confused"
        assert fakes.hashed == []

    def test_external_files_of_any_usable_name(self, fakes: Fakes) -> None:
        names = [("w", "/w"), ("w" * 4096, "/" + "w" * 4095)]
        code = (
            "identity = messages.Identity(1, 2, 3, 4, 5)\n"
            f"names = {names!r}\n"
            "files = [duties.ExternalFile(*each, hashed.digest, identity) for each in names]\n"
            "say(duties.SourceHashed(hashed.digest, tuple(files))); hear()\n"
            "write(); say(duties.PrepareReply())"
        )
        assert fakes.run(code) == PrepareReply()
        (hashed,) = fakes.hashed
        assert [(each.location, each.path) for each in hashed.externals] == names

    def test_texts_are_clipped(self, fakes: Fakes) -> None:
        reply = fakes.run("say(duties.PrepareReply('x', 'm' * 900000, probe='p' * 9000))")
        assert reply is not None
        assert (len(reply.message), len(reply.probe)) == (1000, 1000)

    @pytest.mark.parametrize(
        "code",
        [
            "time.sleep(600)",
            "say(hashed); hear(); time.sleep(600)",
            "connection.send(b'\\1'); time.sleep(600)",
        ],
    )
    def test_a_preparer_that_hangs(self, code: str, fakes: Fakes, no_leak: None) -> None:
        reply = fakes.run(code, timeout_s=1.5)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("preparer_stalled", False)

    def test_nothing_it_started_goes_on(self, fakes: Fakes) -> None:
        code = (
            "child = os.fork() or time.sleep(600)\n"
            "say(duties.PrepareReply('x', message=f'{os.getpid()} {child}'))\n"
            "time.sleep(600)\n"
        )
        reply = fakes.run(code)
        assert reply is not None
        for pid in map(int, reply.message.split()):
            wait_until(lambda pid=pid: process_state(pid) in ("", "Z"), f"{pid} is gone")

    def test_what_it_prints_goes_nowhere(self, fakes: Fakes, capfd: Any) -> None:
        fakes.run("print('hello', flush=True); say(duties.PrepareReply('x'))")
        assert capfd.readouterr().out == ""

    @pytest.mark.parametrize("interpreter", ["/nowhere/python", "/etc/passwd", "python\0"])
    def test_an_interpreter_that_cannot_be_started(
        self, interpreter: str, fakes: Fakes, no_leak: None
    ) -> None:
        order = fakes.order(interpreter=interpreter)
        reply = fakes.preparer().run(order, yes)
        os.close(order.request.source)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("preparer_not_started", False)

    def test_a_package_that_is_gone(
        self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, no_leak: None
    ) -> None:
        """Found: preparers died of it, and models that killed two of them were refused for good."""
        monkeypatch.setattr(preparing, "PACKAGE_DIRECTORY", "/nowhere/trims_shim")
        order = fakes.order()
        reply = fakes.preparer().run(order, yes)
        os.close(order.request.source)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("preparer_not_started", False)
        assert "/nowhere/trims_shim was removed under the daemon" in reply.message

    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("wire/messages.py", "PROTOCOL_VERSION"),
            ("daemon/prepared/key.py", "LAYOUT_VERSION"),
        ],
    )
    def test_another_version_that_was_installed_under_the_daemon(
        self, path: str, name: str, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Found: what a preparer of another layout made was published as one of the daemon's."""
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"{name} = 1000000\n")
        monkeypatch.setattr(children, "PACKAGE_DIRECTORY", str(tmp_path))
        order = fakes.order()
        reply = fakes.preparer().run(order, yes)
        os.close(order.request.source)
        assert reply is not None
        assert (reply.reason, reply.is_lasting) == ("preparer_not_started", False)
        assert "another trims_shim was installed under the daemon" in reply.message
        assert "run `trims stop`, or restart its service" in reply.message


class TestClose:
    def test_what_runs_is_ended(self, fakes: Fakes) -> None:
        preparer = fakes.preparer()
        order = fakes.order("say(hashed); hear(); time.sleep(600)")
        replies: list[PrepareReply | None] = []
        asked = threading.Event()

        def decide(hashed: SourceHashed) -> bool:
            asked.set()
            return True

        thread = threading.Thread(target=lambda: replies.append(preparer.run(order, decide)))
        thread.start()
        assert asked.wait(PATIENCE_S)
        preparer.close()
        thread.join(PATIENCE_S)
        os.close(order.request.source)
        assert [each.reason for each in replies if each is not None] == ["stopping"]

    def test_one_that_hangs_in_the_kernel_is_left_to_it(
        self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed: list[int] = []

        class Stuck:
            pid, returncode = 77, None

            def wait(self, timeout: float | None = None) -> int:
                assert timeout is not None, "the daemon could not end"
                raise subprocess.TimeoutExpired("preparer", timeout)

        monkeypatch.setattr(preparing.os, "killpg", lambda pid, _: killed.append(pid))
        preparer = fakes.preparer()
        preparer._end(Stuck())  # type: ignore[arg-type]
        assert killed == [77]

    def test_an_interpreter_whose_server_is_gone_is_not_waited_for(
        self, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: while a process was being started, the daemon could not end."""
        is_asked, answers, launch = threading.Event(), threading.Event(), preparing._launch

        def launch_late(*arguments: Any) -> subprocess.Popen[bytes]:
            is_asked.set()
            answers.wait(PATIENCE_S)
            return launch(*arguments)

        monkeypatch.setattr(preparing, "_launch", launch_late)
        preparer = fakes.preparer()
        order = fakes.order("time.sleep(600)")
        replies: list[PrepareReply | None] = []
        running = threading.Thread(target=lambda: replies.append(preparer.run(order, yes)))
        running.start()
        assert is_asked.wait(PATIENCE_S)
        closing = threading.Thread(target=preparer.close)
        closing.start()
        closing.join(PATIENCE_S / 2)
        is_closed = not closing.is_alive()
        answers.set()
        running.join(PATIENCE_S)
        closing.join(PATIENCE_S)
        os.close(order.request.source)
        assert is_closed
        assert [each.reason for each in replies if each is not None] == ["stopping"]

    def test_nothing_starts_any_more(self, fakes: Fakes) -> None:
        preparer = fakes.preparer()
        preparer.close()
        order = fakes.order("write('started')")
        reply = preparer.run(order, yes)
        os.close(order.request.source)
        assert reply is not None
        assert reply.reason == "stopping"
        assert os.listdir(order.request.directory) == []


class TestRealPreparer:
    def order(self, fakes: Fakes) -> Order:
        return fakes.order(interpreter=interpreter_of(os.getpid(), os.getuid()))

    def test_a_model(self, fakes: Fakes, no_leak: None) -> None:
        order = self.order(fakes)
        hashed: list[SourceHashed] = []
        reply = fakes.preparer().run(order, lambda each: not hashed.append(each))
        os.close(order.request.source)
        assert reply == PrepareReply(probe="equal")
        assert sorted(os.listdir(order.request.directory)) == ["model.onnx", "weights.bin"]
        content = (fakes.tmp_path / "model.onnx").read_bytes()
        assert hashed == [SourceHashed(blake3(content).hexdigest())]
        # Nobody but this user, whatever the umask.
        for name in os.listdir(order.request.directory):
            mode = os.stat(os.path.join(order.request.directory, name)).st_mode
            assert stat.S_IMODE(mode) == 0o400

    def test_how_it_runs(self, fakes: Fakes) -> None:
        """Behind everything else, with nothing of the daemon's but what it needs."""
        kept = os.open("/dev/null", os.O_RDONLY)
        os.set_inheritable(kept, True)
        order = self.order(fakes)
        preparer = fakes.preparer(gives_way=True)
        seen: dict[str, Any] = {}

        def look(hashed: SourceHashed) -> bool:
            (pid,) = (each.pid for each in preparer._children)
            assert pid is not None
            seen["name"] = process_name(pid)
            seen["nice"] = os.getpriority(os.PRIO_PROCESS, pid)
            seen["policy"] = os.sched_getscheduler(pid)
            seen["session"] = os.getsid(pid) == pid
            seen["oom"] = Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
            seen["cwd"] = os.readlink(f"/proc/{pid}/cwd")
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            seen["enabled"] = b"TRIMS_ENABLED=0" in environment
            links = [
                os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")
            ]
            seen["files"] = [each for each in links if each.startswith("/")]
            return False

        assert preparer.run(order, look) is None
        os.close(kept)
        os.close(order.request.source)
        files = seen.pop("files")
        assert files.count("/dev/null") == 2 + ("/dev/null" in os.readlink("/proc/self/fd/2"))
        assert order.request.path in files
        assert seen == {
            "name": "trims-preparer",
            "nice": 10,
            "policy": os.SCHED_BATCH,
            "session": True,
            "oom": "1000",
            "cwd": "/",
            "enabled": True,
        }

    def test_at_once(self, fakes: Fakes) -> None:
        """Not behind everything else, but still the first to be killed for memory."""
        order = self.order(fakes)
        preparer = fakes.preparer(gives_way=False)
        seen = []

        def look(hashed: SourceHashed) -> bool:
            (pid,) = (each.pid for each in preparer._children)
            assert pid is not None
            seen.append(os.sched_getscheduler(pid))
            seen.append(Path(f"/proc/{pid}/oom_score_adj").read_text().strip())
            return False

        preparer.run(order, look)
        os.close(order.request.source)
        assert seen == [os.sched_getscheduler(0), "1000"]

    def test_the_search_path_is_the_clients(self, fakes: Fakes) -> None:
        """Absolute directories of it; nothing is found by where the daemon is."""
        near, other = fakes.tmp_path / "near", fakes.tmp_path / "site"
        for site, status in ((near, 6), (other, 7)):
            site.mkdir()
            (site / "blake3.py").write_text(f"raise SystemExit({status})")
        order = self.order(fakes)
        search_path = (os.path.relpath(near, "/"), str(other), *order.search_path)
        changed = order._replace(search_path=search_path)
        reply = fakes.preparer().run(changed, yes)
        os.close(order.request.source)
        assert reply is not None
        assert (reply.reason, "status 7" in reply.message) == ("preparer_died", True)

    def test_it_ends_with_the_daemon(self, fakes: Fakes) -> None:
        """Also in the middle of its work."""
        order = self.order(fakes)
        ours, theirs = socket.socketpair()
        with theirs:
            child = preparing._launch(order, theirs.fileno(), ["0", "normal"])
        with ours:
            frames.send(ours, order.request)
            hashed = frames.receive(ours, deadline_s=time.monotonic() + 60)
            assert isinstance(hashed, SourceHashed)
        assert child.wait(60) == 0
        os.close(order.request.source)
