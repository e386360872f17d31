"""Where daemon and clients meet: the socket directory, its checks and the names in it.

The directory belongs to one user and is closed to others (0700), or to root and a group for a
machine-wide daemon. A directory that another user could have made is refused, because the owner of
the socket decides which bytes become weights. Search order: ``TRIMS_SOCKET_DIR``,
``$XDG_RUNTIME_DIR/trims``, ``/run/user/UID/trims``, ``trims-UID`` in ``$TMPDIR``, ``/tmp`` or
``/var/tmp``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from trims_shim.config import Config
from trims_shim.directories import make
from trims_shim.errors import ConfigError, DaemonUnavailable, UnusableSocketDir

__all__ = ["UNMAPPED_USER", "Endpoint", "choose"]

_SUN_PATH_LIMIT_BYTES = 107
_LONGEST_NAME = "control-0123456789abcdef.sock"
UNMAPPED_USER = 65534
"""In a user namespace, all users whom it does not map look like this one (overflowuid)."""


class Endpoint(NamedTuple):
    """Names inside one socket directory, which is absolute."""

    directory: str

    @property
    def handover(self) -> str:
        """The SEQPACKET socket that clients connect to first."""
        return os.path.join(self.directory, "handover.sock")

    @property
    def lock(self) -> str:
        """Held by the daemon for as long as it accepts clients."""
        return os.path.join(self.directory, "daemon.lock")

    @property
    def start_lock(self) -> str:
        """Held by the one client that is starting a daemon."""
        return os.path.join(self.directory, "start.lock")

    @property
    def log(self) -> str:
        """The file with the daemon's output."""
        return os.path.join(self.directory, "daemon.log")

    def control(self, instance: str) -> str:
        """The ROUTER socket of one daemon instance (``instance``: 16 hexadecimal digits)."""
        return os.path.join(self.directory, f"control-{instance}.sock")

    def events(self, instance: str) -> str:
        """The PUB socket of one daemon instance."""
        return os.path.join(self.directory, f"events-{instance}.sock")

    def stamp(self) -> tuple[int, int] | None:
        """Return a stamp of the daemon's socket; inode numbers alone are reused at once."""
        try:
            status = os.stat(self.handover)
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def check_path(self) -> None:
        """Raise ConfigError for a directory that no socket can be in: too long, or not UTF-8."""
        try:
            self.directory.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"socket directory {self.directory!r} is not UTF-8, as ZeroMQ needs it; set "
                "TRIMS_SOCKET_DIR to another one"
            ) from error
        length = len(os.fsencode(os.path.join(self.directory, _LONGEST_NAME)))
        if length > _SUN_PATH_LIMIT_BYTES:
            raise ConfigError(
                f"socket directory {self.directory} is too long: its socket names take {length} "
                f"bytes and the kernel allows {_SUN_PATH_LIMIT_BYTES}; set TRIMS_SOCKET_DIR to a "
                f"shorter path"
            )

    def owner(self) -> int | None:
        """Return the user whose daemon has made the socket; None if there is no socket."""
        try:
            return os.stat(self.handover).st_uid
        except OSError:
            return None

    def unwritable_place(self) -> str:
        """Return the directory that keeps this user from starting a daemon; "" if none does."""
        place = self.directory
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        return "" if _is_writable(place) else place

    def how_to_start(self) -> str:
        """Return the advice of errors that report a missing daemon."""
        if place := self.unwritable_place():
            return (
                f"you may not write to {place}: whoever may can start one, or set TRIMS_SOCKET_DIR "
                "to a directory of yours"
            )
        return "`trims daemon` starts one, and so does a load (unless TRIMS_AUTOSTART=0)"

    def check_owner(self) -> None:
        """Check the directory. Raises DaemonUnavailable if missing, UnusableSocketDir if unsafe."""
        try:
            status = os.lstat(self.directory)
        except FileNotFoundError:
            raise DaemonUnavailable(
                f"no socket directory {self.directory}, so no daemon has run; {self.how_to_start()}"
            ) from None
        except OSError as error:
            raise UnusableSocketDir(f"socket directory {self.directory}: {error}") from error
        _check_status(self.directory, status)

    def create(self, *, has_group: bool = False) -> None:
        """Make the directory if it is missing, and check it. Raises UnusableSocketDir.

        ``has_group``: it is for a group, too, which has to get through those above it.
        """
        self.check_path()
        try:
            if has_group:
                make(self.directory, 0o750, above=0o755, least=0o755)
            else:
                make(self.directory, above=0o755)
        except OSError as error:
            raise UnusableSocketDir(
                f"socket directory {self.directory} cannot be made: {error}; set TRIMS_SOCKET_DIR"
            ) from error
        self.check_owner()


def choose(config: Config) -> Endpoint:
    """Return this user's endpoint, by the search order in the module docstring."""
    if config.socket_dir:
        return Endpoint(os.path.abspath(os.path.expanduser(config.socket_dir)))
    uid = os.geteuid()
    places = (place for place in _places(config, uid) if _is_writable(place[0]))
    found = (Endpoint(os.path.join(*place)) for place in places)
    return next(filter(_can_hold_sockets, found), Endpoint(f"/tmp/trims-{uid}"))


def _places(config: Config, uid: int) -> Iterator[tuple[str, str]]:
    """Yield bases and names in them, in order.

    A base is looked at when its turn comes: it may be on a server that does not answer.
    """
    runtime_dir = _unless_others(config.runtime_dir)
    if os.path.isabs(runtime_dir):  # By its specification, a relative one is ignored.
        yield runtime_dir, "trims"
    yield f"/run/user/{uid}", "trims"
    # Not tempfile.gettempdir(): it writes a file, and fixes the result of the program's own calls
    # for good, even if the program sets TMPDIR later.
    temp_dir = _unless_others(config.temp_dir)
    for base in (temp_dir and os.path.abspath(temp_dir), "/tmp", "/var/tmp"):
        yield base, f"trims-{uid}"


def _can_hold_sockets(endpoint: Endpoint) -> bool:
    """Whether its path is one for sockets: that of a job's own $TMPDIR may be too long."""
    try:
        endpoint.check_path()
    except ConfigError:
        return False
    return True


def _unless_others(directory: str) -> str:
    """Return the directory, or "" if it is another user's: after `su` the environment may name it.

    Root could write there. The other user could not use root's directory, but could replace it.
    """
    try:
        is_ours = os.stat(directory).st_uid in (os.geteuid(), 0)
    except OSError:
        return ""
    return directory if is_ours else ""


def _is_writable(directory: str) -> bool:
    return os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)


def _check_status(directory: str, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise UnusableSocketDir(
            f"socket directory {directory} is not a directory, and may be no link to one; set "
            "TRIMS_SOCKET_DIR to a directory of yours"
        )
    if status.st_uid != 0 and not _is_ours(directory, status):
        raise UnusableSocketDir(
            f"socket directory {directory} belongs to user {status.st_uid}, not to you or root; "
            f"set TRIMS_SOCKET_DIR to a directory of yours"
        )
    # /tmp and its like, or a volume of a container, are everybody's for a reason.
    below = os.path.join(directory, "trims")
    advice = f"set TRIMS_SOCKET_DIR to one below it, such as {below}, which is made for you alone"
    if not status.st_mode & stat.S_ISVTX:
        advice = f"run `chmod go-w {directory}`, or {advice}"
    # A machine-wide daemon's group may enter (0750), but a writer could replace the socket.
    for bit, who in ((stat.S_IWOTH, "everybody"), (stat.S_IWGRP, "its group")):
        if stat.S_IMODE(status.st_mode) & bit:
            raise UnusableSocketDir(f"socket directory {directory} is writable by {who}; {advice}")


def _is_ours(directory: str, status: os.stat_result) -> bool:
    uid = status.st_uid
    return uid == os.geteuid() and (uid != UNMAPPED_USER or _may_own(directory))


def _may_own(directory: str) -> bool:
    """Whether the kernel takes us for the owner: others may not open with O_NOATIME (open(2))."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC
    try:
        os.close(os.open(directory, flags))
    except OSError:
        return False
    return True
