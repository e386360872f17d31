"""Workers are there, and their end is seen, wherever the program runs and whatever it forks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batching.test_interrupts import interrupted
from tests.ensemble import members
from tests.ensemble.members import by, ensemble_of
from tests.ensemble.test_ensemble import PATIENCE_S, ROWS, is_running, wait_until
from trims_shim.ensemble import Ensemble, Member, hosting, messages, system
from trims_shim.ensemble.channel import Channel
from trims_shim.errors import EnsembleError, MemberFailed

# --- descriptors and processes --------------------------------------------------------------------


def test_contents_come_whole_or_not_at_all() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    contents = [memoryview(bytes(size)) for size in (3, 0, 5_000_000)]
    sending = threading.Thread(target=ours.send_contents, args=(contents,))
    sending.start()
    assert theirs.receive_contents([3, 0, 5_000_000]) == contents
    sending.join(PATIENCE_S)
    ours.send_contents([memoryview(b"abc")])
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive_contents([4])
    theirs.close()


def test_a_worker_without_descriptors_ends_and_says_so() -> None:
    ensemble = ensemble_of(members.without_descriptors, restarts=0)
    with ensemble, pytest.raises(MemberFailed, match="ended with status 1"):
        ensemble.submit(ROWS[:8]).result(PATIENCE_S)


def test_a_worker_whose_program_ends_amid_a_message_ends_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    load = hosting.pickled(by(members.times, 1.0), "a")
    process = hosting.WorkerProcess(hosting.set_up(member="a", device="cpu", load=load))
    assert isinstance(process.channel.connection.recv(), messages.Ready)
    process._send(messages.OpenBuffer(1))
    assert process.death() == "ended with status 0"
    assert capfd.readouterr().err == ""


def test_a_worker_whose_program_ends_before_it_says_anything_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    load = hosting.pickled(by(members.times, 1.0), "a")
    monkeypatch.setattr(hosting.WorkerProcess, "_send", lambda self, message: None)
    monkeypatch.setattr(hosting, "_MOMENT_S", PATIENCE_S)  # it has to start before it can end
    process = hosting.WorkerProcess(hosting.set_up(member="a", device="cpu", load=load))
    assert process.death() == "ended with status 0"
    assert capfd.readouterr().err == ""


def test_a_worker_whose_program_ends_before_it_can_answer_ends_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(MemberFailed, match="ended with status 0"):
        ensemble_of(members.without_listener, restarts=0)
    assert capfd.readouterr().err == ""


def test_a_worker_that_has_only_closed_its_socket_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "_MOMENT_S", 0.05)
    load = hosting.pickled(by(members.times, 1.0), "a")
    process = hosting.WorkerProcess(hosting.set_up(member="a", device="cpu", load=load))
    os.kill(process.pid, signal.SIGSTOP)
    assert process.death() == "closed its socket"
    assert not is_running(process.pid)


def test_a_worker_that_cannot_be_told_something_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, failures = Channel.send_descriptor, [OSError(errno.ENOMEM, "no memory")]

    def failing(channel: Channel, descriptor: int) -> None:
        if failures:
            raise failures.pop()
        send(channel, descriptor)

    monkeypatch.setattr(Channel, "send_descriptor", failing)
    with ensemble_of(by(members.times, 2.0)) as ensemble:
        assert np.array_equal(ensemble.submit(ROWS).result(PATIENCE_S), ROWS * 2)
        assert ensemble.stats().restarts == 1


def test_a_worker_that_cannot_be_listened_to_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: where the user had no epoll watch left, callers waited for it for ever."""
    processes: list[subprocess.Popen[bytes]] = []
    start = hosting._started

    def noted(*arguments: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*arguments))
        return processes[-1]

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hosting, "_started", noted)
    with ensemble_of(by(members.times, 2.0)) as ensemble:
        monkeypatch.setattr(selectors.DefaultSelector, "register", refuse)
        processes[0].kill()
        with pytest.raises(MemberFailed, match="signal 9"):
            ensemble.submit(ROWS).result(PATIENCE_S)
        assert [each.poll() is None for each in processes] == [False, False]


def test_a_worker_is_given_each_shared_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = Channel.send_descriptor, list[int]()

    def noted(channel: Channel, descriptor: int) -> None:
        sent.append(descriptor)
        send(channel, descriptor)

    monkeypatch.setattr(Channel, "send_descriptor", noted)
    with ensemble_of(by(members.times, 2.0), max_segments=2) as ensemble:
        for _ in range(3):
            ensemble.predict(ROWS)
        assert len(sent) <= 2


@pytest.fixture
def default_timeout() -> Iterator[None]:
    socket.setdefaulttimeout(5.0)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_the_programs_own_timeout_of_sockets_is_not_for_workers() -> None:
    with ensemble_of(by(members.times, 2.0), restarts=0) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)


@pytest.mark.usefixtures("no_leak")
def test_workers_end_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = hosting._started

    def noted(*arguments: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        started.append(process.pid)
        return process

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hosting, "_started", noted)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        ensemble_of(by(members.times, 1.0))
    assert started
    assert not any(map(is_running, started))


def test_a_member_that_cannot_be_loaded_is_not_waited_for(tmp_path: Path) -> None:
    mark = tmp_path / "late"
    with pytest.raises(MemberFailed, match="OSError: there are no weights"):
        ensemble_of(by(members.unloadable_with_a_thread, str(mark)))
    assert not mark.exists()


def test_ctrl_c_while_a_worker_starts_is_for_the_program_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = hosting._started

    def interrupted(*arguments: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(hosting, "_started", interrupted)
    with ensemble_of(by(members.times, 2.0), restarts=0) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)
        (worker,) = ensemble.stats().workers
        status = Path(f"/proc/{worker.pid}/status").read_text()
        (blocked,) = [line.split()[1] for line in status.splitlines() if "SigBlk" in line]
        assert not int(blocked, 16), "what it starts gets Ctrl-C as always"


def test_ctrl_c_that_the_program_had_blocked_stays_so() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with ensemble_of(by(members.times, 1.0)):
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dying", [members.dying_with_a_child, members.dying_with_a_command])
def test_a_dead_worker_is_seen_though_its_child_lives(tmp_path: Path, dying: Any) -> None:
    load = by(dying, 7.0, str(tmp_path))
    with ensemble_of(load) as ensemble:
        try:
            assert np.array_equal(ensemble.submit(ROWS).result(PATIENCE_S), ROWS)
        finally:
            (tmp_path / "end").touch()


@pytest.mark.parametrize("wait", [True, False])
def test_a_workers_own_pool_ends_with_it(wait: bool) -> None:
    ensemble = ensemble_of(members.with_a_pool, combine="none")
    pid = ensemble.submit([1]).result(PATIENCE_S)["a"][0]
    ensemble.close(wait=wait)
    try:
        wait_until(lambda: not is_running(pid))
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def test_a_dead_worker_is_seen_though_the_program_forked_while_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, proceed = os.pipe()
    start = hosting._started
    children: list[int] = []

    def forking(*arguments: Any) -> Any:
        children.append(os.fork())
        if children[-1] == 0:
            os.close(proceed)
            os.read(ready, 1)
            os._exit(0)
        return start(*arguments)

    monkeypatch.setattr(hosting, "_started", forking)
    ensemble = ensemble_of(by(members.dying_at, 7.0, str(tmp_path), 1), restarts=0)
    monkeypatch.undo()
    with pytest.raises(MemberFailed, match="signal 9"):
        ensemble.submit(ROWS).result(PATIENCE_S)
    ensemble.close()
    os.close(proceed)
    os.close(ready)
    for child in children:
        os.waitpid(child, 0)


@pytest.mark.parametrize("where", [(socket, "socketpair"), (subprocess.Popen, "_execute_child")])
def test_forks_of_other_threads_wait_while_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """Found: the program waited for the end of a child that was forked at the wrong moment, to
    start the worker, or to see its end.
    """
    do = getattr(*where)
    forked = threading.Event()
    has_forked: list[bool] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        forked.set()
        os.waitpid(child, 0)

    forker = threading.Thread(target=fork)

    def forking(*arguments: Any) -> Any:
        forker.start()
        found = do(*arguments)
        has_forked.append(forked.wait(0.2))
        return found

    load = hosting.pickled(by(members.times, 1.0), "a")
    monkeypatch.setattr(*where, forking)
    process = hosting.WorkerProcess(hosting.set_up(member="a", device="cpu", load=load))
    forker.join(PATIENCE_S)
    hosting.end_all([process])
    assert has_forked == [False]
    assert forked.is_set()


def test_a_forked_child_is_refused_whatever_other_threads_held() -> None:
    with ensemble_of(by(members.times, 1.0)) as ensemble:
        held, proceed = threading.Event(), threading.Event()

        def hold() -> None:
            with ensemble._system._lock:
                held.set()
                proceed.wait(PATIENCE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(PATIENCE_S)
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE_S))
            try:
                ensemble.stats()
            except EnsembleError:
                os._exit(17)
            os._exit(1)
        proceed.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17


def test_a_child_that_is_forked_as_samples_are_sent_may_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: one of a signal handler's; it told its parent's thread to end the ensemble."""
    send, parent, children = system.System._send_jobs, os.getpid(), []

    def fork_and_send(self: system.System) -> None:
        monkeypatch.undo()
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(int(PATIENCE_S))
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) == 7
        send(self)

    with ensemble_of(by(members.times, 2.0)) as ensemble:
        monkeypatch.setattr(system.System, "_send_jobs", fork_and_send)
        try:
            answer = ensemble.submit(ROWS).result(PATIENCE_S)
        except SystemExit as end:
            os._exit(end.code)  # type: ignore[arg-type]
        finally:
            if os.getpid() != parent:
                os._exit(1)
        assert np.array_equal(answer, ROWS * 2)
    assert children


# --- closing --------------------------------------------------------------------------------------


def test_closing_does_not_wait_for_a_worker_that_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "_PATIENCE_S", 0.1)
    ensemble = ensemble_of(members.stopping_as_it_answers)
    future = ensemble.submit(ROWS[:8])
    (worker,) = ensemble.stats().workers
    wait_until(lambda: state_of(worker.pid) == "T")
    closing = threading.Thread(target=ensemble.close, kwargs={"wait": False}, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    with pytest.raises(EnsembleError, match="closed"):
        future.result(0)
    assert ensemble.stats().restarts == 0


def test_closing_does_not_wait_for_a_worker_that_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where each of many arrays lies is more than its socket has room for.

    Found: at times callers heard that the worker had died, "(memory?)".
    """
    monkeypatch.setattr(system, "_PATIENCE_S", 0.1)
    ensemble = ensemble_of(by(members.times, 1.0), restarts=0)
    (worker,) = ensemble.stats().workers
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    future = ensemble.submit(ROWS[:8])
    samples = [[ROWS.copy() for _ in range(5000)] for _ in range(8)]
    asking = threading.Thread(target=ensemble.submit, args=(samples,), daemon=True)
    asking.start()
    wait_until(lambda: is_held(ensemble._system._lock))
    crew = ensemble._system._crew
    kill = crew.kill

    def noticed() -> None:
        kill()
        wait_until(lambda: crew.places[0].process is None)

    monkeypatch.setattr(crew, "kill", noticed)
    closing = threading.Thread(target=ensemble.close, kwargs={"wait": False}, daemon=True)
    try:
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        with pytest.raises(EnsembleError, match="closed"):
            future.result(0)
    finally:
        with contextlib.suppress(ProcessLookupError):  # as it should
            os.kill(worker.pid, signal.SIGCONT)


def test_closing_does_not_wait_for_a_callback_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: nor did the program end, as with a callback that puts into a full queue."""
    monkeypatch.setattr(system, "_PATIENCE_S", 0.1)
    ensemble = ensemble_of(by(members.times, 1.0))
    (worker,) = ensemble.stats().workers
    thread, is_called, may_end = ensemble._system._thread, threading.Event(), threading.Event()
    join, waits = thread.join, []

    def joined(timeout: float | None = None) -> None:
        waits.append(timeout)
        join(timeout)

    monkeypatch.setattr(thread, "join", joined)

    def wait(future: object) -> None:
        is_called.set()
        may_end.wait(PATIENCE_S)

    ensemble.submit(ROWS[:8]).add_done_callback(wait)
    assert is_called.wait(PATIENCE_S)
    closing = threading.Thread(target=ensemble.close, kwargs={"wait": False}, daemon=True)
    try:
        closing.start()
        closing.join(PATIENCE_S / 2)
        assert not closing.is_alive()
        assert waits == [0.1, 0.1]
    finally:
        may_end.set()
    join(PATIENCE_S)
    assert not Path(f"/proc/{worker.pid}").exists()


def is_held(lock: Any) -> bool:
    """For longer than it takes to send what there is room for."""
    is_free = lock.acquire(timeout=1.0)
    if is_free:
        lock.release()
    return not is_free


def state_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_all_workers_have_one_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = hosting.WorkerProcess._has_ended
    given: list[float] = []

    def noted(process: hosting.WorkerProcess, patience_s: float) -> bool:
        given.append(patience_s)
        return ended(process, 0.0)

    with ensemble_of(by(members.times, 1.0), by(members.times, 1.0)):
        monkeypatch.setattr(hosting.WorkerProcess, "_has_ended", noted)
    first, second = given
    assert second < first <= 5


def test_a_callback_that_closes_the_ensemble_is_told_so(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with ensemble_of(by(members.waiting_for, str(go)), segment_size=8) as ensemble:
        caught: list[BaseException] = []

        def close(_: Any) -> None:
            try:
                ensemble.close()
            except EnsembleError as error:
                caught.append(error)

        first, second = ensemble.submit(ROWS[:8]), ensemble.submit(ROWS[:8])
        first.add_done_callback(close)
        go.touch()
        assert np.array_equal(second.result(PATIENCE_S), ROWS[:8])
        assert "closed from its own thread" in str(caught[0])


def test_a_signal_handler_in_the_middle_of_a_call_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ensemble = ensemble_of(by(members.times, 1.0))
    send, caught = system.System._send_jobs, []

    def handle_and_send(self: system.System) -> None:
        monkeypatch.undo()
        for use in (lambda: ensemble.predict(ROWS), ensemble.close):
            with pytest.raises(EnsembleError, match="by a signal handler"):
                use()
        ensemble.close(wait=False)
        send(self)

    def call() -> None:
        with pytest.raises(EnsembleError, match="the ensemble is closed") as error:
            ensemble.predict(ROWS[:8])
        caught.append(error)

    monkeypatch.setattr(system.System, "_send_jobs", handle_and_send)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert caught
    ensemble.close()
    assert not ensemble._system._thread.is_alive()


def test_what_is_raised_again_and_again_keeps_no_samples() -> None:
    ensemble = ensemble_of(by(members.times, 1.0))
    ensemble.close()
    lengths = []
    for _ in range(3):
        with pytest.raises(EnsembleError, match="closed") as caught:
            ensemble.predict(ROWS)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_an_interrupt_among_messages_ends_the_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    with ensemble_of(by(members.times, 1.0)) as ensemble:

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(hosting.WorkerProcess, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ensemble.submit(ROWS)
        with pytest.raises(EnsembleError, match="was interrupted while it sent samples"):
            ensemble.submit(ROWS).result(PATIENCE_S)


def test_an_interrupt_before_samples_are_sent_keeps_nobody_else_waiting() -> None:
    with ensemble_of(by(members.times, 2.0), max_segments=1) as ensemble:
        place: str | None = ""
        for step in itertools.count():
            place = interrupted(step, lambda: ensemble.submit(ROWS[:8]))
            found: list[Any] = []
            other = threading.Thread(
                target=lambda found: found.append(ensemble.predict(ROWS[:8])),
                args=(found,),
                daemon=True,
            )
            other.start()
            other.join(PATIENCE_S)
            assert np.array_equal(found, [ROWS[:8] * 2]), place
            if place is None or "buffers.py" in place:
                break
        assert place is not None
        assert step > 10


# --- programs -------------------------------------------------------------------------------------


def test_a_worker_is_started_again_where_the_first_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").touch()
    (tmp_path / "marks").mkdir()
    monkeypatch.chdir(tmp_path)
    load = by(members.relative, "weights", 7.0, str(tmp_path / "marks"))
    with ensemble_of(load) as ensemble:
        monkeypatch.chdir("/")
        assert np.array_equal(ensemble.predict(ROWS), ROWS)
        assert ensemble.stats().restarts == 1


def test_a_frozen_program_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(EnsembleError, match="is no Python and cannot start workers"):
        Ensemble([Member("a", members.row_sums)], devices=["cpu"])


PROGRAM = """
import multiprocessing
import numpy as np
from trims_shim.ensemble import Ensemble, Member

def load(device):
    return lambda batch: batch * 2

def main():
    with Ensemble([Member("a", load)], devices=["cpu"]) as ensemble:
        print(ensemble.predict(np.ones(3)).tolist(), flush=True)

if __name__ == '__main__':
    {main}
"""


def ran(arguments: list[str], cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=text,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_workers_import_nothing_that_lies_around(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    path = tmp_path / "program" / "program.py"
    path.write_text(PROGRAM.format(main="main()"))
    for name in ("json", "importlib", "trims_shim"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('a wrong {name}')")
    done = ran([str(path)], tmp_path)
    assert (done.stdout, done.stderr) == ("[2.0, 2.0, 2.0]\n", "")


def test_processes_that_multiprocessing_spawned_may_have_ensembles(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    start = """
    process = multiprocessing.get_context("spawn").Process(target=main)
    process.start()
    process.join()
    """
    path.write_text(PROGRAM.format(main=textwrap.dedent(start).strip().replace("\n", "\n    ")))
    done = ran([str(path)], tmp_path)
    assert (done.stdout, done.stderr) == ("[2.0, 2.0, 2.0]\n", "")


@pytest.mark.parametrize("way", ["package", "input", "command"])
def test_load_functions_that_workers_cannot_find(tmp_path: Path, way: str) -> None:
    text = PROGRAM.format(main="main()")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(text)
    arguments = {"package": ["-m", "package"], "input": ["-"], "command": ["-c", text]}[way]
    done = ran(arguments, tmp_path, text)
    assert "'a' is defined in a session, on a command line or in a package's" in done.stderr


def test_a_program_that_is_run_as_a_module_may_import_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "factors.py").write_text("FACTOR = 2\n")
    text = PROGRAM.format(main="main()").replace("batch * 2", "batch * FACTOR")
    (package / "program.py").write_text(f"from .factors import FACTOR\n{text}")
    done = ran(["-m", "package.program"], tmp_path)
    assert (done.stdout, done.stderr) == ("[2.0, 2.0, 2.0]\n", "")


def test_load_functions_may_start_processes() -> None:
    with ensemble_of(members.spawning) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS)


TELLING = """
import os, sys
from pathlib import Path
import numpy as np
from trims_shim.ensemble import Ensemble, Member

def load(device):
    print("loaded", sys.argv[1:], sys.stdin.read(), __debug__)

    def answer(batch):
        print("called", end="")
        if not os.path.exists("mark"):
            Path("mark").touch()
            os.kill(os.getpid(), 9)
        return batch * 2

    return answer

def main():
    sys.path.append(3)  # Python passes over it
    with Ensemble([Member("a", load)], devices=["cpu"]) as ensemble:
        os.chdir("/")
        print(ensemble.predict(np.ones(3)).tolist(), sys.stdin.read())

if __name__ == "__main__":
    main()
"""
TOLD = ["loaded ['word']  False", "called" + "loaded ['word']  False", "called[2.0, 2.0, 2.0] text"]


@pytest.mark.parametrize("way", [["program.py"], ["-c", "import program; program.main()"]])
def test_workers_have_the_words_options_and_path_of_the_program_and_not_its_input(
    tmp_path: Path, way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where modules are found in the current directory, and the program leaves that. What a
    worker has printed is there, although it was killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "program.py").write_text(TELLING)
    done = ran(["-O", *way, "word"], tmp_path, "text")
    assert done.stdout.splitlines() == TOLD, done.stderr


@pytest.mark.usefixtures("no_leak")
def test_where_not_all_workers_can_be_started_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    start = hosting._started
    started: list[int] = []

    def second_refused(*arguments: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, "no more processes")
        process = start(*arguments)
        started.append(process.pid)
        return process

    monkeypatch.setattr(hosting, "_started", second_refused)
    with pytest.raises(OSError, match="no more processes"):
        ensemble_of(by(members.times, 1.0), by(members.times, 1.0))
    assert not is_running(started[0])


def test_workers_import_the_main_module_only_for_functions_in_it(tmp_path: Path) -> None:
    own = "def load(device):\n    return lambda batch: batch * 2\n"
    (tmp_path / "loads.py").write_text(own)
    program = PROGRAM.format(main="main()")
    path = tmp_path / "program.py"
    for text, times in ((program, 2), (program.replace(own, "from loads import load\n"), 1)):
        path.write_text(f"print('imported', flush=True)\n{text}")
        done = ran([str(path)], tmp_path)
        assert done.stdout == "imported\n" * times + "[2.0, 2.0, 2.0]\n", done.stderr
