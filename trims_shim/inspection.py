"""What ``trims info`` and :func:`trims_shim.info` show: this process, this machine, the daemon.

Only looks: starts no daemon, imports no framework (unless asked to), changes nothing, and works
with unusable settings. Memory kinds and the CUDA driver are tried in a child interpreter, to leave
the caller's process alone: trying one of the kinds forks, and children forked after the driver was
initialised cannot use CUDA. The child makes no CUDA context either.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import os
import pkgutil
import platform
import resource
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trims_shim import _activate, patches
from trims_shim import config as configuration
from trims_shim._version import __version__
from trims_shim.children import NoAnswer, ask_child
from trims_shim.client.cache import Cache, cache
from trims_shim.client.connection import Connection
from trims_shim.client.pool import is_older
from trims_shim.config import Config
from trims_shim.daemon.prepared import directory as prepared_directory
from trims_shim.daemon.prepared.directory import PreparedSettings
from trims_shim.errors import (
    ConfigError,
    DaemonUnavailable,
    IncompatibleDaemon,
    PatchError,
    TrimsError,
)
from trims_shim.memory import copying_native
from trims_shim.memory.limits import machine_bytes, memory_limit_bytes
from trims_shim.memory.nvml import INSTALL, is_installed
from trims_shim.patches.points import AppliedPatch, PatchState, resolve
from trims_shim.remote.copies import Copies, Copy
from trims_shim.wire.admin import GetStatusRequest
from trims_shim.wire.endpoint import Endpoint
from trims_shim.wire.messages import Welcome

__all__ = [
    "DaemonStatus",
    "Description",
    "DeviceFound",
    "DeviceSupport",
    "LimitStatus",
    "MemoryKind",
    "PatchStatus",
    "PreparedSupport",
    "RemoteCopies",
    "SettingStatus",
    "SocketStatus",
    "WrapperChain",
    "describe",
    "look",
]

_POINTS = ("PatchPoint", "DevicePoint")
"""What patch files make patch points by."""
_DISTRIBUTIONS = (
    "torch",
    "safetensors",
    "transformers",
    "onnxruntime",
    "numpy",
    "pyzmq",
    "msgpack",
    "blake3",
    "rich",
    "nvidia-ml-py",
)
_COMMONLY_WRAPPED = (
    "torch:load",
    "torch.nn.modules.module:Module.load_state_dict",
    "safetensors.torch:load_file",
    "safetensors.numpy:load_file",
)
_CHAIN_LIMIT = 20
_PROBE = """\
from trims_shim.memory.host import probe
print(json.dumps([[each.kind.value, each.is_available, each.reason] for each in probe()]))
"""
_DEVICE_PROBE = """\
from dataclasses import astuple
from trims_shim.errors import DriverFailure
from trims_shim.memory import nvml
from trims_shim.memory.driver import driver
devices, problem = (), ""
try:
    devices = driver().devices()
except DriverFailure as error:
    problem = str(error)
free = [nvml.free_bytes(each.id) for each in devices]
rows = [
    [*astuple(each)[:-1], -1 if n is None else n, each.is_exclusive]
    for each, n in zip(devices, free)
]
print(json.dumps([problem, nvml.driver_version() or "", rows]))
"""


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """A patch point; ``state`` is applied, skipped, waiting, undone or off."""

    library: str
    target: str
    supported: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class WrapperChain:
    """A function that tools like to wrap: the places of its wrappers now, outermost first."""

    target: str
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """A kind of host memory, and why it does not work here.

    ``is_used``: by the daemon that runs, or else by one that this process would start.
    """

    kind: str
    is_available: bool
    reason: str
    is_used: bool


@dataclass(frozen=True, slots=True)
class DeviceFound:
    """A device that this process may use; ``index`` as CUDA numbers it here.

    ``can_export``: its memory can be shared read-only. ``free_bytes``: by NVML; -1 if unknown.
    ``is_exclusive``: its compute mode lets one process at a time use it.
    """

    index: int
    id: str
    name: str
    total_bytes: int
    can_export: bool
    free_bytes: int
    is_exclusive: bool = False


@dataclass(frozen=True, slots=True)
class DeviceSupport:
    """Whether weights can be shared in device memory here; ``problem`` says why not.

    ``driver`` is NVIDIA's version by NVML; if NVML does not answer, ``nvml`` says why.
    """

    is_available: bool
    problem: str
    backend: str
    driver: str
    nvml: str
    devices: tuple[DeviceFound, ...]


@dataclass(frozen=True, slots=True)
class PreparedSupport:
    """Whether ONNX models can be prepared here, as far as files go; ``problem`` says why not.

    ``spare_bytes`` is the file system's free space, less the part that is left to others.
    """

    is_available: bool
    problem: str
    directory: str
    exists: bool
    budget_bytes: int
    spare_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteCopies:
    """Copies of remote models on this user's disk, with what is there of unfinished ones."""

    directory: str
    copies: int
    size_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class SocketStatus:
    """The socket directory; ``problem`` says why it is not usable (yet)."""

    directory: str
    handover: str
    exists: bool
    mode: str
    owner: int
    problem: str


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """Whether a daemon answers, and whether it was started with the settings of this process.

    ``is_own``: it is this user's, or none is there. ``can_start``: a load would start one, also in
    place of an older one. ``problem``: why none answers, or the one that does serves nothing here.
    """

    is_running: bool
    pid: int
    package: str
    protocol: int
    has_same_settings: bool
    is_own: bool
    can_start: bool
    problem: str


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """Limits on this process."""

    open_files_soft: int
    open_files_hard: int
    memory_bytes: int
    physical_memory_bytes: int


@dataclass(frozen=True, slots=True)
class SettingStatus:
    """A setting, its value as written, and the value's source."""

    name: str
    variable: str
    value: str
    source: str
    is_read_at_daemon_start: bool
    help: str


@dataclass(frozen=True, slots=True)
class Description:
    """The whole description. ``problems``: unusable settings; the shim is then inactive."""

    versions: dict[str, str]
    problems: tuple[str, ...]
    patches: tuple[PatchStatus, ...]
    wrappers: tuple[WrapperChain, ...]
    memory: tuple[MemoryKind, ...]
    device: DeviceSupport
    prepared: PreparedSupport
    remote: RemoteCopies
    socket: SocketStatus
    daemon: DaemonStatus
    limits: LimitStatus
    config_file: str
    settings: tuple[SettingStatus, ...]


def describe() -> dict[str, Any]:
    """:func:`look`, as JSON-able data."""
    return asdict(look())


def look(*, with_libraries: bool = False) -> Description:
    """Describe this process, machine and daemon.

    ``with_libraries`` imports most patched libraries first, so that patches apply. Takes about a
    tenth of a second, or several seconds with the libraries.
    """
    if with_libraries:
        _import_libraries()
    with _usable_cache() as (the_cache, problems):
        return _look(the_cache, problems)


def _look(the_cache: Cache, problems: tuple[str, ...]) -> Description:
    settings = the_cache.config
    daemon = _daemon(the_cache)
    return Description(
        versions=dict(_versions()),
        problems=problems,
        patches=tuple(_patches(settings, problems)),
        wrappers=tuple(_wrappers()),
        memory=_memory(the_cache, daemon),
        device=_device(settings),
        prepared=_prepared(the_cache),
        remote=_remote(settings),
        socket=_socket(the_cache.endpoint),
        daemon=daemon,
        limits=_limits(),
        config_file=configuration.config_file(os.environ),
        settings=tuple(_settings(settings)),
    )


def _import_libraries() -> None:
    names = dict.fromkeys(name for _, _, modules, _ in patches.PATCH_FILES for name in modules)
    for module in names:
        # Slower than all the others together.
        if module.startswith(("transformers", "peft", "diffusers")):
            continue
        # A missing or broken library shows as "waiting".
        with contextlib.suppress(Exception):
            importlib.import_module(module)


@contextlib.contextmanager
def _usable_cache() -> Iterator[tuple[Cache, tuple[str, ...]]]:
    """Yield this process's cache, or one with the usable settings, and the problems."""
    try:
        the_cache = cache()
    except ConfigError:
        settings, found = configuration.load_usable()
        the_cache = Cache(settings)
        with contextlib.closing(the_cache):
            yield the_cache, tuple(found)
    else:
        yield the_cache, tuple(filter(None, [_activate.config_problem]))


def _versions() -> Iterator[tuple[str, str]]:
    yield "trims_shim", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for name in _DISTRIBUTIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    is_compiled = copying_native.is_available()
    yield "copy engine", "C++" if is_compiled else "Python (slower; no compiler at installation)"
    yield "kernel", f"{platform.release()} {platform.machine()}"


# --- patches --------------------------------------------------------------------------------------


def _patches(settings: Config, problems: tuple[str, ...]) -> Iterator[PatchStatus]:
    for patch_file, wanted_by, modules, _ in patches.PATCH_FILES:
        done = patches.applied().get(patch_file)
        if done is not None:
            for each in done:
                point, reason = each.point, each.reason
                if each.state is PatchState.APPLIED and not _is_in_effect(each):
                    reason = "wrapped or replaced since, by another tool or a reload"
                yield _status(point.target, point.supported, each.state.value, reason)
            continue
        if patch_file in patches.requested():
            verb = "is" if len(modules) == 1 else "are"
            state, reason = "waiting", f"applies when {' and '.join(modules)} {verb} imported"
        else:
            state, reason = "off", _why_off(settings, patch_file, wanted_by, problems)
        for declared in _declared(patch_file):
            yield _status(*declared, state, reason)


def _is_in_effect(patch: AppliedPatch) -> bool:
    """Whether the library, as a program finds it now, calls the replacement."""
    try:
        return resolve(patch.point.target).original is patch.replacement
    except PatchError:  # Its module was taken out of sys.modules.
        return False


def _status(target: str, supported: str, state: str, reason: str) -> PatchStatus:
    library = target.partition(":")[0].partition(".")[0]
    return PatchStatus(library, target, supported, state, reason)


def _why_off(
    settings: Config, patch_file: str, wanted_by: tuple[str, ...], problems: tuple[str, ...]
) -> str:
    if problems:
        return "a setting cannot be used"
    if not settings.enabled:
        return f"TRIMS_ENABLED=0 ({settings.source('enabled')})"
    if not set(wanted_by) & set(settings.patches):
        return f"TRIMS_PATCHES={settings.text('patches')} ({settings.source('patches')})"
    if patch_file in patches.ELIDING and not settings.elide_copies:
        return f"TRIMS_ELIDE_COPIES=0 ({settings.source('elide_copies')})"
    return "trims_shim.disable() was called"


def _declared(patch_file: str) -> list[tuple[str, str]]:
    """Return (target, supported) of the patch points in a patch file.

    Reads its source, because importing it may import torch.
    """
    try:  # also from a zip archive
        source = pkgutil.get_data("trims_shim.patches", f"{patch_file}.py")
    except OSError:  # a frozen program may be without
        return []
    points = []
    for node in ast.walk(ast.parse(source or b"")):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _POINTS:
            target, supported = map(ast.literal_eval, node.args[:2])
            points.append((target, supported))
    return points


def _wrappers() -> Iterator[WrapperChain]:
    """Follow ``__wrapped__`` in modules that are already imported; wakes no lazy ones."""
    for target in _COMMONLY_WRAPPED:
        try:
            function = resolve(target).original
        except PatchError:
            continue
        chain: list[str] = []
        while function is not None and len(chain) < _CHAIN_LIMIT:
            chain.append(_origin(function))
            function = getattr(function, "__wrapped__", None)
        yield WrapperChain(target, tuple(chain))


def _origin(function: object) -> str:
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{type(function).__module__}.{type(function).__qualname__}"


# --- machine --------------------------------------------------------------------------------------


def _memory(the_cache: Cache, daemon: DaemonStatus) -> tuple[MemoryKind, ...]:
    try:
        rows = ask_child(_PROBE)
    except NoAnswer as error:
        return (MemoryKind("unknown", False, f"not tried: {error}", False),)
    used = _kind_of(the_cache) if daemon.is_running and not daemon.problem else ""
    if not used:
        wanted = the_cache.config.memory_kind
        works = (kind for kind, is_available, _ in rows if is_available)
        used = next((kind for kind in works if wanted in ("auto", kind)), "")
    return tuple(
        MemoryKind(kind, is_available, reason, kind == used) for kind, is_available, reason in rows
    )


def _kind_of(the_cache: Cache) -> str:
    try:
        kind: str = the_cache.request(GetStatusRequest()).memory.kind
    except TrimsError:  # it has ended since
        return ""
    return kind


def _device(settings: Config) -> DeviceSupport:
    problem, driver, nvml = "", "", "not asked"
    no_package = "" if is_installed() else "nvidia-ml-py is not installed"
    devices: tuple[DeviceFound, ...] = ()
    try:
        problem, driver, rows = ask_child(_DEVICE_PROBE)
        devices = tuple(DeviceFound(*row) for row in rows)
        nvml = "" if driver else no_package or "it does not answer"
    except NoAnswer as error:
        problem = f"not tried: {error}"
    problem = (
        _device_off(settings)
        or problem
        or (no_package and f"{no_package}; {INSTALL}")
        or _unfit(devices, settings)
    )
    return DeviceSupport(
        is_available=not problem,
        problem=problem,
        backend=settings.device_backend,
        driver=driver,
        nvml=nvml,
        devices=devices,
    )


def _device_off(settings: Config) -> str:
    if not settings.device:
        return f"TRIMS_DEVICE=0 ({settings.source('device')})"
    if settings.device_backend == "off":
        return f"TRIMS_DEVICE_BACKEND=off ({settings.source('device_backend')})"
    return ""


def _unfit(devices: tuple[DeviceFound, ...], settings: Config) -> str:
    if not devices:
        return "this process sees no CUDA device; look at CUDA_VISIBLE_DEVICES and `nvidia-smi -L`"
    if all(each.is_exclusive for each in devices):
        return (
            "the compute mode of every device lets one process at a time use it; run `nvidia-smi "
            "-c DEFAULT`, or MPS"
        )
    if settings.device_backend == "vmm" and not any(each.can_export for each in devices):
        return "no device can export its memory as a descriptor; set TRIMS_DEVICE_BACKEND=ipc"
    return ""


def _prepared(the_cache: Cache) -> PreparedSupport:
    found = PreparedSettings.of(the_cache.config)
    budget_bytes = spare_bytes = 0
    problem = found.problem or prepared_directory.examine(found.directory)
    if not _is_own(the_cache.endpoint):
        problem = "the daemon is another user's, and prepares models for that one only"
    try:
        space = prepared_directory.space_of(found.directory)
        budget_bytes, spare_bytes = found.budget.of(space.total_bytes), space.spare_bytes
    except OSError as error:
        problem = problem or str(error)
    return PreparedSupport(
        is_available=not problem,
        problem=problem,
        directory=found.directory,
        exists=os.path.isdir(found.directory),
        budget_bytes=budget_bytes,
        spare_bytes=spare_bytes,
    )


def _remote(settings: Config) -> RemoteCopies:
    copies = Copies.of(settings)
    found: list[Copy] = []
    budget_bytes = 0
    with contextlib.suppress(OSError):
        budget_bytes = copies.budget_bytes()
        found = copies.copies()
    size_bytes = sum(each.size_bytes for each in found)
    return RemoteCopies(copies.directory, len(found), size_bytes, budget_bytes)


def _socket(endpoint: Endpoint) -> SocketStatus:
    problem, mode, owner = "", "", -1
    try:
        status = os.lstat(endpoint.directory)
        mode, owner = f"{stat.S_IMODE(status.st_mode):04o}", status.st_uid
        endpoint.check_path()
        endpoint.check_owner()
    except FileNotFoundError:
        problem = "does not exist yet; the first daemon makes it"
    except (TrimsError, OSError) as error:
        problem = str(error)
    return SocketStatus(endpoint.directory, endpoint.handover, bool(mode), mode, owner, problem)


def _daemon(the_cache: Cache) -> DaemonStatus:
    try:
        welcome, problem = _welcome(the_cache)
    except TrimsError as error:
        # Any other error than these is of a daemon that is there, or of a directory.
        is_missing = type(error) is DaemonUnavailable and not the_cache.endpoint.unwritable_place()
        return DaemonStatus(
            is_running=False,
            pid=0,
            package="",
            protocol=0,
            has_same_settings=False,
            is_own=_is_own(the_cache.endpoint),
            can_start=is_missing and the_cache.config.autostart,
            problem=str(error),
        )
    is_own = _is_own(the_cache.endpoint)
    is_replaced = bool(problem) and is_own and is_older(welcome)
    return DaemonStatus(
        is_running=True,
        pid=welcome.pid,
        package=welcome.package,
        protocol=welcome.protocol,
        has_same_settings=welcome.config_hash == the_cache.config.daemon_hash(),
        is_own=is_own,
        can_start=is_replaced and the_cache.config.autostart,
        problem=problem,
    )


def _welcome(the_cache: Cache) -> tuple[Welcome, str]:
    """The daemon's Welcome, and the problem if it is of a protocol that is not understood."""
    try:
        return the_cache.welcome(), ""
    except IncompatibleDaemon as error:
        other = Connection(the_cache.endpoint, stall_timeout_s=the_cache.config.stall_timeout)
        with contextlib.closing(other):
            return other.welcome, str(error)


def _is_own(endpoint: Endpoint) -> bool:
    return endpoint.owner() in (None, os.geteuid())


def _limits() -> LimitStatus:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LimitStatus(
        open_files_soft=soft,
        open_files_hard=hard,
        memory_bytes=memory_limit_bytes(),
        physical_memory_bytes=machine_bytes(),
    )


def _settings(settings: Config) -> Iterator[SettingStatus]:
    for setting in configuration.SETTINGS:
        yield SettingStatus(
            name=setting.name,
            variable=setting.variable,
            value=settings.text(setting.name),
            source=settings.source(setting.name),
            is_read_at_daemon_start=setting.is_daemons,
            help=setting.help,
        )
