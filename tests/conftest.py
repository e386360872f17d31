"""What all tests share: no user settings, no daemon of the machine, short property tests."""

from __future__ import annotations

import atexit
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import emulated_cuda as emulation
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "short", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("short")

# Before anything imports torch: threads for tensors of a few numbers cost more than what they do,
# and on a busy machine a time slice each time that they wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# From 1.31 on onnxruntime reports its use, and opens descriptors for it at any moment.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# A shell that starts the tests in the background ignores it, and then so would their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports trims_shim. Tests that want a daemon make a socket directory of their own.
for _name in [name for name in os.environ if name.startswith("TRIMS_")]:
    del os.environ[_name]
os.environ["TRIMS_AUTOSTART"] = "0"
os.environ["TRIMS_SOCKET_DIR"] = os.path.join(tempfile.gettempdir(), "trims-tests-without-daemon")
os.environ["XDG_CONFIG_HOME"] = os.devnull
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="trims-tests-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for meanwhile: it took a quarter of the time, in each worker.

    Imported modules and tests stay, so that the collector finds little in ever more objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test come first, then those of many: what runs last must be short."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))


@pytest.fixture
def no_leak() -> Iterator[None]:
    """The test leaves no descriptor open."""
    gc.collect()  # what tests before left to the collector goes now, not during this one
    gc.freeze()  # what is left is not looked at again: thousands of tests, and all their imports
    from harness import open_descriptors

    before = open_descriptors()
    yield
    # Threads of tests before may be in the middle of something, which ends. Looks are counted, not
    # seconds: these threads stood still, too, while a busy machine let this process wait.
    for _ in range(200):
        if not open_descriptors() - before:
            break
        time.sleep(0.05)
    assert open_descriptors() - before == set()


@pytest.fixture(autouse=True, scope="module")
def no_segment_left() -> Iterator[None]:
    """A file of tests leaves this process no segment that it did not have before."""
    from harness import PATIENCE_S, World

    def held() -> set[int]:
        return {each.inode for each in World.segments(os.getpid())}

    before = held()
    yield
    if held() - before:
        gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while held() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() - before == set(), "segments are left: does a parameter's exception keep frames?"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process may have 4096 descriptors, as nearly every machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"a process may have {hard} descriptors here: `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """No thread that the test started still runs; those of tests before may end meanwhile."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., str]:
    """Make a file of some content in the test's directory; its path."""

    def make(content: bytes, name: str = "model.bin") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return make


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A directory for sockets; below ``tmp_path`` their names can be too long."""
    directory = tempfile.mkdtemp(prefix="trims-", dir="/tmp")
    yield Path(directory)
    shutil.rmtree(directory)


# --- the GPU tier without a GPU -------------------------------------------------------------------


@pytest.fixture
def make_emulated_environment() -> Iterator[Callable[..., dict[str, str]]]:
    """Emulated machines with settings of their own (``emulated_cuda.environment``).

    What they return is added to the environment of child processes. At the end every one of these
    must be gone and no device memory be held, also not by this process.
    """
    machines: list[emulation.Emulated] = []

    def make(**settings: object) -> dict[str, str]:
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        directory = tempfile.mkdtemp(prefix="trims-emulated-", dir=base)
        machines.append(emulation.Emulated(directory))
        try:
            return emulation.environment(directory, **settings)  # type: ignore[arg-type]
        except emulation.NoCompiler as error:
            pytest.skip(str(error))

    yield make
    problems = []
    for machine in machines:
        try:
            machine.assert_empty()
        except AssertionError as error:
            problems.append(str(error))
        shutil.rmtree(machine.directory)
    assert not problems, problems


@pytest.fixture
def emulated_environment(
    make_emulated_environment: Callable[..., dict[str, str]], request: pytest.FixtureRequest
) -> dict[str, str]:
    """The variables that show a child process an emulated machine with one GPU of 1 GiB.

    Other settings by ``parametrize("emulated_environment", [{"devices": 2}], indirect=True)``.
    """
    return make_emulated_environment(**getattr(request, "param", {}))


@pytest.fixture
def emulated_cuda(
    emulated_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[emulation.Emulated]:
    """An emulated machine for this process, and for the children it starts meanwhile.

    Settings as for ``emulated_environment``.
    """
    try:
        emulation.load()
    except emulation.RealDriver as error:
        pytest.skip(str(error))
    for name, value in emulated_environment.items():
        monkeypatch.setenv(name, value)
    _forget_devices()
    yield emulation.Emulated.of(emulated_environment)
    _forget_devices()


def _forget_devices() -> None:
    """What this process knows of the machine, on both sides of the driver."""
    from trims_shim.memory import driver, nvml

    emulation.reset()
    # Afterwards: a thread that an earlier test has left may ask meanwhile, and would be given a
    # driver that is not initialised any more.
    driver.forget()
    nvml.forget()


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new_is_garbage() -> None:
    """The collector does not look again at what is there: libraries, and other tests' modules."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_patch_is_forgotten() -> Iterator[None]:
    """What a test file leaves patched is known to the switch, so that later files can undo it.

    A wrapper that nobody knows of stays for good, and is wrapped once more by the next test.
    """
    yield
    patches = sys.modules.get("trims_shim.patches")
    collection = sys.modules.get("onnxruntime.capi.onnxruntime_inference_collection")
    if patches is None or collection is None:
        return
    sessions = "onnxruntime_session"
    method = collection.InferenceSession._create_inference_session
    assert hasattr(method, "__wrapped__") == (sessions in patches.applied())
    assert not hasattr(getattr(method, "__wrapped__", None), "__wrapped__")
