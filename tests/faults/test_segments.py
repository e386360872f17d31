"""Nobody can change a segment. A client tries everything the kernel offers, for each kind of
memory; afterwards every other client still reads the file's bytes."""

from __future__ import annotations

from typing import Any

import pytest
from harness import content

from trims_shim.memory import host
from trims_shim.specs import SegmentKind

KINDS = ["memfd", "tmpfs-huge", "tmpfs-huge-userns"]

ATTACK = """
import ctypes, fcntl, mmap, struct
arena = open_file({path!r})
fd = arena.image.descriptor
size = arena.size_bytes
libc = ctypes.CDLL(None, use_errno=True)
allowed = []
def attempt(name, act):
    try:
        result = act()
    except (OSError, ValueError):
        return
    allowed.append(f'{{name}}: {{result!r}}')
def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return 'done'
link = f'/proc/self/fd/{{fd}}'
def poke(descriptor):
    os.pwrite(descriptor, b'evil', 0)
    return 'written'
attempt('write', lambda: poke(fd))
attempt('ftruncate', lambda: os.ftruncate(fd, 10))
attempt('ftruncate grow', lambda: os.ftruncate(fd, size * 2))
attempt('truncate', lambda: os.truncate(link, 10))
attempt('fchmod', lambda: (os.fchmod(fd, 0o777), poke(os.open(link, os.O_RDWR))))
attempt('fchown', lambda: (os.fchown(fd, 12345, 12345), poke(os.open(link, os.O_RDWR))))
for flags in ('O_RDWR', 'O_WRONLY'):
    attempt(flags, lambda: poke(os.open(link, getattr(os, flags))))
attempt('O_TRUNC', lambda: os.fstat(os.open(link, os.O_RDONLY | os.O_TRUNC)).st_size)
attempt('O_RDWR|O_TRUNC', lambda: os.open(link, os.O_RDWR | os.O_TRUNC))
for prot in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
    attempt('mmap shared', lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, prot))
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
assert address not in (None, ctypes.c_void_p(-1).value)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
attempt('mprotect', lambda: call(libc.mprotect, address, size, 3))
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
attempt('MADV_REMOVE shared', lambda: call(libc.madvise, address, size, 9))
attempt('MADV_REMOVE arena', lambda: call(libc.madvise, arena.address, 4096, 9))
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
for name, mode in (('punch', 3), ('zero', 16), ('collapse', 8), ('extend', 0), ('keep', 1)):
    attempt(f'fallocate {{name}}', lambda: call(libc.fallocate, fd, mode, 0, size * 2))
AT_EMPTY_PATH = 0x1000
libc.linkat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
for directory in ('/dev/shm', '/tmp', {root!r}):
    name = (directory + f'/stolen-{{os.getpid()}}').encode()
    attempt('linkat empty', lambda: call(libc.linkat, fd, b'', -100, name, AT_EMPTY_PATH))
    attempt('linkat proc', lambda: call(libc.linkat, -100, link.encode(), -100, name, 0x400))
attempt('F_SETFL', lambda: (fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR), poke(fd)))
attempt('dup', lambda: poke(os.dup(fd)))
attempt('sendfile', lambda: os.sendfile(fd, os.open('/etc/hostname', os.O_RDONLY), 0, 4))
arena.buffer[0:8] = b'mine all'
attempt('private', lambda: 'seen' if memoryview(arena.image.map().buffer)[:8] == b'mine all'
        else (_ for _ in ()).throw(OSError()))
say(allowed)
hear()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_write_is_refused(make_world: Any, kind: str) -> None:
    probe = next(each for each in host.probe() if each.kind is SegmentKind(kind))
    if not probe.is_available:
        pytest.skip(f"{kind}: {probe.reason}")
    world = make_world(memory_kind=kind)
    path = world.file(1)
    world.start()
    script = ATTACK.format(path=path, root=world.root)
    child = world.spawn(script)
    assert child.hear() == []
    for _ in range(2):
        assert world.run(f"say(data(open_file({path!r}))[:16].hex())\n") == content(1)[:16].hex()
    status = world.status()
    assert status.memory.kind == kind
    connection = world.connection()
    try:
        from trims_shim.wire.admin import VerifyImageRequest

        verified = connection.request(VerifyImageRequest(status.images[0].digest))
    finally:
        connection.close()
    assert verified.computed == verified.digest
    world.assert_account()
    child.say()


def test_private_writes_stay_private(running: Any) -> None:
    """Two processes, two arenas each: four sets of writes, and none is seen anywhere else."""
    path = running.file(1)
    script = (
        f"first, second = open_file({path!r}), open_file({path!r})\n"
        "first.buffer[0:4] = b'%d-1 '\nsecond.buffer[0:4] = b'%d-2 '\n"
        "say(); hear()\n"
        "say([bytes(each.buffer[0:4]).decode() for each in (first, second)])\n"
    )
    children = [running.spawn(script % (number, number)) for number in (1, 2)]
    for child in children:
        child.hear()
    for number, child in enumerate(children, 1):
        child.say()
        assert child.hear() == [f"{number}-1 ", f"{number}-2 "]
    assert running.run(f"say(data(open_file({path!r}))[:8].hex())\n") == content(1)[:8].hex()
