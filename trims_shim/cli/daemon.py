"""``trims stop`` and ``trims daemon``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trims_shim import config as configuration
from trims_shim.children import be_called
from trims_shim.cli.devices import image_total
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.text import counted, duration, print_json, printable, size
from trims_shim.client.connection import Connection
from trims_shim.errors import DaemonTimeout, DaemonUnavailable
from trims_shim.wire import admin, codec, handover, messages
from trims_shim.wire import endpoint as endpoints
from trims_shim.wire.endpoint import Endpoint

__all__ = ["Stopped", "serve", "stop", "stop_daemon", "stop_if_running"]

_POLL_S = 0.02
_RUN_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """A daemon that has gone; ``last_status`` is None if it spoke another protocol."""

    pid: int
    package: str
    last_status: admin.GetStatusReply | None


def serve(_arguments: argparse.Namespace) -> Exit:
    """Serve in the foreground until stopped or idle."""
    from trims_shim.daemon.logs import log_to
    from trims_shim.daemon.main import run

    endpoint = _endpoint()
    pid = _pid(endpoint)
    if pid is not None:
        is_ours = os.geteuid() in (0, endpoint.owner())
        advice = "`trims stop` stops it" if is_ours else "it is another user's"
        say(f"trims daemon: {pid} serves {endpoint.directory} already; {advice}")
        return Exit.FAILED
    if not logging.getLogger("trims_shim").hasHandlers():  # TRIMS_LOG has set none up
        log_to(logging.StreamHandler())
    be_called("trims-daemon")
    return Exit(run())


def stop(arguments: argparse.Namespace) -> Exit:
    """Ask the daemon to stop and wait until its process is gone."""
    stopped = stop_daemon(_endpoint(), timeout_s=arguments.timeout)
    if arguments.json:
        print_json({"stopped": True, **codec.plain(stopped)})
    else:
        print("\n".join(map(printable, _describe(stopped))))
    return Exit.OK


def stop_daemon(endpoint: Endpoint, *, timeout_s: float) -> Stopped:
    """Stop the daemon and wait until its process is gone. Blocks.

    Raises DaemonUnavailable when none runs, DaemonTimeout when it does not finish in time.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        pid = _pid(endpoint)
        has_gone = stack.enter_context(_watch(pid))
        connection = Connection(endpoint, stall_timeout_s=timeout_s)
        stack.callback(connection.close)
        welcome = connection.welcome
        last = _ask(connection)
        while connection.is_alive() or not has_gone():
            if time.monotonic() > deadline:
                # By its number in its own container, something else would be killed here.
                end = f"run `kill -9 {pid}`" if pid else "end its container"
                raise DaemonTimeout(
                    f"daemon {welcome.pid} has not finished within {timeout_s:g} s (it may still "
                    "be reading a model, or be another user's); wait longer with --timeout, or "
                    f"{end}"
                )
            time.sleep(_POLL_S)
    return Stopped(welcome.pid, welcome.package, last)


def stop_if_running(endpoint: Endpoint) -> None:
    """Stop the daemon of a test run or a demo, if there is one. Raises DaemonTimeout."""
    with contextlib.suppress(DaemonUnavailable):
        stop_daemon(endpoint, timeout_s=_RUN_TIMEOUT_S)


def _endpoint() -> Endpoint:
    return endpoints.choose(configuration.load())


def _pid(endpoint: Endpoint) -> int | None:
    """The daemon's pid, from the kernel; None if none answers, 0 in another namespace."""
    with handover.new_socket() as probe:
        probe.setblocking(False)  # one that hangs may have no room for another connection
        try:
            probe.connect(endpoint.handover)
            return handover.peer_of(probe).pid
        except OSError:
            return None


@contextlib.contextmanager
def _watch(pid: int | None) -> Iterator[Callable[[], bool]]:
    """Yield a function: has the process ended? True at once if it cannot be seen."""
    try:
        descriptor = os.pidfd_open(pid) if pid else -1
    except OSError:
        descriptor = -1
    if descriptor < 0:
        yield lambda: True
        return
    try:
        yield lambda: handover.wait_until_ready(descriptor, 0)
    finally:
        os.close(descriptor)


def _ask(connection: Connection) -> admin.GetStatusReply | None:
    """Ask it to stop; return its last status, None from another protocol, which only drains."""
    if connection.welcome.protocol != messages.PROTOCOL_VERSION or not connection.welcome.token:
        connection.drain()
        return None
    status: admin.GetStatusReply = connection.request(admin.GetStatusRequest())
    try:
        connection.request(admin.StopDaemonRequest())
    except DaemonUnavailable:
        pass  # It was faster than its answer.
    return status


def _describe(stopped: Stopped) -> Iterator[str]:
    yield f"daemon {stopped.pid} (trims_shim {stopped.package}) has stopped"
    last = stopped.last_status
    if last is not None:
        counters = last.counters
        resident_bytes = last.memory.resident_bytes
        resident_bytes += sum(device.resident_bytes for device in last.devices)
        yield (
            f"it ran for {duration((last.now_ns - last.started_ns) / 1e9)}, held "
            f"{image_total(last)} ({size(resident_bytes)}), and answered "
            f"{counted(counters.get('open_hit', 0), 'hit')}, "
            f"{counted(counters.get('open_miss', 0), 'miss')}, "
            f"{counted(counters.get('open_joined', 0), 'joined load')}, "
            f"{counted(counters.get('refused', 0), 'refusal')}"
        )
