"""onnxruntime's CUDA provider on shared weights: ``TRIMS_ORT_CUDA=1`` and unmodified programs.

Skipped where onnxruntime cannot make a session on the device, which its CPU packages never can.
What is not known before it has run on a GPU is recorded as a verdict: whether onnxruntime takes
memory of ours where it lies, and with which of its options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Child, wait_until

from gpu.conftest import GpuWorld
from gpu.onnx_file import LAYERS, ROWS, WIDTH, write_dense
from gpu.test_gpu_memory import SLACK_BYTES, Watcher

WEIGHT_BYTES = 4 * WIDTH * (ROWS + LAYERS * WIDTH)
PROCESSES = 3
PREPARED_WITHIN_S = 90.0

_PROBE = """\
import sys, tempfile
sys.path[:0] = [{tests!r}]
try:
    import numpy, onnxruntime
except ImportError as error:
    sys.exit(print(error))
from gpu.onnx_file import write_dense
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    sys.exit(print("this onnxruntime is built without CUDA"))
if hasattr(onnxruntime, "preload_dlls"):
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls()
onnxruntime.set_default_logger_severity(4)
with tempfile.TemporaryDirectory() as directory:
    path = write_dense(directory + "/model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CUDAExecutionProvider"])
names = session.get_providers()
print("" if "CUDAExecutionProvider" in names else "onnxruntime makes sessions of " + str(names))
"""

_PROGRAM = """\
import gc
import numpy, onnxruntime
from trims_shim import stats
from trims_shim.client import device_arenas
if hasattr(onnxruntime, "preload_dlls"):
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls()
def create(options=()):
    return onnxruntime.InferenceSession(
        MODEL, providers=[("CUDAExecutionProvider", dict(options)), "CPUExecutionProvider"]
    )
def outputs(session):
    found = []
    for rows in (1, 7):
        ids = numpy.arange(rows, dtype=numpy.int64) * 13 % ROWS
        found.append(session.run(None, {"ids": ids})[0].tobytes().hex())
    return found
def events():
    return dict(stats().events)
"""


@pytest.fixture(scope="module")
def onnxruntime_device(machine: dict[str, str]) -> None:
    """Skips where onnxruntime cannot use the device."""
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(tests=tests)],
        env=os.environ | machine | {"TRIMS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if reason := done.stdout.strip():
        # No failure even where a device is required: the package is too large to be carried.
        pytest.skip(f"onnxruntime has no CUDA device: {reason}")


class OnnxWorld:
    """A world with a model, and programs that make sessions of it."""

    def __init__(self, world: GpuWorld) -> None:
        self.world = world
        world.settings |= {
            "enabled": "1",
            "cache_dir": os.path.join(world.root, "cache"),
            "ort_cuda": "1",
            "prepare_priority": "normal",
            "min_bytes": "1",
        }
        self.path = write_dense(os.path.join(world.root, "model.onnx"))

    def client(self, script: str, **settings: str) -> Any:
        prelude = f"MODEL = {self.path!r}\nROWS = {ROWS}\n"
        return self.world.client(prelude + _PROGRAM + script, **settings)

    def run(self, script: str, **settings: str) -> Any:
        child = self.client(script, **settings)
        with self.world.ended(child):
            return child.hear(60)

    def plain(self, options: str = "()") -> list[str]:
        """What the program computes without the shim."""
        found: list[str] = self.run(f"say(outputs(create({options})))", enabled="0")
        return found

    def prepared(self, options: str = "()") -> dict[str, int]:
        """Load until it is served; the events of the process that was, or of the last one."""
        script = f"session = create({options})\nsay(events())"
        found: dict[str, int] = {}

        def is_served() -> bool:
            found.clear()
            found.update(self.run(script))
            waits = {"fallback:preparing", "fallback:unknown"}
            return not waits & found.keys()

        wait_until(is_served, "a prepared model", timeout_s=PREPARED_WITHIN_S, interval_s=1)
        return found


@pytest.fixture(scope="module")
def onnx_world(
    onnxruntime_device: None, machine: dict[str, str], device: str
) -> Iterator[OnnxWorld]:
    """One for all tests: what has been prepared is good for the next, also after a kill."""
    world = GpuWorld(machine, device)
    try:
        yield OnnxWorld(world)
    finally:
        world.close()


def test_weights_are_used_where_they_lie(onnx_world: OnnxWorld, record: Any) -> None:
    world = onnx_world
    events = world.prepared()
    in_place = events.get("initializers:in_place", 0)
    record(
        "in place" if in_place else "not in place",
        in_place=in_place,
        not_in_place=events.get("initializers:not_in_place", 0),
        events=events,
    )
    assert events.get("served:onnxruntime") == 1, events
    assert in_place >= LAYERS, events
    assert world.run("say(outputs(create()))") == world.plain()


def test_processes_share_one_copy(onnx_world: OnnxWorld, record: Any) -> None:
    world = onnx_world
    world.prepared()
    watcher = Watcher(world.world)
    world.world.wait_for_uploader()
    script = "hear()\nsession = create()\nsay(outputs(session))\nhear()\nsay(outputs(session))\n"

    def started(**settings: str) -> tuple[Child, list[str], int]:
        """A process with a session, its outputs, and the device memory that it takes."""
        child = world.client(script, **settings)
        before = watcher.free_bytes()
        child.say()
        return child, child.hear(60), before - watcher.free_bytes()

    plain, expected, plain_bytes = started(enabled="0")
    plain.kill()
    holders = [started() for _ in range(PROCESSES)]
    assert [outputs for _, outputs, _ in holders] == [expected] * PROCESSES
    taken = [taken_bytes for _, _, taken_bytes in holders]
    record("one copy", plain_bytes=plain_bytes, taken_bytes_by_processes=taken)
    world.world.kill_daemon()
    for holder, _, _ in holders:
        holder.say()
        assert holder.hear(60) == expected
        holder.kill()
    # Contexts and libraries take the same in each; the weights are there already.
    assert max(taken) <= plain_bytes - WEIGHT_BYTES + SLACK_BYTES


def test_memory_goes_with_the_last_session(onnx_world: OnnxWorld) -> None:
    world = onnx_world
    world.prepared()
    found = world.run(
        "sessions = [create() for _ in range(2)]\n"
        "before = device_arenas.dropped()\n"
        "expected = outputs(sessions.pop()); gc.collect(); device_arenas.reap(1)\n"
        "one = device_arenas.dropped() - before\n"
        "same = outputs(sessions[0]) == expected\n"
        "sessions.clear(); gc.collect(); device_arenas.reap()\n"
        "say([one, same, device_arenas.dropped() - before])\n"
    )
    assert found == [0, True, 1]


def test_a_process_ends_with_its_session(onnx_world: OnnxWorld) -> None:
    world = onnx_world
    world.prepared()
    child = world.client("session = create()\nsay(len(outputs(session)))\n")
    assert child.hear(60) == 2
    assert child.wait(60) == 0
    assert "Exception" not in child.errors()


OPTIONS = {
    "numbers": {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT"},
    "memory": {"gpu_mem_limit": str(2 << 30), "arena_extend_strategy": "kSameAsRequested"},
    "layout": {"prefer_nhwc": "1"},
    "graph": {"enable_cuda_graph": "1"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_provider(onnx_world: OnnxWorld, record: Any, name: str) -> None:
    """Whether or not such sessions are served, they compute the same."""
    world, options = onnx_world, json.dumps(OPTIONS[name])
    if name == "graph":
        # A graph is captured for one shape, on inputs that stay where they are.
        outputs = "def outputs(session):\n    return session.get_providers()\n"
    else:
        outputs = ""
    expected = world.run(f"{outputs}say(outputs(create({options})))", enabled="0")
    events = world.prepared(options)
    found = world.run(f"{outputs}say(outputs(create({options})))")
    is_served = "served:onnxruntime" in events
    record("served" if is_served else "original", is_same=found == expected, events=events)
    assert found == expected


def test_a_program_with_a_stream_of_its_own(onnx_world: OnnxWorld, record: Any) -> None:
    world = onnx_world
    expected = world.plain()
    world.prepared()
    found = world.run(
        "from trims_shim.memory.driver import driver\n"
        "with driver().context(0):\n"
        "    stream = driver().new_stream()\n"
        "session = create({'user_compute_stream': str(stream)})\n"
        "say([outputs(session), events()])\n"
    )
    record("same" if found[0] == expected else "different", events=found[1])
    assert found[0] == expected
    assert found[1].get("served:onnxruntime") == 1, found[1]
