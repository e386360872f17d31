"""What an emulated machine is, as seen from outside: its settings, its devices, its memory.

The settings travel in the environment (names that begin with TRIMS_TEST_CUDA_, which the package's
own configuration ignores); ``src/machine.c`` reads them. The allocations of all processes are files
in ``<directory>/allocations``. A file is alive while its shared flock is held, that is while a
descriptor or a mapping of it is left anywhere, be it in flight inside a socket; see
``src/registry.c``, whose rules for looking are repeated here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import processes

from emulated_cuda.building import build

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "GRANULARITY",
    "Allocation",
    "Emulated",
    "device_ids",
    "environment",
]

GRANULARITY = 2 << 20
"""What cuMemGetAllocationGranularity says."""
DEFAULT_MEMORY_BYTES = 1 << 30
"""Of each device, unless told otherwise. Pages that are never written take no memory."""

_PREFIX = "TRIMS_TEST_CUDA_"
_SETTINGS = {
    "names",
    "mig",
    "nvml_order",
    "nvml",
    "peer",
    "vmm",
    "exclusive",
    "mps",
    "context_bytes",
    "copy_delay_ms",
    "fail",
}
_TRAILER = struct.Struct("<8s48sQqQ")
"""struct trailer of registry.c."""
_TRAILER_BYTES = 4096
_MAGIC = b"trimscud"


def environment(
    directory: str | os.PathLike[str],
    *,
    devices: int = 1,
    memory_bytes: int | tuple[int, ...] = DEFAULT_MEMORY_BYTES,
    **faults: object,
) -> dict[str, str]:
    """The variables that show a child process an emulated machine; add them to its environment.

    ``directory`` holds the state of the machine, one for each test, best below /dev/shm; it is made
    here and removed by the caller. ``memory_bytes`` is that of each device, or one number for each.
    ``faults`` are further settings:

    - ``fail``: calls that fail, ``"cuMemCreate:2"`` the second call of each process; several are
      separated by commas. ``:2+`` is the second and all later ones, no number is every call. After
      ``=`` stands what happens: a CUresult number, ``kill`` (the process by SIGKILL) or ``hang``;
      else CUDA_ERROR_OUT_OF_MEMORY for what allocates and CUDA_ERROR_UNKNOWN for the rest.
    - ``copy_delay_ms``: every copy takes that much longer, on its stream.
    - ``context_bytes``: device memory that each active context takes.
    - ``mig``: every GPU is cut into so many MIG instances.
    - ``names``: of the devices, separated by commas.
    - ``nvml_order``: CUDA's indices in NVML's order, ``"1,0"``. ``nvml=0``: NVML is out of order.
    - ``peer=0``: no access between devices; ``peer=2``: copies between devices end well, and what
      arrives is not what was sent. ``vmm=0``: no shareable memory handles.
    - ``exclusive=1``: in the compute mode in which one process at a time has a context on a GPU;
      with ``mps=1`` contexts are shared by MPS.
    """
    unknown = sorted(set(faults) - _SETTINGS)
    if unknown:
        raise TypeError(f"unknown settings of the emulated machine: {', '.join(unknown)}")
    path = Path(directory).absolute()
    (path / "allocations").mkdir(parents=True, exist_ok=True)
    sizes = (memory_bytes,) * devices if isinstance(memory_bytes, int) else memory_bytes
    variables = {
        "LD_LIBRARY_PATH": _prepend(str(build()), os.environ.get("LD_LIBRARY_PATH", "")),
        f"{_PREFIX}DIR": str(path),
        f"{_PREFIX}DEVICES": str(devices),
        f"{_PREFIX}MEMORY_BYTES": ",".join(map(str, sizes)),
    }
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        # Meant for the real devices of this machine.
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(devices)))
    for name, value in faults.items():
        variables[_PREFIX + name.upper()] = str(int(value) if isinstance(value, bool) else value)
    return variables


def device_ids(devices: int = 1, mig: int = 0) -> tuple[str, ...]:
    """The ids of an emulated machine's devices: GPUs, or all their MIG instances."""
    if not mig:
        return tuple(_id("GPU", gpu, 0) for gpu in range(devices))
    return tuple(_id("MIG", gpu, part + 1) for gpu in range(devices) for part in range(mig))


def _id(kind: str, gpu: int, instance: int) -> str:
    # uuid_of() of machine.c. The first digits differ, so that an abbreviated id is unambiguous.
    number = gpu * 16 + instance
    return f"{kind}-{(number + 1) * 0x9E3779B9 % (1 << 32):08x}-7e57-4cda-8000-{number:012x}"


def _prepend(directory: str, others: str) -> str:
    return f"{directory}:{others}" if others else directory


@dataclass(frozen=True)
class Allocation:
    """Device memory that something still holds. ``kind``: vmm, linear or context."""

    name: str
    device: str
    size_bytes: int
    kind: str
    creator: int


class Emulated:
    """An emulated machine, looked at from outside of every process that uses it."""

    def __init__(
        self, directory: str | os.PathLike[str], *, devices: int = 1, mig: int = 0
    ) -> None:
        self.directory = Path(directory).absolute()
        self.ids = device_ids(devices, mig)

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Emulated:
        """The machine that :func:`environment` described."""
        return cls(
            variables[f"{_PREFIX}DIR"],
            devices=int(variables[f"{_PREFIX}DEVICES"]),
            mig=int(variables.get(f"{_PREFIX}MIG", "0")),
        )

    def used_bytes(self, device: int | str | None = None) -> int:
        """Memory in use on a device (its id or its number in ``ids``), or on all of them."""
        wanted = self.ids[device] if isinstance(device, int) else device
        return sum(each.size_bytes for each in self.allocations() if wanted in (None, each.device))

    def allocations(self) -> list[Allocation]:
        """What is alive now, in all processes; the order means nothing."""
        with self._locked():
            found = [self._look(path) for path in (self.directory / "allocations").iterdir()]
        return [each for each in found if each is not None]

    @contextlib.contextmanager
    def copies_held(self) -> Iterator[None]:
        """Copies of all processes begin, and none moves a byte before the block ends."""
        held = self.directory / "held"
        held.touch()
        try:
            yield
        finally:
            held.unlink()

    def processes(self) -> list[int]:
        """Live processes, other than this one, that were started to use this machine."""
        since_ticks = processes.started_ticks(os.getpid())
        return processes.with_variable(f"{_PREFIX}DIR={self.directory}", since_ticks=since_ticks)

    def assert_empty(self, *, timeout_s: float = 60.0) -> None:
        """Every process has ended and nothing holds memory; what this process holds counts too."""
        deadline = time.monotonic() + timeout_s
        gc.collect()
        while (left := self.processes() or self.allocations()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.processes(), f"processes of the emulated machine still run: {left}"
        assert not left, f"device memory was left behind: {left}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
            # A child forked meanwhile may share this descriptor: closing would not unlock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    @staticmethod
    def _look(path: Path) -> Allocation | None:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(-_TRAILER_BYTES, os.SEEK_END)
                magic, device, size, creator, _ = _TRAILER.unpack(file.read(_TRAILER.size))
                assert magic == _MAGIC, f"{path} is not an allocation"
                kind = path.name.partition(".")[0]
                return Allocation(path.name, device.rstrip(b"\0").decode(), size, kind, creator)
            path.unlink()
            fcntl.flock(file, fcntl.LOCK_UN)
            return None
