"""``trims metrics``: what Prometheus gets of a real daemon."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trims_shim.cli import metrics
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.printable import printable
from trims_shim.wire import handover, messages
from trims_shim.wire.admin import PreparedStatus, PreparedStorage

from .conftest import LIMIT_S, MODEL_BYTES, Trims
from .test_devices import FIRST, GIB, SECOND, WITH_DEVICES

Samples = dict[str, float]


def samples(text: str) -> Samples:
    """By name and values of labels, in the order of these: ``trims_cache_images{host}``."""
    return {
        each.name + "".join(f"{{{value}}}" for value in each.labels.values()): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_what_is_printed_of_a_daemon(warmed: Trims) -> None:
    done = warmed("metrics")
    assert done.returncode == Exit.OK, done.stderr
    found = samples(done.stdout)
    assert found["trims_cache_up"] == 1
    assert found["trims_cache_clients"] == 0, "the command itself is not counted"
    assert found["trims_cache_budget_bytes{host}"] == 64 << 20
    assert found["trims_cache_resident_bytes{host}"] == MODEL_BYTES
    assert found["trims_cache_images{host}"] == 1
    assert found["trims_cache_opens_total{miss}"] == 1
    assert found["trims_cache_image_moves_total{loaded}"] == 1
    assert found["trims_cache_shared_bytes_total"] == MODEL_BYTES
    assert found["trims_cache_errors_total"] == 0
    assert abs(found["trims_cache_start_time_seconds"] - time.time()) < 86400
    assert [found[name] for name in found if name.startswith("trims_cache_info{")] == [1]
    assert "bert.safetensors" not in done.stdout


def test_reasons_are_as_clients_say_them(warmed: Trims) -> None:
    """But nothing in them steers a terminal; those that look alike then are one, as labels have to
    differ.
    """
    reason = 'a "reason"\n{x="1"} 2\x1b[2J'
    shown = printable(reason)
    said = {f"fallback:{reason}": 3, f"fallback:{shown}": 4, "served:torch_zip": 2}
    with handover.new_socket() as client:
        client.connect(str(warmed.sockets / "handover.sock"))
        hello = messages.Hello(messages.PROTOCOL_VERSION, "1.0", 1)
        for each in (hello, messages.StatsReport(said)):
            handover.send(client, each)
        printed = warmed("metrics").stdout
    assert "\x1b" not in printed
    found = samples(printed)
    assert found[f"trims_cache_fallbacks_total{{{shown}}}"] == 7
    assert found["trims_cache_loads_served_total{torch_zip}"] == 2
    assert found["trims_cache_clients"] == 1


def test_without_a_daemon_none_is_started(trims: Trims) -> None:
    done = trims("metrics")
    assert done.returncode == Exit.NO_DAEMON
    assert samples(done.stdout) == {"trims_cache_up": 0}
    assert not trims.sockets.exists()


@pytest.mark.parametrize("words", [[], ["--listen", "0"]])
def test_a_setting_that_cannot_be_used_is_no_daemon_that_is_down(
    trims: Trims, words: list[str]
) -> None:
    """Found: with ``--listen``, that was served until somebody looked."""
    done = trims("metrics", *words, TRIMS_STALL_TIMEOUT="soon")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr.count("TRIMS_STALL_TIMEOUT") == 1


@contextlib.contextmanager
def serving(trims: Trims, address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and the URL that it says it serves."""
    words = [sys.executable, "-m", "trims_shim", "metrics", "--listen", address]
    with subprocess.Popen(words, env=trims.environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            said = child.stderr.readline()
            assert said.startswith("serving http://"), said
            yield child, said.split()[1]
        finally:
            child.kill()


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return samples(answer.read().decode())


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serving_outlives_daemons(trims: Trims, model: Path, end: signal.Signals) -> None:
    with serving(trims, "0") as (child, url):
        assert url.startswith("http://127.0.0.1:")
        assert scrape(url) == {"trims_cache_up": 0}
        assert trims("warm", str(model)).returncode == Exit.OK
        assert scrape(url)["trims_cache_images{host}"] == 1
        assert trims("stop").returncode == Exit.OK
        assert scrape(url) == {"trims_cache_up": 0}
        assert trims("warm", str(model)).returncode == Exit.OK
        assert scrape(url)["trims_cache_images{host}"] == 1
        child.send_signal(end)
        assert child.wait(LIMIT_S) == Exit.OK


@pytest.mark.parametrize("begin", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x"])
def test_who_asks_nothing_is_left(
    begin: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: each took a thread and a descriptor, until there were none to answer others with."""

    def ask_nothing(_: object) -> None:
        port = int(capsys.readouterr().err.partition("127.0.0.1:")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as asking:
            asking.sendall(begin)
            assert asking.recv(1) == b""

    monkeypatch.setattr(metrics._Impatient, "timeout", 0.1)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())
    monkeypatch.setattr(signal, "sigwait", ask_nothing)
    assert main(["metrics", "--listen", "0"]) == Exit.OK
    assert capsys.readouterr().err == ""


def test_without_a_descriptor_for_who_connects_it_waits(trims: Trims) -> None:
    """Found: it tried again at once, and took a whole core."""
    with serving(trims, "0") as (child, url), contextlib.ExitStack() as stack:
        most = len(os.listdir(f"/proc/{child.pid}/fd")) + 4
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (most, most))
        address = ("127.0.0.1", urlsplit(url).port)
        for _ in range(8):
            stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        time.sleep(0.2)
        before_s = cpu_s(child.pid)
        time.sleep(1)
        assert cpu_s(child.pid) - before_s < 0.3
        stack.close()
        assert scrape(url) == {"trims_cache_up": 0}


def cpu_s(pid: int) -> float:
    """That a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_a_port_that_is_taken_is_named(trims: Trims) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = trims("metrics", "--listen", str(port))
    assert done.returncode == Exit.FAILED
    assert done.stderr == f"trims: 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("address", ["", "x", "65536", "-1", "host:", "127.0.0.1:99999"])
def test_what_is_no_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["metrics", f"--listen={address}"])
    assert "is not a port from 0 to 65535, or HOST:PORT" in capsys.readouterr().err


def test_what_is_no_host(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("a..b", 64 * "a"):
        with pytest.raises(SystemExit):
            main(["metrics", f"--listen={host}:0"])
        assert f"{host!r} cannot be the name of a host" in capsys.readouterr().err


def test_an_address_of_ipv6_is_one_that_a_browser_takes() -> None:
    assert metrics._address("::1", 80) == "[::1]:80"
    assert metrics._address("localhost", 80) == "localhost:80"


def test_devices_are_tiers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "ask", lambda: WITH_DEVICES)
    assert main(["metrics"]) == Exit.OK
    found = samples(capsys.readouterr().out)
    assert found[f"trims_cache_resident_bytes{{{FIRST}}}"] == 6 * GIB
    assert found[f"trims_cache_lingering_bytes{{{FIRST}}}"] == 2 * GIB
    assert found[f"trims_cache_device_free_bytes{{{FIRST}}}"] == 120 * GIB
    assert found[f"trims_cache_device_bytes{{{SECOND}}}"] == 141 * GIB
    assert found[f"trims_cache_device_info{{vmm}}{{NVIDIA H200}}{{{FIRST}}}"] == 1
    assert found[f"trims_cache_images{{{FIRST}}}"] == 2
    assert found[f"trims_cache_leases{{{FIRST}}}"] == 3
    assert found[f"trims_cache_images{{{SECOND}}}"] == 0
    assert found["trims_cache_not_on_device_total{no_space}"] == 3
    assert found["trims_cache_made_private_total{optimizer}"] == 7
    assert found["trims_cache_image_moves_total{demoted}"] == 3
    unknown = {"trims_cache_lingering_bytes", "trims_cache_device_free_bytes"}
    assert not {name for name in found if name.split("{")[0] in unknown and SECOND in name}


def test_prepared_models_are_a_tier_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = PreparedStatus("cd" * 32, "ready", 1, 0, 0, 0, 1, (), "1.22")
    reply = WITH_DEVICES._replace(
        prepared=(model, model, model._replace(state="refused")),
        storage=PreparedStorage("/cache", 5 * GIB, 2 * GIB),
    )
    monkeypatch.setattr(metrics, "ask", lambda: reply)
    assert main(["metrics"]) == Exit.OK
    found = samples(capsys.readouterr().out)
    assert found["trims_cache_budget_bytes{prepared}"] == 5 * GIB
    assert found["trims_cache_resident_bytes{prepared}"] == 2 * GIB
    states = ("ready", "preparing", "refused")
    assert [found[f"trims_cache_prepared_models{{{state}}}"] for state in states] == [2, 0, 1]


def test_without_prometheus_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["metrics"]) == Exit.FAILED
    assert "pip install 'trims-shim[metrics]'" in capsys.readouterr().err
