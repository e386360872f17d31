"""Every error this package raises, as one tree.

    TrimsError
    ├── ConfigError              a setting is unknown, unclear or out of range
    ├── FormatError              a model file is not what its format promises
    │   ├── TruncatedFile            it ends before a structure it announces
    │   ├── CorruptFile              a structure contradicts itself or another one
    │   └── UnsupportedFormat        well formed, but of a kind this package does not serve
    ├── WireError                a message between client and daemon is not acceptable
    │   ├── MalformedMessage         it cannot be decoded, or a field has the wrong type
    │   ├── MessageTooLarge          it is longer than the protocol allows
    │   └── UnknownMessage           its verb is not part of this protocol version
    ├── DaemonError              the daemon cannot be used
    │   ├── DaemonUnavailable        no daemon listens, and none may or could be started
    │   │   └── UnusableSocketDir        the directory of the sockets cannot be used or trusted
    │   ├── DaemonStartFailed        it was started and reported a failure
    │   ├── DaemonTimeout            it stopped answering
    │   │   └── LoadStalled          one load makes no progress, whatever the daemon does
    │   └── IncompatibleDaemon       it speaks another protocol version and cannot be replaced
    ├── RequestRefused           the daemon answered with a refusal
    │   ├── AccessDenied             the descriptor does not prove that the client may read the file
    │   ├── NoSpace                  nothing can be reclaimed for an image of this size
    │   ├── FileChanged              the file changed while it was being read
    │   ├── ReadFailed               the file could not be read
    │   ├── UnknownImage             no resident image has this digest or name
    │   ├── UnknownDevice            the daemon cannot share memory on this device
    │   └── TooManyRequests          a limit on what one client may have open was reached
    ├── MemoryFailure            a segment could not be made, mapped or sealed
    ├── DriverFailure            a call of the CUDA driver failed, or there is no driver
    ├── BatchingError            a request of a batcher was not answered
    │   ├── RequestDropped           it cannot be answered in time, or would make others late
    │   ├── QueueFull                too many requests are waiting already
    │   ├── BatcherClosed            the batcher takes no more requests
    │   └── BadBatch                 the batch function did not return one result for each item
    ├── StagingError             a model cannot be cut into stages
    ├── PlanningError            no plan was found, or none can be made
    ├── EnsembleError            an ensemble cannot be made, or takes no calls
    │   └── MemberFailed             a member could not be loaded, raised an error or died
    ├── RemoteError              a remote file cannot be had
    │   ├── RemoteUnreachable        no answer comes, or not the whole file
    │   └── WrongDigest              the file is not the one that the digest means
    ├── ClusterError             a plan cannot be carried out on a cluster
    │   └── DeviceLost               a device was lost with a request
    ├── NotServed                the load gains nothing or cannot be shared; not a fault
    └── PatchError               a patch point could not be applied

A message says what failed, on which object, and what to do next. ``reason`` is the short, stable
name under which diagnostics count the error.
"""

from __future__ import annotations

from trims_shim.printable import printable

__all__ = [
    "AccessDenied",
    "BadBatch",
    "BatcherClosed",
    "BatchingError",
    "ClusterError",
    "ConfigError",
    "CorruptFile",
    "DaemonError",
    "DaemonStartFailed",
    "DaemonTimeout",
    "DaemonUnavailable",
    "DeviceLost",
    "DriverFailure",
    "EnsembleError",
    "FileChanged",
    "FormatError",
    "IncompatibleDaemon",
    "LoadStalled",
    "MalformedMessage",
    "MemberFailed",
    "MemoryFailure",
    "MessageTooLarge",
    "NoSpace",
    "NotServed",
    "PatchError",
    "PlanningError",
    "QueueFull",
    "ReadFailed",
    "RemoteError",
    "RemoteUnreachable",
    "RequestDropped",
    "RequestRefused",
    "StagingError",
    "TooManyRequests",
    "TrimsError",
    "TruncatedFile",
    "UnknownDevice",
    "UnknownImage",
    "UnknownMessage",
    "UnsupportedFormat",
    "UnusableSocketDir",
    "WireError",
    "WrongDigest",
]


class TrimsError(Exception):
    """Base of all errors of this package; ``reason`` is its name in statistics."""

    reason = "error"


class ConfigError(TrimsError):
    """A setting is unknown, unclear or out of range."""

    reason = "config"


class FormatError(TrimsError):
    """A model file is not what its format promises."""

    reason = "format"


class TruncatedFile(FormatError):
    """The file ends before a structure it announces."""

    reason = "truncated"


class CorruptFile(FormatError):
    """A structure contradicts itself or another one."""

    reason = "corrupt"


class UnsupportedFormat(FormatError):
    """The file is well formed, but of a kind this package does not serve."""

    reason = "unsupported_format"


class WireError(TrimsError):
    """A message between client and daemon is not acceptable."""

    reason = "wire"


class MalformedMessage(WireError):
    """A message cannot be decoded, or a field has the wrong type."""

    reason = "malformed_message"


class MessageTooLarge(WireError):
    """A message is longer than the protocol allows."""

    reason = "message_too_large"


class UnknownMessage(WireError):
    """A message's verb is not part of this protocol version."""

    reason = "unknown_message"


class DaemonError(TrimsError):
    """The daemon cannot be used."""

    reason = "daemon"


class DaemonUnavailable(DaemonError):
    """No daemon listens on the socket, and none may or could be started."""

    reason = "daemon_unavailable"


class UnusableSocketDir(DaemonUnavailable):
    """The directory of the sockets cannot be made or written, or another user could change it."""

    reason = "socket_dir"


class DaemonStartFailed(DaemonError):
    """The daemon was started and reported a failure."""

    reason = "daemon_start_failed"


class DaemonTimeout(DaemonError):
    """The daemon stopped answering."""

    reason = "daemon_timeout"


class LoadStalled(DaemonTimeout):
    """A load makes no progress, perhaps because of its file; the daemon may be well."""

    reason = "load_stalled"


class IncompatibleDaemon(DaemonError):
    """The daemon speaks another protocol version and cannot be replaced."""

    reason = "incompatible_daemon"


class RequestRefused(TrimsError):
    """The daemon answered with a refusal."""

    reason = "refused"


class AccessDenied(RequestRefused):
    """The descriptor does not prove that the client may read the file."""

    reason = "access_denied"


class NoSpace(RequestRefused):
    """Nothing can be reclaimed for an image of this size."""

    reason = "no_space"


class FileChanged(RequestRefused):
    """The file changed while it was being read."""

    reason = "file_changed"


class ReadFailed(RequestRefused):
    """The file could not be read."""

    reason = "read_failed"


class UnknownImage(RequestRefused):
    """No resident image has this digest or name."""

    reason = "unknown_image"


class UnknownDevice(RequestRefused):
    """The daemon has no device of this identity, or cannot share memory on it."""

    reason = "unknown_device"


class TooManyRequests(RequestRefused):
    """A limit on what one client may have open was reached."""

    reason = "too_many_requests"


class MemoryFailure(TrimsError):
    """A segment could not be made, mapped or sealed."""

    reason = "memory"


class DriverFailure(TrimsError):
    """A call of the CUDA driver failed, or there is no driver; names the call.

    ``result`` is the driver's name for it (``CUDA_ERROR_...``), empty if the driver was not asked.
    """

    reason = "driver"
    result = ""


class BatchingError(TrimsError):
    """A request of a batcher was not answered."""

    reason = "batching"


class RequestDropped(BatchingError):
    """The request could not be answered before its deadline, or would have made others late.

    ``reason`` is ``hopeless`` or ``shed``.
    """

    reason = "dropped"

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class QueueFull(BatchingError):
    """Too many requests are waiting already."""

    reason = "queue_full"


class BatcherClosed(BatchingError):
    """The batcher takes no more requests."""

    reason = "closed"


class BadBatch(BatchingError):
    """The batch function did not return one result for each item."""

    reason = "bad_batch"


class StagingError(TrimsError):
    """A model cannot be cut into stages."""

    reason = "staging"


class PlanningError(TrimsError):
    """No plan was found, or none can be made."""

    reason = "planning"


class EnsembleError(TrimsError):
    """An ensemble cannot be made, or takes no calls."""

    reason = "ensemble"


class MemberFailed(EnsembleError):
    """A member of an ensemble could not be loaded, raised an error, or its process died."""

    reason = "member_failed"


class RemoteError(TrimsError):
    """A remote file cannot be had."""

    reason = "remote"

    def __init__(self, text: str) -> None:
        """``text`` may quote what the remote said; it is for terminals, too."""
        super().__init__(printable(text))


class RemoteUnreachable(RemoteError):
    """No answer comes from the remote, or not the whole file."""

    reason = "remote_unreachable"


class WrongDigest(RemoteError):
    """A remote file is not the one that the given digest means."""

    reason = "wrong_digest"


class ClusterError(TrimsError):
    """A plan cannot be carried out on a cluster."""

    reason = "cluster"


class DeviceLost(ClusterError):
    """A device was lost with a request, which may have run on it."""

    reason = "device_lost"


class NotServed(TrimsError):
    """The load gains nothing from the cache, or cannot be shared. Not a fault.

    ``reason`` is given by the caller, for example ``small_file``.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class PatchError(TrimsError):
    """A patch point could not be applied."""

    reason = "patch"
