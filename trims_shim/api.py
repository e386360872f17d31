"""The public functions of the package.

Loads need none of them. They are for programs that inspect or warm the cache, or use records
without a framework.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from trims_shim import diagnostics, patches
from trims_shim.config import platform_problem
from trims_shim.diagnostics import Stats
from trims_shim.errors import DaemonUnavailable, UnsupportedFormat
from trims_shim.handles import DeviceHandle, Handle
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import DeviceId

if not platform_problem:
    from trims_shim.client.cache import cache

if TYPE_CHECKING:
    import torch

    _TorchDevice: TypeAlias = torch.device
else:  # annotations can be evaluated without a framework
    _TorchDevice = Any

__all__ = [
    "DeviceHandle",
    "Handle",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "fetch",
    "info",
    "open",
    "stats",
    "warm",
]

_Access = Literal["shared", "private"]

_DEVICE_ID_PREFIXES = ("GPU-", "MIG-")
_ONNX_SUFFIX = ".onnx"


def enable() -> None:
    """Patch the configured libraries in this process, now or when they are imported."""
    _check_platform()
    config = cache().config
    patches.enable(config.patches, elide_copies=config.elide_copies)


def disable() -> None:
    """Undo the patches. Models loaded before stay valid and shared."""
    patches.disable()


def enabled() -> bool:
    """Whether loads of the calling thread or task use the cache."""
    return patches.active()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Leave loads of this thread or task to the framework's own loader inside the block."""
    with patches.inactive():
        yield


def stats() -> Stats:
    """Return what the shim did in this process so far.

    ``served``: loads that took their bytes from the cache; ``hits``, ``misses``, ``joined``: images
    that were resident, were read for this process, or were being read for another;
    ``elided_copies``: tensors that ``load_state_dict`` or a conversion did not copy;
    ``bytes_shared``: the sizes of all images that were opened, also by ``open`` and ``warm``;
    ``fallbacks``: loads that went to the framework's own loader, by reason; ``events``: all
    counters, by ``event:reason``.
    """
    return diagnostics.stats()


def info() -> dict[str, Any]:
    """Return what ``trims info --json`` prints, for this process. Starts no daemon."""
    _check_platform()
    ensure_imported("trims_shim.inspection")
    from trims_shim.inspection import describe

    return describe()


def fetch(url: str, *, digest: str | None = None) -> str:
    """The path of the local copy of a remote file, or of a folder of files; downloaded once.

    ``url``: ``https://``, or any that fsspec knows (``s3://``, ``gs://``, ...; extra ``remote``).
    ``digest``: ``sha256:`` and 64 digits, checked before the copy gets its name; files only.

    However many processes of this user ask, one downloads and the others wait. The copy is what
    the remote has now; if it does not answer, an older one, with a warning. It is not deleted as
    long as this process, or a child forked from it, lives and has not fetched two newer ones of the
    same URL, nor as many others as a quarter of the files that it may have open (`ulimit -n`). Its
    files are read-only. Needs no daemon.

    Blocks. Raises ConfigError for another form of URL or digest, RemoteError, OSError (not there,
    not allowed, disk full).
    """
    _check_platform()
    ensure_imported("trims_shim.remote.fetching")
    from trims_shim.remote.fetching import fetch

    return fetch(url, digest=digest).path


def warm(
    path: str | os.PathLike[str],
    *,
    pin: bool = False,
    device: str | int | _TorchDevice | None = None,
    waiting: Callable[[], None] | None = None,
) -> str:
    """Load a model file into the cache without using it; blocks until it is there.

    Starts the daemon when none runs. ``pin`` keeps it resident. ``device`` as for :func:`open`.
    Returns the digest. Raises OSError for the file, TrimsError when the cache cannot take it.

    An ONNX model (``.onnx``) is prepared, for sessions on the CPU without options. That needs
    onnxruntime in this interpreter, takes neither ``pin`` nor ``device``, and returns the key.
    ``waiting`` is called now and then during the preparation, to show progress.
    """
    _check_platform()
    ensure_imported("trims_shim.wire.admin")
    from trims_shim.wire.admin import PinImageRequest

    name = os.fsdecode(path)
    if name.endswith(_ONNX_SUFFIX):
        with _naming_fetch(name):
            return _warm_onnx(name, is_plain=not pin and device is None, waiting=waiting)
    with _open(name, device, "shared", may_be_held=False) as handle:
        if pin:
            cache().request(PinImageRequest(handle.digest, is_pinned=True))
        return handle.digest


@contextlib.contextmanager
def _naming_fetch(name: str) -> Iterator[None]:
    """Where a URL is not found as a file, the error says what to do; not what signs it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            ensure_imported("trims_shim.remote.listing")
            from trims_shim.remote.listing import is_url, shown

            if is_url(name):
                advice = "a URL is not a file: open what trims_shim.fetch returns for it"
                raise FileNotFoundError(errno.ENOENT, advice, shown(name)) from None
        raise


def _warm_onnx(path: str, *, is_plain: bool, waiting: Callable[[], None] | None) -> str:
    if not is_plain:
        raise UnsupportedFormat(f"{path}: prepared ONNX models are neither pinned nor on a device")
    os.stat(path)
    try:
        ensure_imported("trims_shim.patches.onnxruntime_warm")
        from trims_shim.patches.onnxruntime_warm import prepare
    except ImportError as error:
        raise UnsupportedFormat(
            f"{path}: preparing it needs onnxruntime: pip install onnxruntime ({error})"
        ) from error
    model = prepare(path, waiting=waiting)
    model.release()
    return model.key


@overload
def open(
    path: str | os.PathLike[str],
    *,
    device: Literal["cpu"] | None = None,
    access: _Access = ...,
) -> Handle: ...


@overload
def open(
    path: str | os.PathLike[str], *, device: Literal["cuda"] | int, access: _Access = ...
) -> DeviceHandle: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    device: str | int | _TorchDevice | None,
    access: _Access = ...,
) -> Handle | DeviceHandle: ...


def open(
    path: str | os.PathLike[str],
    *,
    device: str | int | _TorchDevice | None = None,
    access: _Access = "shared",
) -> Handle | DeviceHandle:
    """Open a model file of any size through the cache; the caller closes the handle.

    ``device``: ``"cuda"``, ``"cuda:1"``, an index, or a device's own id (``"GPU-..."``) opens it in
    that device's memory and returns a :class:`DeviceHandle`; ``"cpu"`` is the same as None.
    ``access="private"`` makes every view of device memory a copy that may be written; on the host
    views are private anyway.

    Raises OSError for the file, ValueError for an invalid device or access, TrimsError when the
    cache cannot take it. No fallback: this is the cache itself.
    """
    _check_platform()
    if access not in ("shared", "private"):
        raise ValueError(f"access is 'shared' or 'private', not {access!r}")
    return _open(os.fsdecode(path), device, access, may_be_held=True)


def _open(
    name: str, device: str | int | _TorchDevice | None, access: _Access, *, may_be_held: bool
) -> Handle | DeviceHandle:
    """``may_be_held``: see :meth:`Cache.open`."""
    target = None if device is None else _device_id(device)
    with _naming_fetch(name):
        # O_NONBLOCK: a pipe is refused, not waited for.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        full_name = os.path.abspath(name)
        if target is None:
            host = cache().open(descriptor, name=full_name, min_bytes=1, may_be_held=may_be_held)
            return Handle(host, name)
        arena = cache().open_device(
            descriptor, name=full_name, device=target, min_bytes=1, may_be_held=may_be_held
        )
        return DeviceHandle(arena, name, is_private=access == "private")
    finally:
        os.close(descriptor)


def _check_platform() -> None:
    if platform_problem:
        raise DaemonUnavailable(platform_problem)


def _device_id(device: str | int | _TorchDevice) -> DeviceId | None:
    """Return the id of the named device; None for the host. Raises ValueError, DriverFailure."""
    ensure_imported("trims_shim.client.device_arenas")
    from trims_shim.client.device_arenas import device_id

    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    if text.startswith(_DEVICE_ID_PREFIXES):
        return text
    kind, _, number = text.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"{device!r} is no device: say 'cuda', 'cuda:0', an index or 'GPU-...'")
    return device_id(int(number) if number else _current_index())


def _current_index() -> int:
    # Without torch, the program cannot have chosen another device with it.
    torch = sys.modules.get("torch")
    is_chosen = torch is not None and torch.cuda.is_initialized()
    return int(torch.cuda.current_device()) if torch is not None and is_chosen else 0
