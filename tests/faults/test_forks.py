"""Forks, threads and the end of the interpreter. Promises: a child reads what it inherited and
opens its own, a fork finds no thread of ours, nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from device_images import safetensors
from harness import PATIENCE_S, World, content, process_state, wait_until
from onnx_models import perceptron, save

FORK = """
def fork(work):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            value = work()
        except BaseException as error:
            value = repr(error)
        os.write(writer, json.dumps(value).encode()); os.close(writer)
        os._exit(0)
    os.close(writer)
    return pid, reader
def join(child):
    pid, reader = child
    text = b''
    while chunk := os.read(reader, 65536): text += chunk
    os.close(reader); os.waitpid(pid, 0)
    return json.loads(text)
def is_right(arena, path):
    return data(arena) == open(path, 'rb').read()
def threads():
    return len(os.listdir('/proc/self/task'))
"""


def test_a_child_reads_what_it_inherited_and_opens_its_own(running: World) -> None:
    world = running
    one, two = world.file(1), world.file(2)
    said = world.run(
        FORK + f"one, two = {one!r}, {two!r}\n"
        "arena = open_file(one)\n"
        "def work():\n"
        "  inherited = is_right(arena, one)\n"
        "  arena.buffer[0:4] = b'mine'\n"
        "  own, again = open_file(two), open_file(one)\n"
        "  return [inherited, is_right(own, two), is_right(again, one),\n"
        "    is_right(arena.image.map(), one),\n"
        "    cache().status() if hasattr(cache(), 'status') else 0]\n"
        "results = [join(fork(work)) for _ in range(10)]\n"
        "say([results, is_right(arena, one)])\n"
    )
    assert said == [[[True, True, True, True, 0]] * 10, True]
    world.assert_account()


def test_the_parents_lease_outlives_the_parent(running: World) -> None:
    """The child still maps the image: it must not be evicted for the parent's end."""
    world = running
    path = world.file(1)
    child = world.spawn(
        FORK + f"arena = open_file({path!r})\n"
        "if os.fork():\n  os._exit(0)\n"
        f"say(os.getpid())\nhear()\nsay(is_right(arena, {path!r}))\n"
        "del arena\nimport gc; gc.collect()\nhear()\n"
    )
    child.hear()
    child.wait()
    assert [image.leases for image in world.status().images] == [1]
    child.say()
    assert child.hear() is True
    assert [image.leases for image in world.status().images] == [1]
    child.say()
    wait_until(lambda: not world.status().images[0].leases, "the lease ends with the last holder")


@pytest.mark.parametrize("patience_s", [1, 0])
def test_a_load_that_starts_the_daemon_does_not_wait_for_children(
    world: World, patience_s: int
) -> None:
    """Found: those forked in the middle had the pipes that it read from, until they ended; also
    where forks had waited as long as they do, on a machine on which a start takes longer.
    """
    path = world.file(1)
    said = world.run(
        f"path = {path!r}\n"
        f"from trims_shim import late_imports\nlate_imports._LONGEST_S = {patience_s}\n"
        "import threading\n"
        "loaded = []\n"
        "loader = threading.Thread(target=lambda: loaded.append(data(open_file(path))))\n"
        "loader.start()\n"
        "children = []\n"
        "while loader.is_alive() and len(children) < 200:\n"
        "  pid = os.fork()\n"
        "  if pid == 0: time.sleep(60), os._exit(0)\n"
        "  children.append(pid)\n"
        "loader.join(20)\n"
        "is_stuck = loader.is_alive()\n"
        "for pid in children: os.kill(pid, 9), os.waitpid(pid, 0)\n"
        "loader.join()\n"
        "say([len(children) > 0, is_stuck, loaded == [open(path, 'rb').read()]])\n"
    )
    assert said == [True, False, True]


def test_entries_of_the_search_path_that_are_none(world: World) -> None:
    """Python ignores all that is no string; the daemon is started nevertheless."""
    path = world.file(1)
    said = world.run(
        "import pathlib\n"
        "sys.path += [pathlib.Path('/'), b'/', None, '/nowhere:/at all']\n"
        f"say(data(open_file({path!r})) == open({path!r}, 'rb').read())\n"
    )
    assert said is True


def test_modules_beside_a_script_that_are_named_like_pythons(world: World, tmp_path: Path) -> None:
    """A program that runs all the same, as it has imported Python's own before."""
    path = world.file(1)
    for name in ("bisect", "queue", "selectors", "fcntl"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    said = world.run(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"say(data(open_file({path!r})) == open({path!r}, 'rb').read())\n"
    )
    assert said is True


def test_a_child_never_releases_the_parents_lease(running: World) -> None:
    world = running
    path = world.file(1)
    child = world.spawn(
        FORK + f"arena = open_file({path!r})\n"
        "def work():\n"
        "  global arena\n"
        "  del arena\n"
        "  import gc; gc.collect()\n"
        "  return 1\n"
        "for _ in range(5): join(fork(work))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n  del arena\n  sys.exit(0)\n"
        "say(os.waitpid(pid, 0)[1])\nhear()\n"
        f"say(is_right(arena, {path!r}))\n"
    )
    assert child.hear() == 0
    assert [image.leases for image in world.status().images] == [1]
    child.say()
    assert child.hear() is True


@pytest.mark.parametrize("then", ["sys.exit(7)", "return found"])
def test_a_child_that_is_forked_in_the_middle_of_a_load(running: World, then: str) -> None:
    """As by a signal handler. Found: the child took the answer that its parent waited for."""
    said = running.run(
        f"one, two = {running.file(1)!r}, {running.file(2)!r}\n"
        "from trims_shim.wire import handover\n"
        "open_file(one)\n"
        "wait, statuses = handover.wait_until_ready, []\n"
        "def wait_and_fork(*arguments, **options):\n"
        "  handover.wait_until_ready = wait\n"
        "  child = os.fork()\n"
        "  if child: statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "  found = wait(*arguments, **options)\n"
        f"  if not child: {then}\n"
        "  return found\n"
        "handover.wait_until_ready = wait_and_fork\n"
        "is_right = data(open_file(two)) == open(two, 'rb').read()\n"
        "if not statuses: os._exit(7 if is_right else 1)\n"
        "say([statuses, is_right])\n"
    )
    assert said == [[7], True]
    running.assert_account()


@pytest.mark.parametrize("moment", ["zmq.Poller.poll", "connection.Conversation"])
def test_a_child_that_is_forked_while_the_daemon_reads(running: World, moment: str) -> None:
    """By a signal handler, or right before. Found: ZeroMQ waited for ever in the child."""
    said = running.run(
        f"one, two = {running.file(1)!r}, {running.file(2)!r}\n"
        "import zmq\n"
        "open_file(one)\n"
        "from trims_shim.client import connection\n"
        f"call, child = {moment}, []\n"
        "def fork_and_call(*arguments, **more):\n"
        f"  {moment} = call\n"
        "  child.append(os.fork())\n"
        "  if child[0] == 0: signal.alarm(15)\n"
        "  if child[0]: statuses.append(os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]))\n"
        "  return call(*arguments, **more)\n"
        f"statuses, {moment} = [], fork_and_call\n"
        "try: found = data(open_file(two)) == open(two, 'rb').read()\n"
        "except errors.DaemonError: found = None\n"
        "if child[0] == 0: os._exit(7)\n"
        "say([statuses, found])\n",
        stall_timeout="10",
    )
    assert said == [[7], True]
    running.assert_account()


def test_a_fork_finds_no_thread_of_ours(running: World) -> None:
    """Python warns of a fork with threads (3.12); here they are counted, on every version."""
    world = running
    paths = [world.file(seed) for seed in range(1, 4)]
    said = world.run(
        FORK + f"paths = {paths!r}\n"
        "import warnings; warnings.simplefilter('error')\n"
        "counts = [threads()]\n"
        "for path in paths:\n"
        "  arena = open_file(path)\n"
        "  counts.append(threads())\n"
        "  counts.append(join(fork(threads)))\n"
        "say(counts)\n"
    )
    assert set(said) == {1}


def test_an_image_cannot_be_found_while_it_is_released(running: World) -> None:
    """Found: a thread that asked in this moment mapped whatever had got the descriptor's number."""
    path = running.file(1)
    said = running.run(
        "import weakref\n"
        "from trims_shim.client.arenas import Image\n"
        f"descriptor = os.open({path!r}, os.O_RDONLY)\n"
        "images, seen = weakref.WeakValueDictionary(), []\n"
        "image = images['digest'] = Image(descriptor, 100, digest='digest',\n"
        "  release=lambda: seen.append(images.get('digest')))\n"
        "del image\n"
        "say([len(seen), seen[0] is None])\n"
    )
    assert said == [1, True]


def test_threads_that_open_and_drop_the_same_files(running: World) -> None:
    """Settled files, so that every open finds the images of other threads, dying ones included."""
    paths = [running.file(seed, 1 << 14) for seed in range(1, 7)]
    time.sleep(0.3)
    said = running.run(
        f"paths = {paths!r}\n"
        "import threading\n"
        "sys.setswitchinterval(1e-6)\n"
        "right = {path: open(path, 'rb').read() for path in paths}\n"
        "until, wrong, count = time.monotonic() + 2, [], [0]\n"
        "def load():\n"
        "  while time.monotonic() < until or count[0] <= 100:\n"
        "    for path in paths:\n"
        "      if data(open_file(path)) != right[path]: wrong.append(path)\n"
        "      count[0] += 1\n"
        "workers = [threading.Thread(target=load) for _ in range(6)]\n"
        "for worker in workers: worker.start()\n"
        "for worker in workers: worker.join()\n"
        "say(wrong[:3])\n"
    )
    assert said == []
    running.assert_account()


def test_forks_while_threads_load(running: World) -> None:
    """A child of a busy process has its own connections and no lock that nobody will release."""
    world = running
    paths = [world.file(seed) for seed in range(1, 7)]
    said = world.run(
        FORK + f"paths = {paths!r}\n"
        "import threading\n"
        "stop, wrong, count = threading.Event(), [], [0]\n"
        "def load():\n"
        "  while not stop.is_set():\n"
        "    for path in paths:\n"
        "      if data(open_file(path))[:64] != open(path, 'rb').read(64): wrong.append(path)\n"
        "      count[0] += 1\n"
        "workers = [threading.Thread(target=load) for _ in range(4)]\n"
        "for worker in workers: worker.start()\n"
        "def work():\n"
        "  return [is_right(open_file(path), path) for path in paths]\n"
        "results = [join(fork(work)) for _ in range(15)]\n"
        "stop.set()\n"
        "for worker in workers: worker.join()\n"
        "say([results, wrong, count[0] > 20])\n",
        timeout_s=120,
    )
    assert said == [[[True] * 6] * 15, [], True]
    wait_until(lambda: not any(i.leases for i in world.status().images), "leases released")


def test_a_hook_of_the_programs_that_loads_in_the_child_before_ours_runs(running: World) -> None:
    """Found: it asked over the connection of its parent, and each got images that the other had
    asked for: other weights, without an error."""
    one, two = running.file(1), running.file(2)
    said = running.run(
        FORK + f"one, two = {one!r}, {two!r}\n"
        "found = []\n"
        "def load():\n"
        "  shared = cache()\n"
        "  found.append([is_right(open_file(two), two), shared is parents, cache() is shared])\n"
        "os.register_at_fork(after_in_child=load)\n"
        "arena, parents = open_file(one), cache()\n"
        "say([join(fork(lambda: found)), is_right(open_file(two), two)])\n"
    )
    assert said == [[[True, False, True]], True]


def test_a_child_with_the_number_of_its_parent(running: World) -> None:
    """Found: it asked over the connection of its parent. Both are the first process of a
    namespace."""
    one, two = running.file(1), running.file(2)
    said = running.run(
        FORK + f"one, two = {one!r}, {two!r}\n"
        "import ctypes\n"
        "def fork_apart(work):\n"
        "  if ctypes.CDLL(None).unshare(0x20000000): return 'refused'\n"  # CLONE_NEWPID
        "  return join(fork(work))\n"
        "def inner():\n"
        "  return [os.getpid(), cache() is parents, is_right(open_file(two), two)]\n"
        "def outer():\n"
        "  global parents\n"
        "  arena, parents = open_file(one), cache()\n"
        "  return [os.getpid(), fork_apart(inner), is_right(open_file(two), two)]\n"
        "say(fork_apart(outer))\n"
    )
    if said == "refused":
        pytest.skip("no new PID namespaces")
    assert said == [1, [1, False, True], True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_child_with_the_number_of_its_parent_that_changes_its_user(running: World) -> None:
    said = running.run(
        FORK + "import ctypes\n"
        "def fork_apart(work):\n"
        "  if ctypes.CDLL(None).unshare(0x20000000): return 'refused'\n"  # CLONE_NEWPID
        "  return join(fork(work))\n"
        "def inner():\n"
        "  found = [cache() is parents[0]]\n"
        "  os.seteuid(65534)\n"
        "  return [*found, cache() is parents[1], cache() is cache()]\n"
        "def outer():\n"
        "  global parents\n"
        "  parents = [cache()]\n"
        "  os.seteuid(65534)\n"
        "  parents.append(cache())\n"
        "  os.seteuid(0)\n"
        "  return fork_apart(inner)\n"
        "say(fork_apart(outer))\n"
    )
    if said == "refused":
        pytest.skip("no new PID namespaces")
    assert said == [False, False, True]


def test_a_fork_in_the_midst_of_a_load_leaves_the_collector_to_the_child(
    running: World, tmp_path: Path
) -> None:
    """A load pauses it, and the thread that would go on is not in the child."""
    path = str(tmp_path / "model.pt")
    said = running.run(
        FORK + "import gc, threading, torch\n"
        "from trims_shim.patches import torch_rebuild\n"
        f"torch.save({{'w': torch.zeros(1000)}}, {path!r})\n"
        "assemble = torch_rebuild.assemble\n"
        "begun, forked = threading.Event(), threading.Event()\n"
        "def slowly(*arguments):\n"
        "  begun.set(); forked.wait(60)\n"
        "  return assemble(*arguments)\n"
        "torch_rebuild.assemble = slowly\n"
        f"thread = threading.Thread(target=lambda: torch.load({path!r}))\n"
        "thread.start(); begun.wait(60)\n"
        "during = gc.isenabled()\n"
        "child = join(fork(gc.isenabled))\n"
        "forked.set(); thread.join()\n"
        "say([during, child, gc.isenabled()])\n",
        min_bytes="1",
    )
    assert said == [False, True, True]


def test_a_child_resizes_a_parameter_without_torchs_threads(running: World, tmp_path: Path) -> None:
    """Found: its bytes were copied in parallel, which torch alone does not do; the child has none
    of its parent's threads, and waited for them without end."""
    from trims_shim.patches import torch_repoint

    if not torch_repoint.has_swap():
        pytest.skip("this torch cannot resize such a storage")
    path = str(tmp_path / "model.pt")
    said = running.run(
        FORK + "import torch\n"
        "torch.set_num_threads(2)\n"
        f"torch.save({{'weight': torch.ones(200, 130)}}, {path!r})\n"
        "linear = torch.nn.Linear(130, 200, bias=False)\n"
        f"linear.load_state_dict(torch.load({path!r}))\n"
        "torch.ones(1000, 1000).exp()  # starts the threads\n"
        "def work():\n"
        "  signal.alarm(60)\n"
        "  storage = linear.weight.untyped_storage()\n"
        "  storage.resize_(storage.nbytes() + 64)\n"
        "  return linear.weight.detach().numpy().tolist() == [[1.0] * 130] * 200\n"
        "say([trims_shim.stats().elided_copies, join(fork(work))])\n",
        min_bytes="1",
    )
    assert said == [1, True]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(running: World, method: str) -> None:
    world = running
    path = world.file(1)
    script = (
        "import sys, os\n"
        "import trims_shim, multiprocessing\n"
        "from trims_shim.client.cache import cache\n"
        "def load(path):\n"
        "    descriptor = os.open(path, os.O_RDONLY)\n"
        "    arena = cache().open(descriptor, name=path, min_bytes=1)\n"
        "    os.close(descriptor)\n"
        "    return bytes(memoryview(arena.buffer)[:8]).hex()\n"
        "if __name__ == '__main__':\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        f"    first = load({path!r})\n"
        "    with multiprocessing.Pool(3) as pool:\n"
        f"        results = pool.map(load, [{path!r}] * 9)\n"
        "        pool.close(); pool.join()\n"
        "    assert set(results) == {first}, results\n"
    )
    program = world.root + "/program.py"
    with open(program, "w") as file:
        file.write(script)
    status = world.run(
        "import subprocess\n"
        f"say(subprocess.run([sys.executable, {program!r}], timeout=100).returncode)\n"
    )
    assert status == 0


def ends(world: World, script: str, *, timeout_s: float = PATIENCE_S) -> int:
    child = world.spawn(script)
    return child.wait(timeout_s)


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(3)\n",
        "arena.image.note = 1\n",
        "import threading; threading.Thread(target=lambda: time.sleep(0.2)).start()\n",
        "import atexit; atexit.register(lambda: open_file(path))\n",
        "import gc; cycle = [arena]; cycle.append(cycle); del arena\n",
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\n",
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: open_file(path)\n",
    ],
)
def test_the_end_of_the_interpreter(running: World, ending: str) -> None:
    """No hang, no crash; the status is the program's own."""
    path = running.file(1)
    running.settings["stall_timeout"] = "120"  # what waits for the daemon does not end in time
    status = ends(running, f"path = {path!r}\narena = open_file(path)\n{ending}")
    assert status == (3 if "exit(3)" in ending else 1 if "note" in ending else 0)
    wait_until(lambda: not running.status().images[0].leases, "the lease is released")


def test_the_end_while_a_daemon_thread_loads(make_world: Any) -> None:
    """The main thread ends while another waits for the daemon, which is stopped."""
    world = make_world(stall_timeout="120")  # what waits for the daemon does not end in time
    path = world.file(1)
    pid = world.start()
    for _ in range(3):
        with world.stopped(pid):
            child = world.spawn(
                "import threading\n"
                f"threading.Thread(target=lambda: open_file({path!r}), daemon=True).start()\n"
                "time.sleep(0.3)\nsay('bye')\nsys.exit(5)\n"
            )
            assert child.hear() == "bye"
            assert child.wait() == 5
    world.assert_quiet(1000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_waits(make_world: Any, number: int) -> None:
    """KeyboardInterrupt, or an exception of a signal handler: it passes, and the cache works on."""
    world = make_world(host_bytes="1G", stall_timeout="30")
    pid = world.start()
    large, small = world.sparse_file(256 << 20), world.file(3)

    def leases(path: str) -> int:
        return sum(each.leases for each in world.status().images if path in each.names)

    child = world.spawn(
        FORK + "def handler(*_): raise KeyboardInterrupt\n"
        f"signal.signal({int(number)}, handler)\n"
        f"kept = open_file({small!r})\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(3):\n"
        "  say('ready'); hear()\n"
        "  try:\n"
        f"    say('go'); open_file({large!r}); say('loaded')\n"
        "  except KeyboardInterrupt:\n"
        "    say('interrupted')\n"
        f"  say([is_right(open_file({small!r}), {small!r}), is_right(kept, {small!r})])\n"
        "say(len(os.listdir('/proc/self/fd')) - before)\n"
        f"say(open_file({large!r}).size_bytes)\n"
    )
    for _ in range(3):
        assert child.hear() == "ready"
        with world.stopped(pid):
            child.say()
            assert child.hear() == "go"
            wait_until(lambda: process_state(child.pid) == "S", "the client waits")
            time.sleep(0.2)
            world.signal(child.pid, number)
            said = child.hear()
        assert said == "interrupted"
        assert child.hear() == [True, True]
        assert leases(small), "what the process maps stays leased"
        wait_until(lambda: not leases(large), "nobody waits for the other")
    assert child.hear() <= 1
    assert child.hear() == 256 << 20
    assert child.wait() == 0
    wait_until(lambda: not any(i.leases for i in world.status().images), "leases released")


@pytest.mark.parametrize("kind", ["TimeoutError", "RuntimeError"])
def test_what_a_signal_handler_raises_ends_the_load(make_world: Any, kind: str) -> None:
    """A time limit of the program, say: the load must not go on in the framework's own loader."""
    world = make_world(stall_timeout="30")
    pid = world.start()
    path = world.file(1, name="model.pt")
    child = world.spawn(
        "import torch\n"
        f"class Late({kind}): pass\n"
        "def handler(*_): raise Late\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        f"torch.save(torch.zeros(1000), {path!r})\n"
        "say('ready'); hear()\n"
        f"try: say('go'); torch.load({path!r}); say('loaded')\n"
        "except Late: say('late')\n"
        f"say(torch.load({path!r}).tolist() == [0] * 1000)\n",
        min_bytes="1",
    )
    assert child.hear() == "ready"
    with world.stopped(pid):
        child.say()
        assert child.hear() == "go"
        wait_until(lambda: process_state(child.pid) == "S", "the client waits")
        time.sleep(0.5)
        world.signal(child.pid, signal.SIGUSR1)
        assert child.hear() == "late"
    assert child.hear() is True


def test_what_another_thread_raises_ends_the_load(make_world: Any) -> None:
    """How stopit and others end threads; there is no line that raises it."""
    world = make_world(stall_timeout="30")
    pid = world.start()
    path = world.file(1, name="model.pt")
    child = world.spawn(
        "import ctypes, threading, torch\n"
        "class Late(Exception): pass\n"
        f"torch.save(torch.zeros(1000), {path!r})\n"
        "def load():\n"
        f"  try: begun.set(); torch.load({path!r}); say('loaded')\n"
        "  except Late: say('late')\n"
        "begun, thread = threading.Event(), threading.Thread(target=load)\n"
        "say('ready'); hear()\n"
        "thread.start(); begun.wait(); time.sleep(0.5)\n"
        "thread_id = ctypes.c_ulong(thread.ident)\n"
        "ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(Late))\n"
        "say('raised'); thread.join()\n"
        f"say(torch.load({path!r}).tolist() == [0] * 1000)\n",
        min_bytes="1",
    )
    assert child.hear() == "ready"
    with world.stopped(pid):
        child.say()
        first = child.hear()
    assert {first, child.hear()} == {"raised", "late"}, "whichever thread comes first"
    assert child.hear() is True


def test_a_signal_that_only_interrupts_the_wait(running: World) -> None:
    """EINTR from a handler that returns is not an error."""
    path = running.file(4)
    pid = running.pid()
    child = running.spawn(
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'true\\n'))\nsay()\n"
        f"arena = open_file({path!r})\nsay(data(arena)[:8].hex())\n"
    )
    with running.stopped(pid):
        child.hear()
        for _ in range(10):
            running.signal(child.pid, signal.SIGUSR1)
            assert child.hear() is True
    assert child.hear() == content(4)[:8].hex()


def test_exec_keeps_nothing(running: World) -> None:
    """After exec no descriptor of ours is open and the lease is gone."""
    path = running.file(1)
    child = running.spawn(
        f"arena = open_file({path!r})\nsay()\nhear()\n"
        "os.execv('/bin/sh', ['sh', '-c',"
        " 'ls -l /proc/self/fd | grep -c -e trims -e segment -e sock; read x'])\n"
    )
    child.hear()
    child.say()
    assert child.hear() == 0
    wait_until(lambda: not running.status().images[0].leases, "the lease is released")
    child.say()


SUBINTERPRETER = """
import os, sys
import trims_shim
try:
    import _interpreters as interpreters
except ModuleNotFoundError:
    import _xxsubinterpreters as interpreters
code = '''
import os
try:
    import trims_shim
    trims_shim.open({path!r})
except Exception:
    pass
'''
def here():
    with trims_shim.open({path!r}) as handle:
        assert bytes(handle.buffer()[:8]) == bytes.fromhex({head!r})
if {main_first}:
    here()
for _ in range(3):
    other = interpreters.create()
    interpreters.run_string(other, code)
    interpreters.destroy(other)
if {main_first}:
    here()
"""


@pytest.mark.parametrize("main_first", [True, False])
def test_subinterpreters_come_and_go(running: World, main_first: bool) -> None:
    """ZeroMQ serves one interpreter only: another one loads by itself, and nothing breaks."""
    path = running.file(1)
    with open(path, "rb") as file:
        head = file.read(8).hex()
    script = SUBINTERPRETER.format(path=path, head=head, main_first=main_first)
    assert ends(running, script) == 0


def test_no_frames_are_made_in_another_interpreters_memory(running: World) -> None:
    """Found: ``sys._current_frames()`` in a subinterpreter made frames that the main one could not
    free, which ended the program (CPython 3.12 and 3.13)."""
    path = running.file(1)
    said = running.run(
        "asked = []\n"
        "sys._current_frames = lambda: asked.append(1) or {}\n"
        "from trims_shim.memory import reclaim\n"
        f"arena = open_file({path!r})\n"
        "reclaim.retire([reclaim.RetiredBlock(None, 0, 0)])\n"
        "say(asked)\n"
    )
    assert said == []


# --- nothing is imported where a fork does not wait -----------------------------------------------

SPY = """
import json, sys, threading
{imports}
from trims_shim import late_imports
found = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        if not late_imports._importing: found.append(name)
sys.meta_path.insert(0, Spy())
def load(path):
    {load}
thread = threading.Thread(target=load, args=sys.argv[1:])
thread.start()
thread.join()
print(json.dumps([found, trims_shim.stats().events]))
"""


def imported_by_a_load(world: World, path: str, imports: str, load: str, **settings: str) -> Any:
    """Modules that a fork of another thread might have caught; the load's events."""
    ended = subprocess.run(
        [sys.executable, "-c", SPY.format(imports=imports, load=load), path],
        env=world.environment(min_bytes="1", **settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(ended.stdout)


def tensors_file(world: World) -> str:
    path = world.file(name="model.safetensors")
    Path(path).write_bytes(safetensors([1 << 16]))
    return path


@pytest.mark.parametrize(
    ("patched", "imports", "load", "event"),
    [
        (
            "safetensors",
            "import trims_shim, safetensors.numpy",
            "safetensors.numpy.load_file(path)",
            "served:safetensors_numpy",
        ),
        (
            "safetensors",
            "import trims_shim, torch, safetensors.torch",
            "safetensors.torch.load_file(path)",
            "served:from_file",
        ),
        ("torch", "import trims_shim", "trims_shim.open(path).numpy('t0')", "open:miss"),
    ],
    ids=["numpy", "torch", "handle"],
)
def test_what_a_load_imports(
    world: World, patched: str, imports: str, load: str, event: str
) -> None:
    found, events = imported_by_a_load(world, tensors_file(world), imports, load, patches=patched)
    assert events[event] == 1
    assert found == []


def test_what_a_load_onto_a_device_imports(make_device_world: Any) -> None:
    world = make_device_world()
    found, events = imported_by_a_load(
        world,
        tensors_file(world),
        "import trims_shim",
        "trims_shim.open(path, device=0).close()",
    )
    assert events["open:miss"] == 1
    assert found == []


def test_what_a_session_of_bytes_imports(prepared_world: World) -> None:
    path = prepared_world.file(name="model.onnx")
    save(perceptron())(Path(path))
    found, events = imported_by_a_load(
        prepared_world,
        path,
        "import trims_shim, onnxruntime",
        "onnxruntime.InferenceSession(open(path, 'rb').read())",
    )
    assert events["offered:preparing"] == 1
    assert found == []
