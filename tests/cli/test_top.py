"""``top`` on a terminal: a picture after the other, until somebody or the daemon ends it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
from rich.console import Console

from trims_shim.cli import top
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.errors import DaemonUnavailable
from trims_shim.wire.admin import (
    ClientStatus,
    GetStatusReply,
    ImageStatus,
    MemoryStatus,
    PreparedStatus,
)

S = 1_000_000_000


def status(at_ns: int, *, pid: int = 3, **counters: int) -> GetStatusReply:
    memory = MemoryStatus("memfd", "", 1 << 20, 0, 0, 0)
    return GetStatusReply("1.0", 3, pid, 0, at_ns, 0.0, "", memory, (), (), counters)


def drawn(now: GetStatusReply, before: GetStatusReply | None) -> str:
    return str(top._draw(now, before, 200).renderables[0])


def test_rates_are_per_second_since_the_last_picture() -> None:
    before = status(10 * S, open_hit=5, prepared_hit=1)
    now = status(14 * S, open_hit=15, prepared_hit=3, refused=1)
    client = ClientStatus(1, 1, "1.0", 0, 0, 0)  # the first is this command
    now = now._replace(clients=(client, client), more_clients=3)
    rates = "2.5 hits/s, 0.0 misses/s, 0.5 prepared/s, 0.2 refusals/s; 4 clients"
    assert rates in drawn(now, before)


@pytest.mark.parametrize("before", [None, status(10 * S, pid=4), status(14 * S), status(15 * S)])
def test_there_are_no_rates_without_an_earlier_picture_of_the_same_daemon(
    before: GetStatusReply | None,
) -> None:
    assert "hits/s" not in drawn(status(14 * S, open_hit=5), before)


@pytest.mark.parametrize(
    ("images", "prepared", "shown"),
    [(1, 30, (1, 9)), (30, 1, (9, 1)), (30, 30, (3, 6)), (30, 0, (14, 0))],
)
def test_the_tables_fill_a_terminal_and_no_more(
    images: int, prepared: int, shown: tuple[int, int]
) -> None:
    """A short one leaves its room to the other; else, the one that is drawn first is short."""
    image = ImageStatus("ab" * 32, 1, 1, 0, False, 0, 0, 0, 1, ("/m.pt",))
    model = PreparedStatus("cd" * 32, "ready", 1, 0, 0, 0, 1, ("/m.onnx",), "1.22")
    now = status(0)._replace(images=(image,) * images, prepared=(model,) * prepared)
    picture = io.StringIO()
    Console(file=picture, width=200).print(top._draw(now, None, 200, 24))
    lines = picture.getvalue().splitlines()
    assert len(lines) == 24
    assert tuple(sum(name in line for line in lines) for name in ("/m.pt", "/m.onnx")) == shown


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (61, "digest size tier leases hits used names"),
        (60, "digest size tier leases hits names"),
        (46, "digest size tier leases names"),
    ],
)
def test_a_narrow_terminal_shows_the_ends_of_names(width: int, titles: str) -> None:
    """Found: there, wrapped lines above the table moved its end out of the picture."""
    image = ImageStatus("ab" * 32, 1, 1, 0, False, 0, 0, 0, 1, (f"/{'models/' * 9}m.pt",))
    now = status(S)._replace(images=(image,) * 30, package="1.0.dev12345+on.a.branch.of.mine")
    picture = io.StringIO()
    Console(file=picture, width=width).print(top._draw(now, None, width, 24))
    lines = [line.strip() for line in picture.getvalue().splitlines()]
    assert len(lines) == 24
    assert titles.split() in [line.split() for line in lines]
    assert any(line.endswith(" more") for line in lines)
    assert all(line.endswith("/m.pt") for line in lines if line.startswith("abab"))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exit]:
    """Run it on a terminal, with what the daemon answers."""
    monkeypatch.setenv("TERM", "xterm")

    def run(
        *answers: GetStatusReply | BaseException, options: Sequence[str] = ("--interval", "0.1")
    ) -> Exit:
        left: Iterator[GetStatusReply | BaseException] = iter(answers)

        def ask() -> GetStatusReply:
            answer = next(left)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(top, "ask", ask)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "200")
        return Exit(main(["top", *options]))

    return run


@pytest.mark.parametrize("tier", ["[/bold]", "[link=http://elsewhere]host"])
def test_a_daemon_writes_no_markup(tier: str) -> None:
    """It may be another user's. Found: the first ended the command, the second was a link."""
    image = ImageStatus("ab" * 32, 1, 1, 0, False, 0, 0, 0, 1, ("/m.pt",), tier)
    picture = io.StringIO()
    console = Console(file=picture, width=200, force_terminal=True)
    console.print(top._draw(status(S)._replace(images=(image,)), None, 200))
    assert tier in picture.getvalue()


def test_it_draws_until_ctrl_c(
    live: Callable[..., Exit], capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = [status(number * S, open_hit=number * number) for number in range(3)]
    assert live(*pictures, KeyboardInterrupt()) == Exit.OK
    shown = capsys.readouterr().out
    assert shown.index("1.0 hits/s") < shown.index("3.0 hits/s")


def test_it_draws_once_if_told_to(live: Callable[..., Exit]) -> None:
    assert live(status(0), options=["--once"]) == Exit.OK


def test_it_draws_once_on_a_terminal_that_shows_nothing_live(
    live: Callable[..., Exit], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert live(status(0, pid=7), KeyboardInterrupt()) == Exit.OK
    assert "pid 7" in capsys.readouterr().out


def test_it_prints_data_if_told_to(
    live: Callable[..., Exit], capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``trims status --json`` prints."""
    assert live(status(0, pid=7), options=["--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["pid"], found["running"], found["opens"]["hits"]) == (7, True, 0)


def test_it_ends_with_the_daemon(
    live: Callable[..., Exit], capsys: pytest.CaptureFixture[str]
) -> None:
    assert live(status(0), DaemonUnavailable("gone")) == Exit.NO_DAEMON
    assert capsys.readouterr().out.endswith("the daemon has gone\n")
