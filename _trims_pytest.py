"""pytest plugin: ``pytest --trims`` runs a test suite with the cache, on a daemon of its own.

The module lies beside the package, so that pytest's start imports neither trims_shim nor torch.
Switched off, it does nothing. Switched on, it sets the environment before the first conftest is
imported. So tests, their subprocesses that import trims_shim and all pytest-xdist workers of a run
share one daemon in one short-lived socket directory. The process that chose the directory (the
xdist controller, or the only process) stops the daemon and removes the directory at the end;
workers do neither.

Precedence: ``--trims`` or ``--no-trims``, then TRIMS_ENABLED=0 in the environment, then the ini.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from trims_shim.diagnostics import Stats
    from trims_shim.testing import TrimsDaemon

_SOCKET_DIR_LIMIT = 70
"""Longest directory with which socket names surely fit the kernel's 107 bytes."""
_IDLE_EXIT_S = "300"
"""The daemon of a test run that was killed exits by itself."""
_ABANDONED_S = 86_400
_PREFIX = "trims-pytest-"
_OUTPUT_KEY = "trims_stats"
_RUN_DIRECTORY = "_TRIMS_PYTEST_SOCKET_DIR"
"""Names the run to its pytest-xdist workers, which inherit the environment.

Workers on other machines do not inherit it, and have a daemon of their own.
"""


@dataclass(slots=True)
class _Run:
    """The state of a run with trims in this process."""

    source: str
    socket_dir: str
    is_isolated: bool
    is_owner: bool
    is_directory_ours: bool
    environment: dict[str, str | None] = field(default_factory=dict)
    was_active: bool = False
    before: Stats | None = None
    workers: list[Stats] = field(default_factory=list)


# Not in pytest's stash, which is new in pytest 7: older ones load this module, too.
_runs: WeakKeyDictionary[pytest.Config, _Run] = WeakKeyDictionary()
_starts: WeakKeyDictionary[pytest.Item, Stats] = WeakKeyDictionary()
"""The counters at the start of each test."""


# --- switching on ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register options and ini keys."""
    group = parser.getgroup("trims", "model weights from the trims cache")
    group.addoption(
        "--trims",
        action="store_true",
        dest="trims",
        default=None,
        help="load model weights through a cache daemon that all tests and workers share",
    )
    group.addoption(
        "--no-trims", action="store_false", dest="trims", help="the opposite; overrides the ini key"
    )
    parser.addini("trims", "the same as --trims", type="bool", default=False)
    parser.addini(
        "trims_shared",
        "use the user's own daemon (and leave it running), not one for this run only",
        type="bool",
        default=False,
    )
    parser.addini(
        "trims_socket_dir", "directory of the daemon's sockets; default: a new one", default=""
    )
    parser.addini(
        "trims_host_bytes", "byte budget of the daemon, for example 8GiB or 40%", default=""
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Switch on before any conftest can import torch."""
    _switch_on(early_config, early_config.known_args_namespace.trims)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Switch on if the plugin was loaded too late for the hook above."""
    _switch_on(config, config.option.trims)


def _switch_on(config: pytest.Config, wanted: bool | None) -> None:
    if config in _runs or sys.platform != "linux":
        return
    source = _source(config, wanted)
    if not source:
        return
    run = _choose(config, source)
    changes = _environment(config, run)
    run.environment.update({name: os.environ.get(name) for name in changes})
    os.environ.update(changes)
    _runs[config] = run
    _activate(config, run)
    # pytest_unconfigure is not called if a conftest fails, or an option is unknown.
    config.add_cleanup(lambda: pytest_unconfigure(config))


def _source(config: pytest.Config, wanted: bool | None) -> str:
    """What asks for trims: ``--trims``, ``ini``, or nothing (an empty string)."""
    if wanted is not None:
        return "--trims" if wanted else ""
    if os.environ.get("TRIMS_ENABLED", "").lower() in ("0", "false", "no", "off"):
        return ""
    return "ini" if config.getini("trims") else ""


def _choose(config: pytest.Config, source: str) -> _Run:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    inherited = os.environ.get(_RUN_DIRECTORY) if is_worker else None
    configured = config.getini("trims_socket_dir")
    is_isolated = not config.getini("trims_shared")
    if inherited is not None:
        directory = inherited
    elif configured:
        directory = str(config.rootpath / os.path.expanduser(configured))
    elif is_isolated:
        # Made by the daemon's starter: a run that loads nothing leaves nothing.
        base = tempfile.gettempdir()
        name = f"{_PREFIX}{secrets.token_hex(6)}"
        directory = os.path.join("/tmp" if len(base + name) >= _SOCKET_DIR_LIMIT else base, name)
    else:
        directory = ""
    return _Run(
        source=source,
        socket_dir=directory,
        is_isolated=is_isolated,
        is_owner=is_isolated and inherited is None,
        is_directory_ours=is_isolated and inherited is None and not configured,
    )


def _environment(config: pytest.Config, run: _Run) -> dict[str, str]:
    changes = {"TRIMS_ENABLED": "1", _RUN_DIRECTORY: run.socket_dir}
    if run.socket_dir:
        changes["TRIMS_SOCKET_DIR"] = run.socket_dir
    if config.getini("trims_host_bytes"):
        changes["TRIMS_HOST_BYTES"] = config.getini("trims_host_bytes")
    if run.is_isolated and "TRIMS_IDLE_EXIT" not in os.environ:
        changes["TRIMS_IDLE_EXIT"] = _IDLE_EXIT_S
    if run.is_directory_ours and "TRIMS_CACHE_DIR" not in os.environ:
        # Models of tests are prepared for this run only, and do not evict the user's.
        changes["TRIMS_CACHE_DIR"] = os.path.join(run.socket_dir, "cache")
    return changes


def _activate(config: pytest.Config, run: _Run) -> None:
    """Import and patch. If that happened before, apply the settings of this run."""
    is_imported = "trims_shim" in sys.modules
    import trims_shim
    from trims_shim import config as configuration

    try:
        settings = configuration.load()
    except trims_shim.ConfigError as error:
        _restore(run)
        text = str(error)
        if config.getini("trims_host_bytes"):
            text = text.replace("TRIMS_HOST_BYTES: ", "ini option trims_host_bytes: ")
        raise pytest.UsageError(f"trims ({run.source}): {text}") from error
    if is_imported:
        from trims_shim.client.cache import configure

        run.was_active = trims_shim.enabled()
        configure(settings)
        if not trims_shim.enabled():
            trims_shim.enable()
    run.before = trims_shim.stats()


def _restore(run: _Run) -> None:
    for name, value in run.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- the end --------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's counters to the controller."""
    run = _runs.get(session.config)
    output = getattr(session.config, "workeroutput", None)
    if run is not None and output is not None:
        output[_OUTPUT_KEY] = asdict(_since(run.before))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the counters of a worker that has ended; one that crashed left none."""
    run = _runs.get(node.config)
    # Taken out: xdist tells twice of a worker that was interrupted.
    left = getattr(node, "workeroutput", {}).pop(_OUTPUT_KEY, None)
    if run is not None and left is not None:
        from trims_shim.diagnostics import Stats

        run.workers.append(Stats(**left))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the daemon of this run and remove its directory."""
    run = _runs.get(config)
    if run is None:
        return
    del _runs[config]
    try:
        if run.is_owner and os.path.isdir(run.socket_dir):
            _stop_daemon(run.socket_dir)
    finally:
        if run.is_directory_ours:
            shutil.rmtree(run.socket_dir, ignore_errors=True)
            with contextlib.suppress(OSError):
                _remove_abandoned(os.path.dirname(run.socket_dir))
        _restore(run)
        _deactivate(run)


def _remove_abandoned(base: str) -> None:
    """Remove what runs that were killed have left, a day later, if no daemon is in there."""
    import fcntl  # on other systems than Linux there is none

    from trims_shim.wire.endpoint import Endpoint

    for entry in os.scandir(base):
        if not entry.name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and status.st_mtime < time.time() - _ABANDONED_S:
                with open(Endpoint(entry.path).lock) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path)


def _stop_daemon(directory: str) -> None:
    from trims_shim.cli.daemon import stop_if_running
    from trims_shim.errors import TrimsError
    from trims_shim.wire.endpoint import Endpoint

    try:
        stop_if_running(Endpoint(directory))
    except TrimsError as error:  # no test has failed because of that
        sys.stderr.write(f"trims: {error}\n")


def _deactivate(run: _Run) -> None:
    """Restore the state before the run, for programs that call ``pytest.main`` and go on."""
    import trims_shim
    from trims_shim import config as configuration
    from trims_shim.client.cache import configure

    try:
        configure(configuration.load())
    except trims_shim.ConfigError:  # then it was not active before, either
        run.was_active = False
    if not run.was_active:
        trims_shim.disable()


# --- reports --------------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> str | None:
    """The line ``trims: on, socket /tmp/..., isolated (from ini)``."""
    run = _runs.get(config)
    if run is None:
        wanted = sys.platform != "linux" and _source(config, config.option.trims)
        return f"trims: off, the cache needs Linux (from {wanted})" if wanted else None
    kind = "isolated" if run.is_isolated else "shared with this user's other processes"
    return f"trims: on, socket {_endpoint_directory()}, {kind} (from {run.source})"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report what all test processes together have shared."""
    run = _runs.get(config)
    if run is None:
        return
    stats = _since(run.before)
    for each in run.workers:
        stats = _combine(stats, each, operator.add)
    from trims_shim.cli.text import counted

    terminalreporter.section("trims")
    joined = f", {stats.joined} joined" if stats.joined else ""
    terminalreporter.line(
        f"{counted(stats.served, 'load')} served ({counted(stats.hits, 'hit')}, "
        f"{counted(stats.misses, 'miss')}{joined}), {stats.bytes_shared / 1e6:.0f} MB shared, "
        f"{stats.elided_copies} copies elided"
    )
    if stats.fallbacks:
        reasons = ", ".join(f"{name} {n}" for name, n in sorted(stats.fallbacks.items()))
        total = sum(stats.fallbacks.values())
        terminalreporter.line(f"{counted(total, 'load')} by the framework's own loader: {reasons}")


def _endpoint_directory() -> str:
    from trims_shim.client.cache import cache

    return cache().endpoint.directory


def _since(before: Stats | None) -> Stats:
    """The shim's counters in this process since a snapshot."""
    import trims_shim

    now = trims_shim.stats()
    return now if before is None else _combine(now, before, operator.sub)


def _combine(one: Stats, other: Stats, combine: Callable[[int, int], int]) -> Stats:
    """Combine statistics field by field; leave out reasons whose count becomes zero."""

    def counts(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
        both = {key: combine(ours.get(key, 0), theirs.get(key, 0)) for key in {**ours, **theirs}}
        return {key: count for key, count in both.items() if count}

    values: dict[str, Any] = {}
    for each in fields(one):
        ours, theirs = getattr(one, each.name), getattr(other, each.name)
        values[each.name] = (counts if isinstance(ours, dict) else combine)(ours, theirs)
    return replace(one, **values)


# --- fixtures -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trims_daemon(pytestconfig: pytest.Config) -> TrimsDaemon:
    """The daemon of this test run; skips without ``--trims``."""
    _skip_when_off(pytestconfig)
    from trims_shim.testing import TrimsDaemon

    return TrimsDaemon()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let ``trims_stats`` count from here: other fixtures may load models before it is set up."""
    if item.config in _runs:
        import trims_shim

        _starts[item] = trims_shim.stats()


@pytest.fixture
def trims_stats(request: pytest.FixtureRequest) -> Callable[[], Stats]:
    """A function that returns the shim's counters in this test, from its first fixture on.

    Skips without ``--trims``.
    """
    _skip_when_off(request.config)
    before = _starts[request.node]
    return lambda: _since(before)


def _skip_when_off(config: pytest.Config) -> None:
    if config not in _runs:
        pytest.skip("trims is off; run with --trims")
