"""A second user. Promises: a private directory is closed to others; at a machine-wide daemon a user
gets what it can prove to be allowed to read, and can see and disturb nothing of anybody else."""

from __future__ import annotations

import glob
import grp
import os
from typing import Any

import pytest
from harness import World, content, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534
AS_NOBODY = f"os.setgroups([{NOBODY}]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
TRY = """
def attempt(act):
    try:
        return act()
    except errors.TrimsError as error:
        return type(error).__name__
    except OSError as error:
        return type(error).__name__
def line():
    return Connection(cache().endpoint, stall_timeout_s=5)
# Whatever has to be imported: the interpreter may be out of another user's reach.
import trims_shim.client.spawn, zmq, zmq.backend, encodings.idna, zmq.utils.strtypes
zmq.Poller(); zmq.Context().term()
"""


@pytest.fixture
def shared(make_world: Any) -> World:
    """A machine-wide daemon of root for the group of nobody, and files of both users."""
    world = make_world(group=grp.getgrgid(NOBODY).gr_name)
    world.start()
    os.chmod(world.root, 0o755)
    return world


def test_a_private_directory_is_closed(running: World) -> None:
    os.chmod(running.root, 0o755)
    path = running.file(1)
    os.chmod(path, 0o644)
    said = running.run(
        TRY + AS_NOBODY + f"say([attempt(lambda: data(open_file({path!r}))[:1]),"
        f" attempt(lambda: os.listdir({running.sockets!r}))])\n"
    )
    assert said == ["UnusableSocketDir", "PermissionError"]
    assert len(running.status().images) == 0


def test_the_connection_of_a_process_ends_with_its_rights(running: World) -> None:
    """Else a worker that was forked and gave them up could ask for what its parent may have."""
    os.chmod(running.root, 0o755)
    first, second = running.file(1), running.file(2)
    os.chmod(second, 0o644)
    said = running.run(
        TRY + f"data(open_file({first!r}))\n" + AS_NOBODY + "say([attempt("
        f"lambda: data(open_file({second!r}))[:1]) for _ in range(2)])\n"
    )
    assert set(said) <= {"DaemonDied", "UnusableSocketDir", "ConnectionLost", "AccessDenied"}
    assert len(running.status().images) == 1


def test_a_daemon_of_another_user_is_not_trusted(world: World) -> None:
    """Even root does not take weights from a daemon that somebody else runs."""
    os.chmod(world.root, 0o777)
    os.mkdir(world.sockets, 0o700)
    # A directory of root's that nobody's daemon was once allowed to use.
    script = (
        "import socket\n"
        f"s = handover.new_socket(); s.bind({world.sockets + '/handover.sock'!r}); s.listen(5)\n"
        + AS_NOBODY
        + "s.listen(5)\nsay()\nc, _ = s.accept()\nsay(len(c.recv(100)))\n"
    )
    impostor = world.spawn(script)
    impostor.hear()
    said = world.run(
        f"try:\n open_file({world.file(1)!r})\nexcept errors.TrimsError as error:\n"
        " say([type(error).__name__, str(error)])\n",
        autostart="0",
    )
    assert said[0] == "DaemonUnavailable"
    assert "user 65534" in said[1]
    impostor.kill()


_IMPOSTOR = """
os.setgroups([]); os.setgid(2001); os.setuid(2001)
listener = handover.new_socket()
listener.bind({socket!r})
os.chmod({socket!r}, 0o666)
listener.listen(5)
say()
listener.accept()
"""
_UNMAPPED_USER = """
import ctypes
from trims_shim.wire.endpoint import Endpoint
os.setgroups([]); os.setgid(2002); os.setuid(2002)
is_unmapped = ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
def attempt(act):
    try:
        return act()
    except errors.TrimsError as error:
        return type(error).__name__
say([is_unmapped and os.geteuid(), attempt(lambda: open_file({path!r}).size_bytes),
     attempt(Endpoint({own!r}).create)])
"""


def test_in_a_user_namespace_without_a_map_others_are_still_others(world: World) -> None:
    """All users look alike there. Found: another one's daemon got the files, and was believed."""
    os.chmod(world.root, 0o777)
    os.mkdir(world.sockets, 0o755)
    os.chown(world.sockets, 2001, 2001)
    path = world.file(1)
    os.chmod(path, 0o644)
    impostor = world.spawn(_IMPOSTOR.format(socket=f"{world.sockets}/handover.sock"))
    impostor.hear()
    script = _UNMAPPED_USER.format(path=path, own=f"{world.root}/own")
    user, served, made = world.run(script, autostart="0", stall_timeout="2")
    if user is False:
        pytest.skip("users may make no user namespaces here")
    assert user == NOBODY
    assert served == "UnusableSocketDir"
    assert made is None, "its own directory is"
    impostor.kill()


def test_a_daemon_that_cannot_tell_users_apart_serves_none_of_them(make_world: Any) -> None:
    """All that its user namespace does not map look alike. Found: they saw each other's names, and
    what one had proved of a file held for the others."""
    world = make_world(group="0", autostart="0")
    os.chmod(world.root, 0o755)
    daemon = world.spawn(
        "from trims_shim.cli.main import main; main(['daemon'])", prefix=("unshare", "-Ur")
    )
    wait_until(lambda: daemon.process.poll() is not None or world.is_answering(), "it starts")
    if daemon.process.poll() is not None:
        pytest.skip(f"no user namespace can be made here: {daemon.errors()}")
    path = world.file(1)
    os.chmod(path, 0o644)
    load = f"say(attempt(lambda: data(open_file({path!r}))[:1].hex()))\n"
    assert world.run(TRY + load) == content(1)[:1].hex()
    for user in (2001, NOBODY):
        become = f"os.setgroups([0]); os.setuid({user})\n"
        assert world.run(TRY + become + load) == "AccessDenied"
    assert len(world.status().images) == 1


def test_who_is_not_in_the_group_is_told_so(shared: World) -> None:
    """Not that none answers, and to start one: it runs, and that is nothing this user may do."""
    os.chmod(shared.file(1), 0o644)
    said = shared.run(
        TRY + AS_NOBODY.replace(str(NOBODY), str(NOBODY - 1)) + "try:\n"
        f" open_file({shared.file(1)!r})\nexcept errors.TrimsError as error:\n"
        " say([type(error).__name__, str(error)])\n",
        autostart="0",
    )
    assert said[0] == "DaemonUnavailable"
    assert "Permission denied" in said[1]
    assert "join the group for which it is (TRIMS_GROUP)" in said[1]


def test_what_may_be_read_is_served(shared: World) -> None:
    path = shared.file(1)
    os.chmod(path, 0o644)
    ours = shared.run(f"say(open_file({path!r}).image.digest)\n")
    said = shared.run(
        TRY + AS_NOBODY + f"arena = open_file({path!r})\n"
        f"say([data(arena) == open({path!r}, 'rb').read(), arena.image.digest])\n"
    )
    assert said == [True, ours]
    assert len(shared.status().images) == 1


COMMANDS = """
import contextlib, io
# Whatever has to be imported: see above.
from trims_shim.cli import daemon, images, info, main, status
import trims_shim.daemon.main
def trims(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main(list(words))
    return [code, " ".join(out.getvalue().split()), err.getvalue()]
trims("info"), trims("evict", "abcdef")
cache_module.cache().close()
"""


def test_what_the_commands_tell_the_group(shared: World) -> None:
    """No advice that only the daemon's user can follow, and no failure of what was done."""
    path = shared.file(1)
    os.chmod(path, 0o644)
    said = shared.run(
        TRY + COMMANDS + AS_NOBODY + f"data(open_file({path!r})), cache().close()\n"
        f"say([trims('status'), trims('info'), trims('evict', {path!r}), trims('ls'), "
        "trims('daemon')])\n",
        host_bytes="1G",
    )
    (_, status, _), (_, info, _), (code, evicted, error), (_, listed, _), (_, _, second) = said
    assert path in status
    assert "`trims stop`" not in status + info + second
    assert second.endswith("already; it is another user's\n")
    assert "another user's, with settings of its own" in info
    assert "off: the daemon is another user's" in info
    assert (code, error) == (0, "")
    assert evicted.startswith("evicted 1 image, ")
    assert path not in listed


def test_what_another_user_has_pinned_stays(shared: World) -> None:
    """Found: who had loaded the same file could unpin what root had pinned."""
    path = shared.file(1)
    os.chmod(path, 0o644)
    ask = f"cache().request(admin.PinImageRequest({path!r}, is_pinned=%s))"
    load = f"data(open_file({path!r}))\n"
    shared.run(load + ask % True + "\nsay()\n")
    asked = ", ".join(f"attempt(lambda: {ask % how})" for how in (False, True, False))
    refused, _, again = shared.run(TRY + AS_NOBODY + load + f"say([{asked}])\n")
    assert (refused, again) == ("AccessDenied", "AccessDenied")
    assert shared.status().images[0].is_pinned
    shared.run(ask % False + "\nsay()\n")
    assert not shared.status().images[0].is_pinned


def test_a_path_means_the_version_that_the_user_has_pinned(shared: World) -> None:
    """Found: one could not unpin a file by its path once root had pinned a later version."""
    path = shared.file(1)
    os.chmod(path, 0o644)
    ask = f"cache().request(admin.PinImageRequest({path!r}, is_pinned=%s))"
    load = f"data(open_file({path!r}))\n"
    earlier = shared.run(TRY + AS_NOBODY + load + f"say({ask % True}.digest)\n")
    os.rename(shared.file(2), path)
    os.chmod(path, 0o644)
    later = shared.run(load + f"say({ask % True}.digest)\n")
    unpinned = shared.run(TRY + AS_NOBODY + load + f"say(attempt(lambda: {ask % False}.digest))\n")
    assert unpinned == earlier
    assert {each.digest: each.is_pinned for each in shared.status().images} == {
        earlier: False,
        later: True,
    }


def test_what_may_not_be_read_is_not_served(shared: World) -> None:
    """The image is resident, but no descriptor that nobody can get proves a right to it."""
    secret, public = shared.file(1, name="secret.bin"), shared.file(2)
    os.chmod(secret, 0o622)
    os.chmod(public, 0o644)
    holder = shared.spawn(f"arena = open_file({secret!r})\nsay([arena.image.digest, 0])\nhear()\n")
    digest, _ = holder.hear()
    leases = {image.digest: image.leases for image in shared.status().images}
    assert leases == {digest: 1}
    said = shared.run(
        TRY + AS_NOBODY + f"secret, public, digest = {secret!r}, {public!r}, {digest!r}\n"
        "results = {}\n"
        "results['open'] = attempt(lambda: os.open(secret, os.O_RDONLY))\n"
        "def offer(descriptor, name=secret):\n"
        "  c = line()\n"
        "  try: return c.open_image(descriptor, name).reply.digest == digest\n"
        "  finally: c.close()\n"
        "results['O_PATH'] = attempt(lambda: offer(os.open(secret, os.O_PATH)))\n"
        "results['O_WRONLY'] = attempt(lambda: offer(os.open(secret, os.O_WRONLY)))\n"
        "results['O_WRONLY|O_APPEND'] = attempt("
        "lambda: offer(os.open(secret, os.O_WRONLY | os.O_APPEND)))\n"
        "results['directory'] = attempt(lambda: offer(os.open('/', os.O_RDONLY)))\n"
        "results['device'] = attempt(lambda: offer(os.open('/dev/zero', os.O_RDONLY)))\n"
        "results['pipe'] = attempt(lambda: offer(os.pipe()[0]))\n"
        "results['socket'] = attempt(lambda: offer(line()._handover.fileno()))\n"
        "results['proc'] = attempt(lambda: offer(os.open('/proc/self/status', os.O_RDONLY)))\n"
        "c = line()\n"
        "for what in ('evict', 'pin', 'unpin', 'verify'):\n"
        "  for text in (digest, digest[:8], secret):\n"
        "    message = {'evict': lambda: admin.EvictImageRequest(text),\n"
        "      'pin': lambda: admin.PinImageRequest(text, True),\n"
        "      'unpin': lambda: admin.PinImageRequest(text, False),\n"
        "      'verify': lambda: admin.VerifyImageRequest(text)}[what]()\n"
        "    kind = 'digest' if text is digest else 'prefix' if text != secret else 'name'\n"
        "    results[f'{what} {kind}'] = attempt(lambda: type(c.request(message)).__name__)\n"
        "results['evict all'] = attempt(lambda: type(c.request(admin.EvictImageRequest())))\n"
        "results['stop'] = attempt(lambda: type(c.request(admin.StopDaemonRequest())))\n"
        "def drain():\n"
        "  d = line(); d.drain(); limit = time.monotonic() + 30\n"
        "  while d.is_alive() and time.monotonic() < limit: time.sleep(0.01)\n"
        "  try: return d.is_alive()\n"
        "  finally: d.close()\n"
        "results['drained, still connected'] = attempt(drain)\n"
        "status = c.request(admin.GetStatusRequest())\n"
        "results['names'] = [list(image.names) for image in status.images]\n"
        "results['users'] = sorted({client.user for client in status.clients})\n"
        "def release(number):\n"
        "  d = line(); d.release(number); d.request(admin.GetStatusRequest()); d.close()\n"
        "for number in range(200): c.release(number)\n"
        "results['released'] = attempt(lambda: release(1))\n"
        "results['another file, this name'] = attempt("
        "lambda: offer(os.open(public, os.O_RDONLY)))\n"
        "say(results)\n"
    )
    released = said.pop("released")
    assert released is None
    assert said.pop("names") == [[]]
    assert said.pop("users") == [NOBODY]
    assert said.pop("another file, this name") is False
    assert said.pop("drained, still connected") is False
    assert said.pop("proc") == "ReadFailed"
    assert said.pop("socket") == "DaemonUnavailable"
    expected = {"open": "PermissionError"}
    for key in said:
        if key != "open":
            assert said[key] in ("AccessDenied", "UnknownImage"), (key, said[key])
    assert said["open"] == expected["open"]
    assert [image.leases for image in shared.status().images if image.digest == digest] == [1]
    assert not any(image.is_pinned for image in shared.status().images)
    holder.say()


def test_what_only_root_reads_of_a_file_that_others_may_open(shared: World) -> None:
    """Found: of a PCI device users see the first 64 bytes, and got all that the daemon sees."""
    devices = sorted(glob.glob("/proc/bus/pci/*/*"))
    if not devices:
        pytest.skip("no PCI here")
    said = shared.run(
        TRY + AS_NOBODY + f"path = {devices[0]!r}\nown = len(open(path, 'rb').read())\n"
        "say([own, attempt(lambda: len(data(open_file(path))))])\n"
    )
    assert said == [64, "AccessDenied"]


def test_a_user_who_may_have_no_more_threads(shared: World) -> None:
    """ZeroMQ would abort the program (`ulimit -u`, a container's limit); root knows no such."""
    path = shared.file(1)
    os.chmod(path, 0o644)
    said = shared.run(
        TRY + AS_NOBODY + "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (0, 0))\n"
        f"say(attempt(lambda: len(data(open_file({path!r})))))\n"
    )
    assert said == "DaemonUnavailable"


def test_one_user_leaves_descriptors_to_others(make_world: Any) -> None:
    """Found: files that are offered and never asked for took all, and root was refused as well."""
    world = make_world(group=grp.getgrgid(NOBODY).gr_name)
    world.run(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))\n"
        "cache().welcome(may_start=True)\n"
    )
    os.chmod(world.root, 0o755)
    path = world.file(1)
    os.chmod(path, 0o644)
    hoarder = world.spawn(
        TRY + AS_NOBODY + f"f = os.open({path!r}, os.O_RDONLY)\nlines = []\n"
        "def hoard():\n"
        "  while True:\n"
        "    lines.append(line())\n"
        "    for ticket in range(30):\n"
        "      lines[-1].welcome, lines[-1]._send_handover(messages.FileOffer(ticket), f)\n"
        "say(attempt(hoard))\nhear()\n"
    )
    hoarder.hear()
    load = f"say(attempt(lambda: data(open_file({path!r})) == open({path!r}, 'rb').read()))\n"
    another = f"os.setgroups([{NOBODY}]); os.setgid(2001); os.setuid(2001)\n"
    assert [world.run(TRY + load), world.run(TRY + another + load)] == [True, True]
    hoarder.say()


def test_tokens_and_tickets_of_another_session(shared: World) -> None:
    """A token that was not given, another connection's ticket, a claimed ticket: all refused."""
    path = shared.file(1)
    os.chmod(path, 0o644)
    said = shared.run(
        TRY + AS_NOBODY + f"f = os.open({path!r}, os.O_RDONLY)\n"
        "one, two = line(), line()\n"
        "one._send_handover(messages.FileOffer(77, 'host', 'x'), f)\n"
        "ask = lambda c, n: type(c.request(messages.OpenImageRequest(n))).__name__\n"
        "results = [attempt(lambda: ask(two, 77)), attempt(lambda: ask(two, 1))]\n"
        "for token in (b'', b'\\0' * 16, os.urandom(16), one.welcome.token[:-1]):\n"
        "  forged = line()\n"
        "  forged._welcome = forged.welcome._replace(token=token)\n"
        "  forged._stall_timeout_s = 2\n"
        "  results.append(attempt(lambda: forged.request(admin.GetStatusRequest())))\n"
        "  forged.close()\n"
        "results.append(attempt(lambda: ask(one, 77)))\n"
        "results.append(attempt(lambda: ask(one, 77)))\n"
        "say(results)\n"
    )
    assert said[:2] == ["AccessDenied"] * 2
    assert set(said[2:6]) <= {"AccessDenied", "DaemonDied", "DaemonTimeout", "DaemonUnavailable"}
    assert said[6:] == ["OpenImageReply", "AccessDenied"]


def test_an_equal_identity_of_another_user_proves_nothing(shared: World) -> None:
    """Identities are kept by user: nobody's first load reads the file, though root's is settled."""
    import time

    path = shared.file(1)
    os.chmod(path, 0o644)
    time.sleep(0.3)
    shared.run(f"open_file({path!r})\nopen_file({path!r})\n")
    events = shared.run(TRY + AS_NOBODY + f"open_file({path!r})\nsay(trims_shim.stats().events)\n")
    assert events.get("open:hit", 0) == 0
    assert events["open:miss"] == 1
    assert content(1)


def test_sockets_of_the_machine_wide_daemon(shared: World) -> None:
    """Group may connect, others may not; the directory cannot be written by the group."""
    assert os.stat(shared.sockets).st_mode & 0o777 == 0o750
    for name in os.listdir(shared.sockets):
        status = os.stat(os.path.join(shared.sockets, name))
        if name.endswith(".sock"):
            assert (status.st_mode & 0o777, status.st_gid) == (0o660, NOBODY), name
        else:
            assert status.st_mode & 0o022 == 0, name
