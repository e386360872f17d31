"""What the tests of this directory share: the device, a world on it, and a place for verdicts.

All are marked ``gpu``, and skipped where there is no CUDA device: the one condition, told by the
driver itself. Those that need torch on the device are skipped as well where torch has none, which
is so on an emulated device. With ``GPU_CHECK_REQUIRED=1`` (scripts/gpu_check.sh, on a machine that
is meant to have a GPU) the missing device is a failure. ``GPU_CHECK_EMULATED`` names the directory
of an emulated machine to run on; what is found there is no statement about a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Child, World, close_worlds

from gpu.files import write_model

TESTS = str(Path(__file__).resolve().parents[1])
_RESULTS = Path(TESTS).parent / "docs" / "results" / "gpu-check.json"
EMULATED = os.environ.get("GPU_CHECK_EMULATED", "")
# An emulated device is as slow as the processor.
TENSORS, TENSOR_BYTES = 32, (1 if EMULATED else 4) << 20
MODEL_BYTES = TENSORS * TENSOR_BYTES
EMULATED_BYTES = 2 << 30
_REASON_CHARACTERS = 4000
UPLOADER_ENDS_S = 3.0
"""Longer than it lives without work (the setting ``uploader_idle``), and takes to end."""

_PRELUDE = f"""\
sys.path.insert(0, {TESTS!r})
from gpu.rawcuda import Cuda, CudaError
from gpu.files import device_digest, write_model
from trims_shim.client import device_arenas
def open_device(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return cache().open_device(descriptor, name=path, device=DEVICE, min_bytes=1)
    finally:
        os.close(descriptor)
"""


_is_worker = False
"""Of pytest-xdist. Not told by the environment: that of a dry run may be a worker's."""


def pytest_configure(config: pytest.Config) -> None:
    """Note what this process is."""
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Everything in this directory is marked; nobody can forget it.

    What has not passed on a GPU yet comes first: the run may be cut off.
    """
    for item in items:
        if _is_ours(item):
            item.add_marker(pytest.mark.gpu)
    yield  # the others choose and order
    outcomes = {each["test"]: each["outcome"] for each in json.loads(_RESULTS.read_text())["tests"]}
    ours = [item for item in items if _is_ours(item)]
    ordered = iter(sorted(ours, key=lambda item: outcomes.get(item.nodeid) == "passed"))
    items[:] = [next(ordered) if _is_ours(item) else item for item in items]


def _is_ours(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each outcome at once in the file ``GPU_CHECK_TESTS``: the run may be cut off.

    A worker of pytest-xdist leaves that to the process that has started it.
    """
    path = os.environ.get("GPU_CHECK_TESTS")
    if not path or _is_worker:
        return
    if report.when != "call" and report.passed:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    with open(path, "a") as file:
        file.write(json.dumps(entry | {"why": reason[-_REASON_CHARACTERS:]}) + "\n")


def _missing(reason: str) -> None:
    if os.environ.get("GPU_CHECK_REQUIRED") == "1":
        pytest.fail(f"a CUDA device is required here: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def machine() -> dict[str, str]:
    """Variables that lead a child to the device; skips where there is none."""
    variables: dict[str, str] = {}
    if EMULATED:
        import emulated_cuda

        variables = emulated_cuda.environment(EMULATED, devices=2, memory_bytes=EMULATED_BYTES)
    probe = f"import sys; sys.path.insert(0, {TESTS!r})\n"
    probe += "from gpu.rawcuda import why_no_device; print(why_no_device())"
    # In a process of its own: a process that has asked the driver must not fork any more.
    answer = _python(probe, variables)
    if answer:
        _missing(f"no CUDA device: {answer}")
    return variables


@pytest.fixture(scope="session")
def device(machine: dict[str, str]) -> str:
    """The id of the first device."""
    script = "from trims_shim.memory.driver import driver; print(driver().devices()[0].id)"
    return _python(script, machine)


@pytest.fixture(scope="session")
def torch_device(machine: dict[str, str]) -> str:
    """``cuda``; skips where torch has no device."""
    if _python("import torch; print(torch.cuda.is_available())", machine) != "True":
        _missing("no CUDA device that torch can use")
    return "cuda"


def _python(script: str, variables: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class GpuWorld(World):
    """A world whose processes see the device."""

    def __init__(self, machine: dict[str, str], device: str, **settings: str) -> None:
        defaults = {"host_bytes": "2G", "uploader_idle": "1", "stall_timeout": "30"}
        super().__init__(**{**defaults, **settings})
        self.machine = machine
        self.device = device

    def environment(self, **settings: str) -> dict[str, str]:
        """With the variables of an emulated machine, where it is one."""
        return super().environment(**settings) | self.machine

    def model(self, seed: int = 1, *, tensors: int = TENSORS) -> str:
        """A file of random tensors, by default of MODEL_BYTES."""
        path = os.path.join(self.root, f"model-{seed}-{tensors}.safetensors")
        return write_model(path, seed=seed, tensors=tensors, tensor_bytes=TENSOR_BYTES)

    def client(self, script: str, *, prefix: tuple[str, ...] = (), **settings: str) -> Child:
        """A process that finds open_device(), device_digest() and Cuda besides the usual."""
        prelude = f"DEVICE = {self.device!r}\n{_PRELUDE}"
        return self.spawn(prelude + script, prefix=prefix, **settings)

    def warm(self, path: str) -> None:
        """Resident on the device, and every process that has a context for it has ended."""
        with self.ended(self.client(f"open_device({path!r}); say()")) as client:
            client.hear(60)
        self.wait_for_uploader()

    @contextlib.contextmanager
    def ended(self, child: Child) -> Iterator[Child]:
        """A client that has ended after the block."""
        yield child
        status = child.wait(60)
        assert status == 0, child.errors()
        child.close()
        self.children.remove(child)

    def uploaders(self) -> list[int]:
        """Processes that fill device memory for this world's daemon."""
        return self.running("daemon.device.uploader")

    def wait_for_uploader(self) -> None:
        """One that has been idle makes room for another, without a context on the device."""
        time.sleep(UPLOADER_ENDS_S)

    def tiers(self, path: str) -> set[str]:
        """Where a file's image is resident."""
        return {image.tier for image in self.status().images if path in image.names}


@pytest.fixture
def make_gpu_world(machine: dict[str, str], device: str) -> Iterator[Callable[..., GpuWorld]]:
    """Worlds with settings; nothing of them may be left."""
    worlds: list[GpuWorld] = []

    def make(**settings: str) -> GpuWorld:
        worlds.append(GpuWorld(machine, device, **settings))
        return worlds[-1]

    yield make
    close_worlds(worlds)


@pytest.fixture
def gpu_world(make_gpu_world: Callable[..., GpuWorld]) -> GpuWorld:
    """A world with the usual settings."""
    return make_gpu_world()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note a verdict and its figures in the file ``GPU_CHECK_RECORD``, one JSON object a line."""

    def write(verdict: str, **figures: Any) -> None:
        entry = {"experiment": request.node.name, "verdict": verdict, "figures": figures}
        if path := os.environ.get("GPU_CHECK_RECORD"):
            with open(path, "a") as file:
                file.write(json.dumps(entry) + "\n")

    return write
