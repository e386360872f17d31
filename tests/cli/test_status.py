"""``status``, ``ls`` and ``top``: what they show of a real daemon."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from trims_shim.cli import metrics, status, text, top
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.wire import handover, messages
from trims_shim.wire.admin import (
    ClientStatus,
    DeviceStatus,
    GetStatusReply,
    ImageStatus,
    MemoryStatus,
    PreparedStatus,
    PreparedStorage,
)

from .conftest import MODEL_BYTES, Trims


def test_status_shows_memory_images_and_counters(warmed: Trims, model: Path) -> None:
    done = warmed("status")
    assert done.returncode == Exit.OK
    assert "2.0 MiB of 64.0 MiB resident (#)\n" in done.stdout
    assert "0 hits, 1 miss, 0 joined" in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and "/" not in line] == []
    assert str(model) in done.stdout
    assert str(warmed.sockets) in done.stdout
    assert "note" not in done.stdout


def test_what_is_warmed_is_no_load_of_a_framework(warmed: Trims) -> None:
    shown = warmed("status").stdout
    assert "loads     none by torch or other libraries yet; what was warmed counts" in shown
    assert "shared" not in shown
    assert "prepared  no ONNX model yet; " in shown


def test_what_a_daemon_has_not_counted_is_zero() -> None:
    found = status.loads({})
    assert found["opens"] == {"hits": 0, "misses": 0, "joined": 0, "refused": 0}
    assert found["clients_reported"]["bytes_shared"] == 0


def test_lines_of_many_reasons_fit_a_terminal(warmed: Trims) -> None:
    counts = {f"fallback:a_reason_{number}": number for number in range(1, 9)}
    with handover.new_socket() as client:
        client.connect(str(warmed.sockets / "handover.sock"))
        hello = messages.Hello(messages.PROTOCOL_VERSION, "1.0", 1)
        for each in (hello, messages.StatsReport({**counts, "served:torch_zip": 1000000})):
            handover.send(client, each)
        lines = warmed("status").stdout.splitlines()
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    begin = next(number for number, line in enumerate(lines) if line.startswith("fallbacks "))
    assert lines[begin + 1].startswith(" " * 10 + "a_reason_")


@pytest.mark.parametrize(("count", "more"), [(20, ""), (21, "... 1 more: `trims ls`\n")])
def test_the_images_used_last_are_shown(
    count: int, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = ImageStatus("", 1, 1, 0, False, 0, 0, 0, 1, ())
    images = tuple(image._replace(digest=f"{number:02}" * 32) for number in range(count))
    memory = MemoryStatus("memfd", "", 1 << 20, 0, 0, 0)
    reply = GetStatusReply("1.0", 3, 7, 61 * 10**9, 121 * 10**9, 0.0, "", memory, images, (), {})
    monkeypatch.setattr(status, "ask", lambda: reply)
    assert main(["status"]) == Exit.OK
    shown = capsys.readouterr().out
    assert shown.startswith("daemon    pid 7, trims_shim 1.0, up 1 min, stays\n")
    assert sum(f"{number:02}" * 6 in shown for number in range(count)) == 20
    assert shown.endswith(f"{more}\n0 clients\n")
    assert ("trims ls" in shown) == bool(more)


def test_clients_that_the_daemon_does_not_name_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: of more than 1000, metrics and pictures said 1000."""
    client = ClientStatus(1, 0, "1.0", 0, 0, 0)
    memory = MemoryStatus("memfd", "", 1 << 20, 0, 0, 0)
    clients = (client, client)  # the first is the command
    reply = GetStatusReply("1.0", 3, 7, 0, 0, 0.0, "", memory, (), clients, {}, more_clients=2)
    monkeypatch.setattr(status, "ask", lambda: reply)
    assert main(["status"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "\n3 clients\n" in shown
    assert shown.endswith("\n... 2 more\n")
    assert "; 3 clients" in top._rates(reply._replace(now_ns=1), reply)
    (family,) = (each for each in metrics._families(reply) if each.name.endswith("clients"))
    assert [sample.value for sample in family.samples] == [3]


def test_programs_of_other_containers_may_have_the_number_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found: where both are the first processes of theirs, metrics said there were no clients."""
    asking, program = (ClientStatus(os.getpid(), 0, "1.0", 0, number, 0) for number in (1, 2))
    memory = MemoryStatus("memfd", "", 1 << 20, 0, 0, 0)
    reply = GetStatusReply("1.0", 3, 7, 0, 0, 0.0, "", memory, (), (asking, program), {})
    assert status.others(reply) == [program]
    (clients,) = (each for each in metrics._families(reply) if each.name.endswith("clients"))
    assert [sample.value for sample in clients.samples] == [1]


def test_what_a_daemon_says_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be another user's."""
    said = "\x1b[2J"
    reply = GetStatusReply(
        *(said, 3, 7, 0, 0, 0.0, said),
        MemoryStatus(said, said, 1, 0, 0, 0),
        (ImageStatus(said, 1, 1, 0, False, 0, 0, 0, 1, (said,), said),),
        (),
        {},
        (DeviceStatus(said, said, said, 1, 1, 1, 0, 0, 0, 0),),
        (PreparedStatus(said, said, 1, 0, 0, 0, 0, (said,), said, said),),
        PreparedStorage(said, 1, 0, said),
    )
    monkeypatch.setattr(status, "ask", lambda: reply)
    assert main(["status"]) == Exit.OK
    assert "\x1b" not in capsys.readouterr().out


def test_what_clients_say_of_themselves_steers_no_terminal(warmed: Trims) -> None:
    """Clients of a machine-wide daemon are other users, and root looks at its status."""
    with handover.new_socket() as client:
        client.connect(str(warmed.sockets / "handover.sock"))
        hello = messages.Hello(messages.PROTOCOL_VERSION, "\x1b[2J1.0", 1)
        for each in (hello, messages.StatsReport({"fallback:\x1b[2Jreason": 1})):
            handover.send(client, each)
        shown = warmed("status").stdout
        assert r"\x1b[2J1.0" in shown
        assert r"\x1b[2Jreason 1" in shown
        assert "\x1b" not in shown


def test_status_json(warmed: Trims, model: Path) -> None:
    found = json.loads(warmed("status", "--json").stdout)
    assert found["running"]
    assert found["has_this_shells_settings"]
    assert found["images"][0]["names"] == [str(model)]
    assert found["memory"]["budget_bytes"] == 64 << 20
    assert found["opens"]["misses"] == 1
    assert found["clients_reported"]["bytes_shared"] == MODEL_BYTES
    assert found["clients"] == [], "the command itself is not shown"
    os.kill(found["pid"], 0)


KILLED = """
import os, signal, sys
import trims_shim, torch
module = torch.nn.Linear(1024, 512, bias=False)
torch.save(module.state_dict(), sys.argv[1])
module.load_state_dict(torch.load(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_did_is_counted(trims: Trims, tmp_path: Path) -> None:
    """As servers do that end by the signal that they were sent."""
    pytest.importorskip("torch")
    done = trims.python("-c", KILLED, str(tmp_path / "model.pt"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = json.loads(trims("status", "--json").stdout)["clients_reported"]
    assert found["served"] == {"torch_zip": 1}
    assert found["elided"] == {"load_state_dict": 1}
    assert found["bytes_shared"] >= MODEL_BYTES


def test_status_json_without_a_daemon(trims: Trims) -> None:
    done = trims("status", "--json")
    assert done.returncode == Exit.NO_DAEMON
    assert json.loads(done.stdout) == {"running": False, "socket_dir": str(trims.sockets)}
    assert not trims.sockets.exists()


def test_status_tells_that_the_daemon_has_other_settings(warmed: Trims) -> None:
    shown = " ".join(warmed("status", TRIMS_HOST_BYTES="32M").stdout.split())
    assert "not those the daemon was started with" in shown
    assert "`trims stop`. If it is a service, change them there, and restart it" in shown
    found = json.loads(warmed("status", "--json", TRIMS_HOST_BYTES="32M").stdout)
    assert not found["has_this_shells_settings"]


def test_ls(warmed: Trims, model: Path) -> None:
    (image,) = json.loads(warmed("ls", "--json").stdout)
    assert image["size_bytes"] == MODEL_BYTES
    titles, row = warmed("ls").stdout.splitlines()
    assert titles.split() == [
        "DIGEST",
        "SIZE",
        "TIER",
        "LEASES",
        "HITS",
        "USED",
        "NAMES",
    ]
    assert row.startswith(image["digest"][:12] + " ")
    assert row.endswith(str(model))


@pytest.mark.parametrize("command", ["ls", "status"])
def test_tables_fit_a_terminal(warmed: Trims, model: Path, command: str) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "trims_shim", *command.split()],
        env={k: v for k, v in warmed.environment.items() if k != "COLUMNS"},
        stdin=theirs,
        stdout=theirs,
    )
    os.close(theirs)
    with open(ours, encoding="utf-8", errors="replace") as terminal:
        shown = ""
        with contextlib.suppress(OSError):  # the other end is closed
            while character := terminal.read(1):
                shown += character
    assert process.wait(timeout=120) == Exit.OK
    (row,) = [line for line in shown.splitlines() if f"/{model.name}" in line]
    assert "…" in row
    assert max(map(len, shown.splitlines())) <= 80


def test_top_draws_once_where_there_is_no_terminal(warmed: Trims, model: Path) -> None:
    done = warmed("top", COLUMNS="200")
    assert done.returncode == Exit.OK, done.stderr
    assert "resident" in done.stdout
    assert model.name in done.stdout


def test_top_shows_the_ends_of_names_that_do_not_fit(warmed: Trims, model: Path) -> None:
    done = warmed("top", COLUMNS="80")
    assert done.returncode == Exit.OK, done.stderr
    assert str(model) not in done.stdout
    assert f"/{model.name}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("columns", [60, 50, 40, 30])
def test_top_shows_names_on_a_narrow_terminal(warmed: Trims, model: Path, columns: int) -> None:
    digest = json.loads(warmed("ls", "--json").stdout)[0]["digest"][:12]
    done = warmed("top", COLUMNS=str(columns))
    assert done.returncode == Exit.OK, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(f" {digest}")]
    assert row.rstrip().endswith(model.name[-10:])
    assert len(row) <= columns


def test_top_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["top"]) == Exit.FAILED
    assert "pip install 'trims-shim[cli]'" in capsys.readouterr().err


def test_text() -> None:
    assert [text.size(n) for n in (0, 1023, 1536, 200 << 20, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 MiB",
        "5120 TiB",
    ]
    assert [text.counted(n, "miss") for n in range(3)] == ["0 misses", "1 miss", "2 misses"]
    assert [text.counted(n, "hit") for n in range(3)] == ["0 hits", "1 hit", "2 hits"]
    expected = {-1: "0 s", 59: "59 s", 60: "1 min", 3599: "59 min", 3600: "1 h 0 min"}
    expected |= {3700: "1 h 1 min", 86399: "23 h 59 min", 86400: "1 d 0 h", 90000: "1 d 1 h"}
    assert {seconds: text.duration(seconds) for seconds in expected} == expected
    assert text.behind_name("a.pt: it is", "a.pt", "/a.pt") == "it is"
    assert text.behind_name("/a.pt has 0 bytes", "a.pt", "/a.pt") == "has 0 bytes"
    assert text.behind_name("a.pth: it is", "a.pt") == "a.pth: it is"
    assert text.behind_name(r"a\nb.pt: it is", "a\nb.pt") == "it is"
    assert text.bar([(2, "#"), (1, "+")], 10, width=10) == "[##+.......]"
    assert text.bar([(20, "#"), (1, "+")], 10, width=10) == "[##########]"
    assert text.bar([(1, "#")], 0, width=3) == "[...]"
    assert text.table(("A", "BB"), [("x", "1")], right=["BB"]) == "A  BB\nx   1"
    names = ("/models/a", "/models/of/b.safetensors")
    narrowed = text.table(("A", "NAMES"), [("x", each) for each in names], width=17)
    assert narrowed.splitlines()[1:] == ["x  /models/a", "x  …b.safetensors"]
    assert [text.end_of("/模型.pt", room) for room in (8, 7, 6)] == ["/模型.pt", "…型.pt", "…型.pt"]
    assert text.table(("A", "P50 MS"), [("x", "1")], right=["P50 MS"]) == "A  P50 MS\nx       1"
