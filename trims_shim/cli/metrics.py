"""``trims metrics``: the daemon's numbers for Prometheus (extra ``metrics``). Starts nothing.

Asking counts neither as use of an image nor of the daemon, so a daemon that is only scraped becomes
idle, and exits. No model's name is told.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import socketserver
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trims_shim import config
from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import counts
from trims_shim.cli.saying import say
from trims_shim.cli.status import ask, loads, others
from trims_shim.errors import TrimsError
from trims_shim.printable import printable
from trims_shim.specs import HOST_TIER
from trims_shim.wire.admin import DeviceStatus, GetStatusReply, MemoryStatus

__all__ = ["metrics"]

_PREFIX = "trims_cache_"
_PREPARED_TIER = "prepared"
"""Prepared ONNX models, on disk."""
_ENDS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 10.0
"""Without a byte of a request; Prometheus gives up an answer after as long."""
_PAUSE_S = 0.1
_OPENS = {
    "hit": "open_hit",
    "miss": "open_miss",
    "joined": "open_joined",
    "refused": "refused",
}
_MOVES = {
    "loaded": "images_loaded",
    "evicted": "images_evicted",
    "evicted_under_pressure": "evicted_under_pressure",
    "expired": "expired",
    "promoted": "images_promoted",
    "demoted": "images_demoted",
    "copied_from_peer": "images_copied_from_peer",
    "not_copied_from_peer": "peer_copies_failed",
}
_REJECTED = {
    "client": "refused_clients",
    "message": "rejected_messages",
    "packet": "rejected_packets",
}


def metrics(arguments: argparse.Namespace) -> Exit:
    """Print the numbers once, or serve them with ``--listen``."""
    try:
        import prometheus_client
    except ImportError as error:
        say(
            "trims metrics needs prometheus_client: run `pip install 'trims-shim[metrics]'`, or "
            f"use `trims status --json` ({error})"
        )
        return Exit.FAILED
    config.current()  # raises ConfigError, which is none of the daemon's
    cache = _Cache()
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(cache)
    if arguments.listen is not None:
        host, port = arguments.listen
        return _serve(host, port, registry)
    print(prometheus_client.generate_latest(registry).decode(), end="")
    return Exit.OK if cache.is_up else Exit.NO_DAEMON


def _serve(host: str, port: int, registry: Any) -> Exit:
    """Answer until SIGINT or SIGTERM, which end the first process of a container, too."""
    import prometheus_client

    # Before the server's threads begin, which take the mask over.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        server, _ = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(error.errno, error.strerror, _address(host, port)) from error
    handlers: Any = (_Impatient, server.RequestHandlerClass)
    server.RequestHandlerClass = type("Handler", handlers, {})
    server.get_request = functools.partial(_take, server.get_request)  # type: ignore[method-assign]
    say(f"serving http://{_address(host, server.server_port)}/metrics")
    signal.sigwait(_ENDS)
    server.shutdown()
    server.server_close()
    return Exit.OK


class _Impatient(socketserver.StreamRequestHandler):
    """Leaves who connects and asks nothing: each takes a thread and a descriptor."""

    timeout = _PATIENCE_S

    def handle(self) -> None:
        """See :class:`socketserver.BaseRequestHandler`."""
        with contextlib.suppress(TimeoutError):
            super().handle()


def _take(accept: Callable[[], Any]) -> Any:
    """The next connection. Where there is no descriptor for it, the server asks again at once."""
    try:
        return accept()
    except OSError:
        time.sleep(_PAUSE_S)
        raise


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Cache:
    """The daemon's status as Prometheus' metrics; ``is_up``: whether it answered the last time."""

    is_up = False

    def collect(self) -> Iterator[Any]:
        """Ask the daemon; called by the registry."""
        try:
            reply = ask()
        except TrimsError:
            reply = None
        self.is_up = reply is not None
        yield _gauge("up", "Whether a daemon answers.", {(): self.is_up})
        if reply is not None:
            yield from _families(reply)


def _families(reply: GetStatusReply) -> Iterator[Any]:
    yield _gauge(
        "info",
        "Version of the daemon, and the kind of its memory.",
        {(reply.package, reply.memory.kind): 1},
        labels=("version", "memory"),
    )
    yield _gauge("start_time_seconds", "When it started.", {(): reply.started_ns / 1e9})
    yield _gauge("clients", "Connected processes.", {(): len(others(reply)) + reply.more_clients})
    yield from _tiers(reply)
    yield from _devices(reply)
    yield from _models(reply)
    yield from _loads(reply.counters)


def _tiers(reply: GetStatusReply) -> Iterator[Any]:
    tiers: dict[str, MemoryStatus | DeviceStatus] = {HOST_TIER: reply.memory}
    tiers |= {each.device: each for each in reply.devices}
    budgets = {name: tier.budget_bytes for name, tier in tiers.items()}
    resident = {name: tier.resident_bytes for name, tier in tiers.items()}
    reserved = {name: tier.reserved_bytes for name, tier in tiers.items()}
    lingering = {name: tier.lingering_bytes for name, tier in tiers.items()}
    if reply.storage is not None:  # which another user's daemon does not tell
        budgets[_PREPARED_TIER] = reply.storage.budget_bytes
        resident[_PREPARED_TIER] = reply.storage.resident_bytes
    for name, text, values in (
        ("budget_bytes", "What a tier may hold.", budgets),
        ("resident_bytes", "What it holds.", resident),
        ("reserved_bytes", "Of images that are being loaded.", reserved),
        ("lingering_bytes", "Of evicted images that somebody still maps.", _known(lingering)),
    ):
        yield _gauge(name, text, _by(values), labels=("tier",))


def _devices(reply: GetStatusReply) -> Iterator[Any]:
    yield _gauge(
        "device_info",
        "A device, and how its memory is shared.",
        {(each.device, each.name, each.backend): 1 for each in reply.devices},
        labels=("tier", "name", "backend"),
    )
    yield _gauge(
        "device_bytes",
        "Memory of a device, whoever uses it.",
        _by({each.device: each.total_bytes for each in reply.devices}),
        labels=("tier",),
    )
    yield _gauge(
        "device_free_bytes",
        "What is free of it, by NVML.",
        _by(_known({each.device: each.free_bytes for each in reply.devices})),
        labels=("tier",),
    )


def _models(reply: GetStatusReply) -> Iterator[Any]:
    tiers = [HOST_TIER, *(each.device for each in reply.devices)]
    images = Counter(dict.fromkeys(tiers, 0))
    leases = Counter(dict.fromkeys(tiers, 0))
    for image in reply.images:
        images[image.tier] += 1
        leases[image.tier] += image.leases
    states = Counter({"ready": 0, "preparing": 0, "refused": 0})
    states.update(each.state for each in reply.prepared)
    yield _gauge("images", "Images, of the 1000 used last.", _by(images), labels=("tier",))
    yield _gauge("leases", "Processes' holds on these.", _by(leases), labels=("tier",))
    yield _gauge(
        "prepared_models",
        "ONNX models, of the first 200, by state.",
        _by(states),
        labels=("state",),
    )


def _loads(counters: Mapping[str, int]) -> Iterator[Any]:
    clients = loads(dict(counters))["clients_reported"]

    def named(names: Mapping[str, str]) -> dict[tuple[str, ...], float]:
        return _by({name: counters.get(counter, 0) for name, counter in names.items()})

    for name, text, label, values in (
        ("opens", "Requests for images by result.", "result", named(_OPENS)),
        ("image_moves", "What became of images.", "move", named(_MOVES)),
        ("prepared_opens", "Prepared models by event.", "event", _by(counts(dict(counters)))),
        ("loads_served", "Loads of programs by reader.", "reader", _by(clients["served"])),
        ("fallbacks", "Loads by the frameworks, by reason.", "reason", _by(clients["fallbacks"])),
        ("copies_elided", "Copies that were saved.", "where", _by(clients["elided"])),
        ("not_on_device", "Not shared on a device.", "reason", _by(clients["not_on_device"])),
        ("made_private", "Made private on a device.", "why", _by(clients["made_private"])),
        ("rejected", "What could not be accepted.", "what", named(_REJECTED)),
    ):
        yield _counter(name, text, values, labels=(label,))
    yield _counter("shared_bytes", "Served to programs.", {(): clients["bytes_shared"]})
    yield _counter("errors", "Internal errors.", {(): counters.get("internal_errors", 0)})


def _known(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size >= 0}


def _by(amounts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """By the value of the only label.

    Clients choose some, and may be other users: nothing in them is to steer a terminal.
    """
    found: dict[tuple[str, ...], float] = {}
    for name, amount in amounts.items():
        words = (printable(name),)
        found[words] = found.get(words, 0) + amount
    return found


def _gauge(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()
) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _with(GaugeMetricFamily(_PREFIX + name, text, labels=labels), values)


def _counter(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()
) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _with(CounterMetricFamily(_PREFIX + name, text, labels=labels), values)


def _with(family: Any, values: Mapping[tuple[str, ...], float]) -> Any:
    """The family with its values, each told apart by those of its labels."""
    for words, value in values.items():
        family.add_metric(words, value)
    return family
