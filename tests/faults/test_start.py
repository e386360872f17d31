"""Starting, stopping and replacing the daemon: exactly one, always, and no file is in the way."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import LARGE_BYTES, World, content, process_state, raw_connection, wait_until

from trims_shim.daemon import background
from trims_shim.daemon import main as daemon_main
from trims_shim.errors import ConfigError, DaemonUnavailable, IncompatibleDaemon
from trims_shim.wire import admin, codec, endpoint, messages

CROWD = """
path, number = {path!r}, {number}
right = open(path, 'rb').read()
os.mkfifo(path + '.gate')
# The crowd is forked from one process that has imported everything and connected to nothing.
reader, writer = os.pipe()
go_reader, go_writer = os.pipe()
for n in range(number):
    if os.fork() == 0:
        os.close(go_writer)
        os.read(go_reader, 1)
        try:
            arena = open_file(path)
            word = f'{{cache().welcome().pid}} {{data(arena) == right}}'
        except BaseException as error:
            word = f'0 {{type(error).__name__}}:{{error}}'
        os.write(writer, (word + '\\n').encode())
        os._exit(0)
os.close(go_reader); os.close(go_writer); os.close(writer)
text = b''
while chunk := os.read(reader, 65536): text += chunk
for n in range(number): os.wait()
say(text.decode().splitlines())
"""


@pytest.mark.slow
def test_two_hundred_starts_at_once_give_one_daemon(make_world: Any) -> None:
    world = make_world(start_timeout="60", stall_timeout="60")
    path = world.file(1, 1 << 16)
    words = world.run(CROWD.format(path=path, number=200), timeout_s=120)
    assert len(words) == 200
    assert {word.partition(" ")[2] for word in words} == {"True"}, world.log()
    assert len({word.partition(" ")[0] for word in words}) == 1
    wait_until(lambda: world.processes() == [world.pid()], "all others have ended")
    assert world.log().count(" serves ") == 1


def test_forty_starts_over_what_a_killed_daemon_left(running: World) -> None:
    """Stale sockets and locks: replaced by exactly one new daemon."""
    world = running
    path = world.file(1, 1 << 16)
    old = world.kill_daemon()
    assert os.path.exists(os.path.join(world.sockets, "handover.sock"))
    words = world.run(CROWD.format(path=path, number=40), timeout_s=120)
    assert {word.partition(" ")[2] for word in words} == {"True"}
    pids = {int(word.partition(" ")[0]) for word in words}
    assert len(pids) == 1
    assert old not in pids
    wait_until(lambda: world.processes() == list(pids), "all others have ended")
    names = os.listdir(world.sockets)
    assert sum(name.startswith("control-") for name in names) == 1
    assert sum(name.startswith("events-") for name in names) == 1


def test_starts_of_daemons_by_hand_leave_one(world: World) -> None:
    """`trims daemon` six times at once: one serves, the others say that they lost and succeed."""
    script = "from trims_shim.daemon.main import run\nsys.exit(run())\n"
    children = [world.spawn(script) for _ in range(6)]
    wait_until(world.is_answering, "a daemon")
    pid = world.pid()
    for child in children:
        if child.pid != pid:
            assert child.wait() == 0
    wait_until(lambda: world.processes() == [pid], "all others have ended")


def test_the_daemon_is_killed_before_programs_when_memory_runs_out(world: World) -> None:
    """But not the one that somebody has started as a service, with a score of their choice."""
    own = Path("/proc/self/oom_score_adj").read_text()
    world.run(f"say(data(open_file({world.file(1)!r}))[:1] != b'')")
    assert Path(f"/proc/{world.pid()}/oom_score_adj").read_text().strip() == "1000"
    world.kill_daemon()
    world.spawn("from trims_shim.daemon.main import run\nsys.exit(run())\n")
    wait_until(world.is_answering, "a daemon")
    assert Path(f"/proc/{world.pid()}/oom_score_adj").read_text() == own


def test_the_daemon_is_nobodys_child_and_the_starter_has_no_zombie(world: World) -> None:
    said = world.run(
        "pid = cache().welcome(may_start=True).pid\n"
        "try:\n os.waitpid(-1, os.WNOHANG); children = 'some'\n"
        "except ChildProcessError:\n children = 'none'\n"
        "say([children, pid, os.getpid(), os.getsid(0), os.getsid(pid)])\n"
    )
    children, pid, _, our_session, its_session = said
    assert children == "none"
    assert process_state(pid) not in ("", "Z")
    assert our_session != its_session


def test_the_daemon_does_not_inherit_what_its_starter_had(world: World) -> None:
    """Descriptors, blocked and ignored signals, working directory, umask."""
    pid = world.run(
        f"os.chdir({world.root!r})\n"
        "os.set_inheritable(os.open('/etc/hostname', os.O_RDONLY), True)\n"
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "os.dup2(os.open('/etc/passwd', os.O_RDONLY), 200)\n"  # beyond the limit by now
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.umask(0)\n"
        "say(cache().welcome(may_start=True).pid)\n"
    )
    assert int(_status_of(pid, "SigIgn"), 16) & 1 << signal.SIGCHLD - 1 == 0
    assert _status_of(pid, "Umask") == "0022"
    assert not {"/etc/hostname", "/etc/passwd"} & set(world.descriptors(pid).values())
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    world.signal(pid, signal.SIGTERM)
    wait_until(lambda: process_state(pid) == "", "SIGTERM ends it")


def test_what_a_starter_with_a_narrow_umask_makes_can_be_used_by_the_next(world: World) -> None:
    """Found: its locks and the log could be opened by nobody, so no other daemon could start."""
    world.run("os.umask(0o777)\ncache().welcome(may_start=True)\n")
    world.kill_daemon()
    world.spawn("os.umask(0o777)\nfrom trims_shim.daemon.main import run\nsys.exit(run())\n")
    wait_until(world.is_answering, "a daemon")
    for name in ("", "start.lock", "daemon.lock", "daemon.log"):
        mode = os.stat(os.path.join(world.sockets, name)).st_mode & 0o777
        assert mode == (0o600 if name else 0o700), name


@pytest.mark.parametrize("starter", ["run", "load"])
def test_a_group_gets_through_directories_made_with_a_narrow_umask(
    make_world: Any, starter: str
) -> None:
    """Found: that of the sockets was the group's, but those above it nobody else could enter."""
    world = make_world(group=str(os.getgid()))
    above = os.path.join(world.root, "above")
    world.sockets = os.path.join(above, "s")
    if starter == "run":
        world.spawn("os.umask(0o077)\nfrom trims_shim.daemon.main import run\nsys.exit(run())\n")
        wait_until(world.is_answering, "a daemon")
    else:
        world.run("os.umask(0o077)\ncache().welcome(may_start=True)\n")
    modes = [os.stat(each).st_mode & 0o777 for each in (above, world.sockets)]
    assert modes == [0o755, 0o750]


def test_a_descriptor_that_is_closed_while_the_daemon_is_started(world: World) -> None:
    """By another thread of its starter: it is not there any more where it should be closed."""
    pid = world.run(
        "from trims_shim.client import spawn\n"
        "spawn._inheritable = lambda: [200]\n"
        "say(cache().welcome(may_start=True).pid)\n"
    )
    assert pid == world.pid()


def test_a_starter_with_very_many_descriptors(world: World) -> None:
    """Their numbers take more than one argument of a process may have."""
    pid = world.run(
        "from trims_shim.client import spawn\n"
        "spawn._inheritable = lambda: range(10_000, 40_000)\n"
        "say(cache().welcome(may_start=True).pid)\n"
    )
    assert pid == world.pid()


def test_a_starter_without_standard_streams(world: World) -> None:
    """Their numbers are free, and what is opened for the start gets them."""
    child = world.spawn(
        "said = os.dup(1)\n"
        "os.closerange(0, 3)\n"
        "pid = cache().welcome(may_start=True).pid\n"
        "os.write(said, f'{pid}\\n'.encode())\n"
    )
    assert child.hear() == world.pid()


def test_limits_of_its_starter_are_not_the_daemon_s(world: World) -> None:
    """Those that a program may lift; it serves others, too, and makes files of any size."""
    said = world.run(
        "import resource\n"
        "limits = [resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA]\n"
        "limits += [resource.RLIMIT_FSIZE]\n"
        "hard = [resource.getrlimit(limit)[1] for limit in limits]\n"
        "for limit, soft, most in zip(limits, (8 << 30, 1000, 4 << 30, 1 << 16), hard):\n"
        "  resource.setrlimit(limit, (soft, most))\n"
        f"open_file({world.file(1)!r})\n"
        "pid = cache().welcome().pid\n"
        "say([hard, [resource.prlimit(pid, limit)[0] for limit in limits]])\n"
    )
    assert said[0] == said[1]


def test_processors_and_niceness_of_its_starter_are_not_the_daemon_s(world: World) -> None:
    """It serves those that run elsewhere and those in a hurry, too."""
    ours = os.sched_getaffinity(0)
    pid, nicest, nice = world.run(
        f"os.sched_setaffinity(0, {{{min(ours)}}})\n"
        "os.nice(5)\n"
        "pid = cache().welcome(may_start=True).pid\n"
        "try:\n os.setpriority(os.PRIO_PROCESS, 0, 0); nicest = 0\n"
        "except OSError:\n nicest = os.nice(0)\n"
        "say([pid, nicest, os.getpriority(os.PRIO_PROCESS, pid)])\n"
    )
    assert os.sched_getaffinity(pid) >= ours & os.sched_getaffinity(1)
    assert nice == nicest


def test_priorities_and_memory_nodes_of_its_starter_are_not_the_daemon_s(world: World) -> None:
    """Those of `chrt`, `ionice` and `numactl`: it serves those in a hurry, too."""
    machine = os.uname().machine
    if machine not in background._IOPRIO_SET:
        pytest.skip("the numbers of the system calls are not known here")
    bind, of_process, idle = 2, 1, 3
    pid = world.run(
        "import ctypes\n"
        "from trims_shim.daemon import background\n"
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n"
        f"background._call(background._IOPRIO_SET, {of_process}, 0, {idle} << 13)\n"
        "node = ctypes.c_ulong(1)\n"
        f"background._call(background._SET_MEMPOLICY, {bind}, ctypes.addressof(node), 64)\n"
        "say(cache().welcome(may_start=True).pid)\n"
    )
    ioprio_get = background._IOPRIO_SET[machine] + 1
    assert os.sched_getscheduler(pid) == os.SCHED_OTHER
    assert ctypes.CDLL(None).syscall(ioprio_get, of_process, pid) >> 13 != idle
    assert "bind" not in Path(f"/proc/{pid}/numa_maps").read_text()


def test_a_fork_during_the_start_holds_nobody_up(world: World) -> None:
    """The child has the starter's lock open for as long as it lives."""
    child = world.spawn(
        "from trims_shim.client import spawn\n"
        "start, children = spawn._spawn, []\n"
        "def start_and_fork(*arguments):\n"
        "  start(*arguments)\n"
        "  children.append(os.fork())\n"
        "  if not children[0]: time.sleep(60); os._exit(0)\n"
        "spawn._spawn = start_and_fork\n"
        "cache().welcome(may_start=True)\nsay()\nhear()\n"
        "os.kill(children[0], signal.SIGKILL)\nos.wait()\n"
    )
    child.hear()
    world.kill_daemon()
    world.start(start_timeout="30")
    child.say()
    assert child.wait() == 0


def test_a_child_that_is_forked_in_the_middle_of_the_start_may_exit(world: World) -> None:
    """Found: one of a signal handler's; its lock was closed already, which became the error."""
    said = world.run(
        "from trims_shim.client import spawn\n"
        "start, children = spawn._spawn, []\n"
        "def fork_and_start(*arguments):\n"
        "  children.append(os.fork())\n"
        "  if not children[0]: sys.exit(7)\n"
        "  start(*arguments)\n"
        "spawn._spawn = fork_and_start\n"
        "cache().welcome(may_start=True)\n"
        "say(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))\n"
    )
    assert said == 7


def test_a_child_of_a_starter_that_is_killed_holds_nobody_up(world: World) -> None:
    """Found: while it lived, nobody could start a daemon in the place of one that had ended."""
    child = world.spawn(
        "from trims_shim.client import spawn\n"
        "start = spawn._spawn\n"
        "def start_and_die(*arguments):\n"
        "  start(*arguments)\n"
        "  starter, child = os.getpid(), os.fork()\n"
        "  if not child: say(os.getpid()); os.kill(starter, signal.SIGKILL); time.sleep(60)\n"
        "  time.sleep(60)\n"
        "spawn._spawn = start_and_die\n"
        "cache().welcome(may_start=True)\n"
    )
    left = child.hear()
    child.wait()
    world.kill_daemon()
    try:
        world.start(start_timeout="30")
    finally:
        world.signal(left, signal.SIGKILL)


def test_a_daemon_that_cannot_start_says_why(make_world: Any) -> None:
    world = make_world(group="no-such-group-of-trims")
    path = world.file(1)
    with pytest.raises(AssertionError, match="no group 'no-such-group-of-trims'"):
        world.run(f"sys.stderr = open({world.sockets + '.err'!r}, 'w')\nopen_file({path!r})\n")
    reason = world.run(
        f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n"
        " say([error.reason, str(error)])\n"
    )
    assert reason[0] == "daemon_start_failed"
    assert "no-such-group-of-trims" in reason[1]
    # A daemon says why before it ends.
    wait_until(lambda: not world.processes(), "the daemon that could not start is gone")


def test_a_group_may_be_a_number() -> None:
    """In the image of a container the groups of its volumes have no names."""
    without_name = next(number for number in range(60_000, 70_000) if not _has_name(number))
    assert daemon_main._group_id(str(without_name)) == without_name
    assert daemon_main._group_id(grp.getgrgid(0).gr_name) == 0
    for number in ("-1", "4294967295", "9" * 5000, "²", "1_0"):
        with pytest.raises(ConfigError, match="no group"):
            daemon_main._group_id(number)


def _has_name(number: int) -> bool:
    with contextlib.suppress(KeyError):
        grp.getgrgid(number)
        return True
    return False


@pytest.mark.parametrize("limit", [32, 95])
def test_a_daemon_that_may_have_too_few_files_names_the_limit(world: World, limit: int) -> None:
    """ZeroMQ aborted it, or said "Too many open files"; with a few more it answered nobody."""
    reason = world.run(
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        f"try:\n open_file({world.file(1)!r})\n"
        "except errors.TrimsError as error:\n say([error.reason, str(error)])\n"
    )
    assert reason[0] == "daemon_start_failed"
    assert "ulimit -H -n" in reason[1]


def test_several_clients_of_a_daemon_that_may_have_as_few_files_as_it_needs(world: World) -> None:
    """With little more than half of them, all were refused, or the daemon ended.

    Loads under way need some, too: one more may be refused meanwhile, but not behind them.
    """
    world.run(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))\n"
        "cache().welcome(may_start=True)\n"
    )
    pid = world.pid()
    script = (
        "held = {}\n"
        "while True:\n"
        "    hear()\n"
        "    for path in [each for each in paths if each not in held]:\n"
        "        try: held[path] = open_file(path)\n"
        "        except errors.NoSpace: pass\n"
        "    say([data(each) == open(path, 'rb').read() for path, each in held.items()])\n"
    )
    sizes = (1 << 20, 1 << 20, 32 << 20)
    paths = [
        [world.file(3 * client + each, size) for each, size in enumerate(sizes)]
        for client in range(6)
    ]
    clients = [world.spawn(f"paths = {each!r}\n{script}", autostart="0") for each in paths]
    for client in clients:
        client.say()
    for client in clients:
        assert all(client.hear())
    for client in clients:
        client.say()
        assert client.hear() == [True] * 3, world.log()
    assert world.pid() == pid, world.log()


def test_a_limit_of_files_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sandbox may say, with a negative number."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    daemon_main._raise_descriptor_limit()


def test_a_crowd_hears_at_once_that_no_daemon_can_start(make_world: Any) -> None:
    """Who waited for a starter that failed takes its word, instead of trying again in turn."""
    world = make_world(group="no-such-group-of-trims", start_timeout="30")
    path = world.file(1, 1 << 16)
    words = world.run(CROWD.format(path=path, number=40), timeout_s=120)
    assert len(words) == 40
    assert all("DaemonStartFailed" in word and "no-such-group" in word for word in words)
    assert world.log().count("no-such-group-of-trims") < 20
    assert (
        world.run(
            f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n say(error.reason)\n"
        )
        == "daemon_start_failed"
    )


def test_idle_exit_only_without_lease_and_pin(make_world: Any) -> None:
    world = make_world(idle_exit="1")
    path = world.file(1)
    holder = world.spawn(
        f"arena = open_file({path!r})\nsay([arena.image.digest, cache().welcome().pid])\nhear()\n"
    )
    digest, pid = holder.hear()
    time.sleep(2.5)
    assert process_state(pid) not in ("", "Z"), "it exited while an image was leased"
    pinner = world.connection()
    pinner.request(admin.PinImageRequest(digest, True))
    pinner.close()
    holder.say()
    holder.wait()
    time.sleep(2.5)
    assert process_state(pid) not in ("", "Z"), "it exited while an image was pinned"
    pinner = world.connection()
    pinner.request(admin.PinImageRequest(digest, False))
    pinner.close()
    wait_until(lambda: process_state(pid) == "", "idle exit")
    assert f"daemon {pid} ends: idle for 1 s" in world.log()
    assert not [name for name in os.listdir(world.sockets) if ".sock" in name]
    second = world.run(f"open_file({path!r})\nsay(cache().welcome().pid)\n")
    assert second != pid


def test_an_idle_client_does_not_keep_it(make_world: Any) -> None:
    """A connection without a lease is no reason to stay; the client starts the next one."""
    world = make_world(idle_exit="1")
    paths = [world.file(1), world.file(2)]
    child = world.spawn(
        f"open_file({paths[0]!r})\nsay(cache().welcome().pid)\nhear()\n"
        f"arena = open_file({paths[1]!r})\nsay([cache().welcome().pid, data(arena)[:8].hex()])\n"
    )
    pid = child.hear()
    wait_until(lambda: process_state(pid) == "", "idle exit")
    child.say()
    second, begin = child.hear()
    assert second != pid
    assert begin == content(2)[:8].hex()


def test_watching_does_not_keep_it(make_world: Any) -> None:
    """As a monitor does with ``trims status --json``: each time with a connection of its own."""
    world = make_world(idle_exit="1")
    pid = world.start()

    def has_gone() -> bool:
        with contextlib.suppress(DaemonUnavailable), contextlib.closing(world.connection()) as line:
            line.request(admin.GetStatusRequest())
        return process_state(pid) == ""

    wait_until(has_gone, "idle exit", interval_s=0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_load_in_flight(make_world: Any, number: int) -> None:
    world = make_world(host_bytes="1G")
    path = world.sparse_file(LARGE_BYTES)
    pid = world.start()
    child = world.spawn(
        f"arena = open_file({path!r})\nsay([arena.size_bytes, trims_shim.stats().events])\n"
    )
    world.wait_for_load()
    world.signal(pid, number)
    size, events = child.hear()
    assert size == LARGE_BYTES
    assert events["open:miss"] == 1
    assert "daemon:started" not in events, "the load was answered by another daemon"
    wait_until(lambda: process_state(pid) == "", "the daemon ends")
    assert "Traceback" not in world.log()


def test_a_signal_before_it_serves(make_world: Any) -> None:
    """Found: between its handlers and its loop a daemon ended with a traceback."""
    world = make_world()
    config = world.config()
    directory = endpoint.choose(config)
    directory.create()
    server = daemon_main._build(directory, config)
    server.stop()
    server.run()
    os.close(server._wake_descriptor)


def test_a_signal_as_soon_as_it_is_handled(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a socket was left behind, and the lock kept until the process had ended."""
    config = make_world().config()
    directory = endpoint.choose(config)
    directory.create()
    lock = daemon_main._claim(directory)
    assert lock is not None
    server = daemon_main._build(directory, config)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handle: handle(number, None))
        assert daemon_main._serve(server, lock, daemon_main._Report(None)) == 0
    os.close(server._wake_descriptor)
    assert not os.path.exists(directory.handover)
    again = daemon_main._claim(directory)
    assert again is not None
    os.close(again)


def test_an_idle_daemon_makes_room_before_it_gives_its_memory_back(make_world: Any) -> None:
    """Which may take many seconds; found: loads of that time were not served."""
    world = make_world(idle_exit="0.01")
    config = world.config()
    directory = endpoint.choose(config)
    directory.create()
    server = daemon_main._build(directory, config)
    order: list[str] = []
    server.on_stop = lambda: order.append("room")
    close = server.tiers.close
    server.tiers.close = lambda: (order.append("memory"), close())  # type: ignore[method-assign]
    server.run()
    os.close(server._wake_descriptor)
    assert order == ["room", "memory"]


def test_a_second_daemon_serves_while_the_first_finishes(make_world: Any) -> None:
    world = make_world(host_bytes="1G")
    large, small = world.sparse_file(LARGE_BYTES), world.file(7)
    first = world.start()
    child = world.spawn(f"arena = open_file({large!r})\nsay(arena.size_bytes)\n")
    world.wait_for_load()
    world.signal(first, signal.SIGSTOP)
    world.signal(first, signal.SIGTERM)
    world.signal(first, signal.SIGCONT)
    second = world.run(
        f"arena = open_file({small!r})\n"
        f"assert data(arena) == open({small!r}, 'rb').read()\nsay(cache().welcome().pid)\n"
    )
    assert second != first
    assert child.hear() == LARGE_BYTES
    wait_until(lambda: world.processes() == [second], "only the second is left")
    assert world.pid() == second
    assert world.status().pid == second


# --- versions -------------------------------------------------------------------------------------

_PACKAGE = """
import trims_shim, trims_shim._version
import trims_shim.client.pool as a, trims_shim.client.connection as b
a.__version__ = b.__version__ = {package!r}
messages.PROTOCOL_VERSION = {protocol}
"""
_DAEMON = """
import trims_shim.daemon.server as s, trims_shim.daemon.requests as r
s.__version__ = r.__version__ = {package!r}
messages.PROTOCOL_VERSION = {protocol}
from trims_shim.daemon.main import run
sys.exit(run())
"""


def start_version(world: World, package: str, protocol: int) -> int:
    child = world.spawn(_DAEMON.format(package=package, protocol=protocol))
    wait_until(lambda: os.path.exists(os.path.join(world.sockets, "handover.sock")), "a daemon")
    return child.pid


@pytest.mark.parametrize(
    ("protocol", "autostart", "effect"),
    [
        (0, "1", "a load replaces it"),
        (0, "0", "no load is served"),
        (messages.PROTOCOL_VERSION + 1, "1", "no load is served"),
    ],
)
def test_info_says_what_becomes_of_a_daemon_of_another_protocol(
    make_world: Any, protocol: int, autostart: str, effect: str
) -> None:
    """Found: that none answers and no load starts one, although one did, and a load replaced it."""
    world = make_world()
    package = "99.0.0" if protocol else "0.0.1"
    pid = start_version(world, package, protocol)
    text, found = world.run(
        "import contextlib, io\nfrom trims_shim.cli.main import main\nout = io.StringIO()\n"
        "with contextlib.redirect_stdout(out):\n main(['info'])\n"
        "say([' '.join(out.getvalue().split()), trims_shim.info()['daemon']])\n",
        autostart=autostart,
    )
    assert f"daemon runs ({pid}), but with another protocol; {effect} " in text
    assert f"daemon {pid}; the daemon (trims_shim {package}, protocol {protocol}) and" in text
    assert (found["pid"], found["package"], found["protocol"]) == (pid, package, protocol)
    assert found["can_start"] == (effect == "a load replaces it")


@pytest.mark.parametrize("protocol", [messages.PROTOCOL_VERSION, 0])
def test_a_newer_client_replaces_an_older_daemon(make_world: Any, protocol: int) -> None:
    """The load in flight completes, mappings survive, and the newer daemon serves from then on."""
    world = make_world(host_bytes="1G")
    small, large = world.file(1), world.sparse_file(LARGE_BYTES)
    old = start_version(world, "0.0.1", protocol)
    prelude = _PACKAGE.format(package="0.0.1", protocol=protocol)
    holder = world.spawn(
        prelude + f"arena = open_file({small!r})\nsay()\nhear()\n"
        f"say(data(arena) == open({small!r}, 'rb').read())\nhear()\n"
    )
    holder.hear()
    loader = world.spawn(
        prelude + f"say()\narena = open_file({large!r})\n"
        "say([arena.size_bytes, trims_shim.stats().events.get('daemon:started', 0)])\n"
    )
    loader.hear()
    wait_until(lambda: len(world.segments(old)) >= 2, "a load in progress")
    new = world.run(
        f"arena = open_file({small!r})\nassert data(arena) == open({small!r}, 'rb').read()\n"
        "say(cache().welcome().pid)\n"
    )
    assert new != old
    assert loader.hear() == [LARGE_BYTES, 0]
    wait_until(lambda: process_state(old) in ("", "Z"), "the old daemon ends")
    holder.say()
    assert holder.hear() is True
    assert world.pid() == new
    holder.say()


_TOLD = """
import trims_shim.wire.handover as handover
wait_until_ready = handover.wait_until_ready
def told(*arguments, **named):
    say()
    return wait_until_ready(*arguments, **named)
handover.wait_until_ready = told
recipe = messages.SessionRecipe("1", "b", (("CPUExecutionProvider",),), "ORT_ENABLE_ALL")
def open_prepared(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        cache().open_prepared(recipe, package='', search_path=(), descriptor=descriptor, path=path)
    except errors.NotServed as error:
        return error.reason
"""


@pytest.mark.parametrize("ask", ["open_file({!r}).size_bytes", "open_prepared({!r})"])
def test_an_older_daemon_that_hears_everything_at_once_is_replaced(world: World, ask: str) -> None:
    """It refuses the request behind the Hello and closes, with more of them unread."""
    path = world.file(1)
    old = start_version(world, "0.0.1", 0)
    world.signal(old, signal.SIGSTOP)
    client = world.spawn(
        _TOLD + f"answer = {ask.format(path)}\nhandover.wait_until_ready = wait_until_ready\n"
        "say([answer, cache().welcome().pid])\n"
    )
    assert client.hear() is None, "it waits for the Welcome, and has sent all it had to say"
    world.signal(old, signal.SIGCONT)
    answer = wait_until(client.hear, "an answer")
    assert answer[0] in (1 << 20, "preparing")
    assert answer[1] == world.pid() != old


def test_a_drain_behind_the_hello(running: World) -> None:
    pid = running.pid()
    running.signal(pid, signal.SIGSTOP)
    with raw_connection(running) as connection:
        connection.send(codec.encode(messages.DrainRequest("9.9.9")))
        running.signal(pid, signal.SIGCONT)
        wait_until(lambda: process_state(pid) in ("", "Z"), "the daemon ends")
    assert "replaced by a client of version 9.9.9" in running.log()
    assert "cannot be accepted" not in running.log()


def test_an_older_protocol_falls_back_and_leaves_the_newer_daemon(running: World) -> None:
    path = running.file(1)
    pid = running.pid()
    said = running.run(
        _PACKAGE.format(package="0.0.1", protocol=0)
        + f"try:\n open_file({path!r})\nexcept errors.TrimsError as error:\n"
        " say([type(error).__name__, str(error)])\n"
    )
    assert said[0] == IncompatibleDaemon.__name__
    assert "start this program again" in said[1]
    assert running.pid() == pid


@pytest.mark.parametrize("package", ["0.0.1", "9.9.9"], ids=["older", "downgraded"])
def test_a_package_that_uses_a_daemon_of_another_version(running: World, package: str) -> None:
    """An older one; and one downgraded under the client.

    Found: each process that had imported the newer one began yet another older daemon.
    """
    path = running.file(1)
    pid = running.pid()
    said = running.run(
        _PACKAGE.format(package=package, protocol=messages.PROTOCOL_VERSION)
        + f"arena = open_file({path!r})\nsay([data(arena)[:8].hex(), cache().welcome().pid])\n"
    )
    assert said == [content(1)[:8].hex(), pid]


def test_ten_newer_clients_replace_it_once(world: World) -> None:
    path = world.file(1, 1 << 16)
    old = start_version(world, "0.0.1", messages.PROTOCOL_VERSION)
    words = world.run(CROWD.format(path=path, number=10))
    assert {word.partition(" ")[2] for word in words} == {"True"}
    pids = {int(word.partition(" ")[0]) for word in words}
    assert len(pids) == 1
    assert old not in pids


def test_a_newer_client_that_may_not_start_does_not_drain(world: World) -> None:
    path = world.file(1)
    old = start_version(world, "0.0.1", messages.PROTOCOL_VERSION)
    world.run(f"open_file({path!r})\n", autostart="0")
    assert world.pid() == old


def _status_of(pid: int, field: str) -> str:
    with open(f"/proc/{pid}/status") as status:
        return next(line.split()[1] for line in status if line.startswith(f"{field}:"))
