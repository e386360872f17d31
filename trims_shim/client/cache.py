"""The cache as this process uses it: images it holds, and the way from a file to an arena.

Owns the process-wide :class:`Cache`. Fork rule: the child forgets everything by replacing the
object; it closes, locks and logs nothing. Inherited connections stay open in the child on purpose:
it still maps the memory, so the parent's lease must outlive the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import logging
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from trims_shim import config as configuration
from trims_shim import diagnostics
from trims_shim.client.arenas import Arena, Image, Original
from trims_shim.client.connection import Granted
from trims_shim.client.descriptors import OwnDescriptor
from trims_shim.client.pool import Line, Pool
from trims_shim.client.prepared import PreparedLease, PreparedModel, prepared_model
from trims_shim.config import Config
from trims_shim.directories import directory_of
from trims_shim.errors import NoSpace, NotServed, WireError
from trims_shim.late_imports import ensure_imported
from trims_shim.specs import DeviceId, Digest, Identity, Variant
from trims_shim.wire import endpoint as endpoints
from trims_shim.wire import messages
from trims_shim.wire.handover import close_all

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["Cache", "cache", "configure", "exchange"]

_IDENTITIES_LIMIT = 4096
_REAP_PATIENCE_S = 1.0
"""How long a load on a full device waits until memory that this process let go of is unmapped."""


class Cache:
    """The images of this process, and its way to the daemon. Thread-safe."""

    def __init__(self, config: Config, *, dial: Callable[[], Line] | None = None) -> None:
        """``dial`` connects to something other than the daemon; then no daemon is started."""
        self.pid = os.getpid()
        self.config = config
        self.dial = dial
        self.endpoint = endpoints.choose(config)
        self._pool = Pool(config, self.endpoint, dial=dial)
        # No lock: a signal handler of the program may load in the middle of anything here.
        self._images: weakref.WeakValueDictionary[str, Image] = weakref.WeakValueDictionary()
        self._digests: dict[Identity, str] = {}
        self._is_elsewhere = False
        """Whether the daemon was found to see other files than this process."""
        self._variants: weakref.WeakValueDictionary[tuple[str, Variant], Image] = (
            weakref.WeakValueDictionary()
        )

    # --- opening ----------------------------------------------------------------------------------

    def open(
        self, descriptor: int, *, name: str, min_bytes: int | None = None, may_be_held: bool = True
    ) -> Arena:
        """Return a fresh private mapping of an open file's image; blocks while it is loaded.

        ``may_be_held``: one that this process holds will do. The daemon that it is of may have
        ended. The descriptor stays the caller's. Raises NotServed where the cache gains nothing,
        any other TrimsError when it cannot help.
        """
        identity = self._check(descriptor, name, min_bytes)
        image = self._local(identity, name) if may_be_held else None
        arena = self._lease(descriptor, identity, name) if image is None else image.map()
        diagnostics.count("bytes_shared", amount=arena.size_bytes)
        return arena

    def variant(self, image: Image, variant: Variant) -> Image | None:
        """Return a variant of ``image``.

        None where it does not exist (yet), see :meth:`Connection.open_variant`, or could not be
        mapped later (:meth:`Image.spare_descriptor`). Starts no daemon. Raises TrimsError when the
        cache cannot help.
        """
        key = (image.digest, variant)
        original = Original(image.digest, variant, weakref.ref(image), image.name)
        found = self._variants.get(key)
        if found is not None and found.is_open:
            found.original = original  # The one before may be gone.
            _note(found.name, "local")
            return found

        descriptor = image.descriptor

        def ask(connection: Line) -> Image | None:
            name = f"{image.name} ({variant})"
            leased = _lease_of(
                lambda: connection.open_variant(descriptor, name, variant), name, connection
            )
            if leased is None:
                return None
            made = leased.image
            _note(name, leased.reply.outcome)
            if made.size_bytes != variant.size_bytes(image.size_bytes):
                raise WireError(f"{name}: {made.size_bytes} bytes for {image.size_bytes}")
            return made

        made = self._pool.ask(ask, may_start=False)
        if made is None or made.spare_descriptor():
            return None
        made.original = original
        self._variants[key] = made
        diagnostics.count("bytes_shared", amount=made.size_bytes)
        return made

    def open_device(
        self,
        descriptor: int,
        *,
        name: str,
        device: DeviceId,
        min_bytes: int | None = None,
        may_be_held: bool = True,
        is_numbers: bool = False,
    ) -> DeviceArena:
        """Return the image of an open file in device memory; blocks while it is loaded.

        All loads of this process share one read-only arena. ``may_be_held`` as for :meth:`open`,
        and else the daemon loads it, too. ``is_numbers``: the file is a variant of a model file,
        and the device holds it as it is. The descriptor stays the caller's.
        Raises NotServed where the cache gains nothing, any other TrimsError when it cannot help.
        """
        if not self.config.device:
            raise NotServed("device_off", f"{name}: device memory is not shared (TRIMS_DEVICE=0)")
        # Not at the top: most programs have no device, and it is a tenth of this file's imports.
        ensure_imported("trims_shim.client.device_arenas")
        from trims_shim.client import device_arenas

        identity = self._check(descriptor, name, min_bytes)
        digest = self._digests.get(identity, "") if may_be_held else ""
        arena = device_arenas.held(digest, device)
        if arena is None:
            arena = self._lease_device(descriptor, identity, name, device, is_numbers)
        else:
            _note(name, "local")
        diagnostics.count("bytes_shared", amount=arena.size_bytes)
        return arena

    def digest_of(self, descriptor: int) -> Digest:
        """The digest of an open file; empty unless this process has opened its image before."""
        return self._digests.get(Identity.from_stat(os.fstat(descriptor)), "")

    def opened(self) -> frozenset[Digest]:
        """Digests of the images that this process has opened, on the host or on a device."""
        return frozenset(list(self._digests.values()))

    def open_prepared(
        self,
        recipe: messages.SessionRecipe,
        *,
        package: str,
        search_path: tuple[str, ...],
        descriptor: int | None = None,
        path: str = "",
        digest: str = "",
        externals: Callable[[], AbstractContextManager[Mapping[str, int]]] | None = None,
    ) -> PreparedModel:
        """Return the prepared form of an ONNX model; orders it if there is none; does not wait.

        The model is the open file ``descriptor`` (the caller's), found at the absolute ``path`` or,
        when that is empty, a memfd of its bytes. Without a descriptor, the model is only looked up
        by ``digest``. ``package`` and ``search_path`` are for the process that prepares (see
        :class:`OpenPreparedRequest`). ``externals`` opens the model's other files, by location, for
        a daemon in another container.

        Raises NotServed (``preparing``, ``unknown``, or the reason of a refusal), any other
        TrimsError when the cache cannot help.
        """
        request = messages.OpenPreparedRequest(0, path, digest, recipe, package, search_path)
        directory = ""
        with contextlib.suppress(OSError):  # The name is relative to a directory that is gone.
            directory = directory_of(
                self.config.cache_dir, cache_home=self.config.cache_home, name="prepared"
            )

        def ask(connection: Line) -> tuple[messages.OpenPreparedReply, PreparedLease]:
            was_elsewhere = self._is_elsewhere
            with contextlib.ExitStack() as held:
                shown = files = None
                if was_elsewhere:
                    shown = held.enter_context(_opened_directory(directory))
                    if shown is not None and externals is not None:
                        files = held.enter_context(externals())
                reply = connection.open_prepared(
                    request, descriptor=descriptor, directory=shown, externals=files
                )
            if reply.reason == "other_namespace" and not was_elsewhere:
                # Names of files do not matter, if both see the same prepared models.
                self._is_elsewhere = True
                return ask(connection)

            def release() -> None:
                if reply.lease:
                    connection.release(reply.lease)

            return reply, PreparedLease(release)

        reply, lease = self._pool.ask(ask, may_start=self.config.autostart)
        name = path or digest[:12]
        model = prepared_model(reply, name=name, release=lease.release, directory=directory)
        _note(name, reply.outcome)
        return model

    def refuse_excluded(self, path: str) -> None:
        """Raise NotServed for a file that the user has excluded; ``path`` is absolute."""
        for pattern in self.config.exclude:
            if fnmatch.fnmatchcase(path, pattern):
                raise NotServed("excluded", f"{path} is excluded (TRIMS_EXCLUDE: {pattern})")

    def _check(self, descriptor: int, name: str, min_bytes: int | None) -> Identity:
        """``min_bytes`` is given by whoever asks for this very file, excluded or not."""
        if min_bytes is None:
            self.refuse_excluded(name)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotServed("not_regular", f"{name} is not a regular file")
        least = self.config.min_bytes if min_bytes is None else min_bytes
        if status.st_size < max(1, least):
            raise NotServed("small_file", f"{name} has {status.st_size} bytes")
        return Identity.from_stat(status)

    def _local(self, identity: Identity, name: str) -> Image | None:
        """Return an image that this process still holds; a settled identity means equal content."""
        image = self._images.get(self._digests.get(identity, ""))
        if image is None or not image.is_open:
            return None
        _note(name, "local")
        return image

    def _lease(self, descriptor: int, identity: Identity, name: str) -> Arena:
        def ask(connection: Line) -> _Leased | None:
            leased = _lease_of(lambda: connection.open_image(descriptor, name), name, connection)
            if leased is not None:
                _note(name, leased.reply.outcome)
            return leased

        leased = self._pool.ask(ask, may_start=self.config.autostart)
        assert leased is not None
        image = leased.image
        arena = image.map()
        if not image.spare_descriptor() and leased.reply.is_settled:
            self._settle(identity, image.digest)
            self._images[image.digest] = image
        return arena

    def _lease_device(
        self, descriptor: int, identity: Identity, name: str, device: DeviceId, is_numbers: bool
    ) -> DeviceArena:
        from trims_shim.client import device_arenas

        def ask(connection: Line) -> _Leased | None:
            def open_image() -> Granted:
                return connection.open_image(descriptor, name, tier=device, is_numbers=is_numbers)

            return _lease_of(open_image, name, connection)

        dropped_before = device_arenas.dropped()
        try:
            leased = self._pool.ask(ask, may_start=self.config.autostart)
        except NoSpace:
            # The program may have let go of an earlier model that is not yet unmapped.
            device_arenas.reap(_REAP_PATIENCE_S)
            if device_arenas.dropped() == dropped_before:
                raise
            leased = self._pool.ask(ask, may_start=self.config.autostart)
        assert leased is not None
        outline, reply, allocations = leased
        arena = device_arenas.adopt(outline, reply.device, allocations, device=device, name=name)
        _note(name, reply.outcome)
        if reply.is_settled:
            self._settle(identity, arena.digest)
        return arena

    def _settle(self, identity: Identity, digest: Digest) -> None:
        if len(self._digests) >= _IDENTITIES_LIMIT:
            self._digests.clear()
        self._digests[identity] = digest

    # --- requests ---------------------------------------------------------------------------------

    def request(self, message: Any) -> Any:
        """Make a control request. Starts no daemon: raises DaemonUnavailable when none runs."""
        return self._pool.ask(lambda each: each.request(message), may_start=False)

    def welcome(self, *, may_start: bool = False) -> messages.Welcome:
        """Return the daemon's Welcome."""
        return self._pool.ask(lambda each: each.welcome, may_start=may_start)

    def report(self) -> None:
        """See :meth:`Pool.report`."""
        self._pool.report()

    def close(self) -> None:
        """At exit: report the counters and close idle connections."""
        self._pool.close()


class _Leased(NamedTuple):
    """What was granted. The end of ``image`` closes all descriptors, and the lease.

    On a device tier ``image`` is the outline, and ``allocations`` are the memory.
    """

    image: Image
    reply: messages.OpenImageReply
    allocations: tuple[OwnDescriptor, ...]


def _lease_of(ask: Callable[[], Granted | None], name: str, connection: Line) -> _Leased | None:
    """Return what is granted, if something is.

    An interrupt may come at any call, also that of a function: so what ``ask`` returns is owned by
    this one, and then, with the image, by both.
    """
    owned: tuple[OwnDescriptor, ...] = ()
    granted = ask()
    try:
        if granted is None:
            return None
        reply, segment, allocations = granted
        owned = tuple(map(OwnDescriptor, (segment, *allocations)))

        def release() -> None:
            _close(owned[1:])
            connection.release(reply.lease)

        image = Image(owned[0], reply.size_bytes, digest=reply.digest, name=name, release=release)
        return _Leased(image, reply, owned[1:])
    except BaseException:
        if owned:
            _close(owned)
        elif granted is not None:
            close_all([granted.descriptor, *granted.allocations])
        raise


@contextlib.contextmanager
def _opened_directory(path: str) -> Iterator[int | None]:
    """Its descriptor inside the block; None if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _close(descriptors: tuple[OwnDescriptor, ...]) -> None:
    for each in descriptors:
        each.close()


def _note(name: str, outcome: str) -> None:
    """Count an image served from the cache, and log it for TRIMS_LOG=debug."""
    diagnostics.count("open", outcome)
    diagnostics.log(logging.DEBUG, "%s: from the cache (%s)", name, outcome)


# --- the process-wide object ----------------------------------------------------------------------

_ours: dict[int, Cache] = {}
"""The cache of this process, once there is one, by its effective user: each user has a daemon. Of
threads that make one at once, one succeeds."""
_forgotten: list[Cache] = []
_has_hooks = False


def configure(config: Config) -> None:
    """Use these settings from now on; open connections and leases of the old ones stay."""
    before = exchange(Cache(config))
    if before is not None:
        _forgotten.append(before)


def exchange(other: Cache | None) -> Cache | None:
    """Make ``other`` this process's cache; return the old one, still open. For tests."""
    user = os.geteuid()
    before = _ours.get(user)
    if other is not None:
        _ours[user] = other
    else:
        _ours.pop(user, None)
    _install_hooks()
    return before


def cache() -> Cache:
    """Return the cache of this process."""
    found = _held()
    if found is None:
        found = _ours.setdefault(os.geteuid(), Cache(configuration.current()))
        _install_hooks()
    return found


def _held() -> Cache | None:
    """Return the cache of this process, if it has one; in a forked child, never its parent's.

    A hook of the program's may load in the child before ours runs, and another thread may fork
    before ours is installed. The old object is kept so that its destructors do not run here.
    """
    found = _ours.get(os.geteuid())
    if found is not None and found.pid != os.getpid():
        found = _anew(found)
    return found


def _anew(other: Cache) -> Cache:
    _forgotten.append(other)
    ours = _ours[os.geteuid()] = Cache(other.config, dial=other.dial)
    return ours


def _install_hooks() -> None:
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        diagnostics.reporter = _report
        os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)


def _after_fork_in_child() -> None:
    """Only forget."""
    # The first process of a PID namespace has the number of its parent, if that is one, too.
    if os.getppid() == 0:
        for each in list(_ours.values()):
            each.pid = 0
    _held()
    diagnostics.reset_after_fork()


def _report() -> None:
    ours = _held()
    if ours is not None:
        ours.report()


def _at_exit() -> None:
    ours = _held()
    if ours is not None:
        ours.close()
