"""``trims stop`` and ``trims daemon``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trims_shim import config as configuration
from trims_shim.cli.exits import Exit
from trims_shim.cli.text import duration, print_json, size
from trims_shim.client.connection import Connection
from trims_shim.errors import DaemonTimeout, DaemonUnavailable
from trims_shim.wire import endpoint as endpoints
from trims_shim.wire import handover, messages
from trims_shim.wire.endpoint import Endpoint

__all__ = ["Stopped", "serve", "stop", "stop_daemon"]

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class _Process:
    """The daemon's process as this namespace sees it; the kernel vouches for it."""

    pid: int
    descriptor: int

    def is_gone_before(self, deadline_s: float) -> bool:
        """Wait for its end until then."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))


@dataclass(frozen=True, slots=True)
class Stopped:
    """A daemon that has gone; ``last_status`` is None if it spoke another protocol."""

    pid: int
    package: str
    last_status: messages.GetStatusReply | None


def serve(_arguments: argparse.Namespace) -> Exit:
    """Serve in the foreground until stopped or idle."""
    from trims_shim.daemon.main import run

    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    return Exit(run())


def stop(arguments: argparse.Namespace) -> Exit:
    """Ask the daemon to stop and wait until its process is gone."""
    settings = configuration.load()
    endpoint = endpoints.choose(settings.socket_dir, runtime_dir=settings.runtime_dir)
    stopped = stop_daemon(endpoint, timeout_s=arguments.timeout)
    if arguments.json:
        print_json({"stopped": True, **dataclasses.asdict(stopped)})
    else:
        print("\n".join(_describe(stopped)))
    return Exit.OK


def stop_daemon(endpoint: Endpoint, *, timeout_s: float) -> Stopped:
    """Stop the daemon and wait until its process is gone. Blocks.

    Raises DaemonUnavailable when none runs, DaemonTimeout when it does not finish in time.
    """
    deadline = time.monotonic() + timeout_s
    process = _process(endpoint)
    try:
        connection = Connection(endpoint, config_hash="", stall_timeout_s=timeout_s)
        welcome = connection.welcome
        try:
            last = _ask(connection)
            while connection.is_alive():
                if time.monotonic() > deadline:
                    raise _still_there(welcome.pid, timeout_s)
                time.sleep(_POLL_S)
        finally:
            connection.close()
        if process is not None and not process.is_gone_before(deadline):
            raise _still_there(process.pid, timeout_s)
    finally:
        if process is not None:
            os.close(process.descriptor)
    return Stopped(welcome.pid, welcome.package, last)


def _process(endpoint: Endpoint) -> _Process | None:
    """None where nothing answers, or where the daemon lives in another pid namespace."""
    with handover.new_socket() as probe:
        try:
            probe.connect(endpoint.handover)
            pid = handover.peer_of(probe).pid
            return _Process(pid, os.pidfd_open(pid)) if pid > 0 else None
        except OSError:
            return None


def _ask(connection: Connection) -> messages.GetStatusReply | None:
    """Its last statistics; None from a daemon of another protocol, which understands only this."""
    if connection.welcome.protocol != messages.PROTOCOL_VERSION or not connection.welcome.token:
        connection.drain()
        return None
    status: messages.GetStatusReply = connection.request(messages.GetStatusRequest())
    try:
        connection.request(messages.StopDaemonRequest())
    except DaemonUnavailable:
        pass  # It was faster than its answer.
    return status


def _still_there(pid: int, timeout_s: float) -> DaemonTimeout:
    return DaemonTimeout(
        f"daemon {pid} has not finished within {timeout_s:g} s (it may still be reading a model); "
        f"wait longer with --timeout, or run `kill {pid}`"
    )


def _describe(stopped: Stopped) -> Iterator[str]:
    yield f"daemon {stopped.pid} (trims_shim {stopped.package}) has stopped"
    last = stopped.last_status
    if last is not None:
        counters = last.counters
        yield (
            f"it ran for {duration((last.now_ns - last.started_ns) / 1e9)}, held "
            f"{len(last.images)} images ({size(last.memory.resident_bytes)}), and answered "
            f"{counters.get('open_hit', 0)} hits, {counters.get('open_miss', 0)} misses, "
            f"{counters.get('open_joined', 0)} joined loads, {counters.get('refused', 0)} refusals"
        )
