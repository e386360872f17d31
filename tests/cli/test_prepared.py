"""Prepared ONNX models as ``trims`` shows and evicts them, made by a program that knows nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
from harness import wait_until
from onnx_models import perceptron

from trims_shim.cli import top
from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import prepared_lines, prepared_table, row_of
from trims_shim.wire import admin

from .conftest import Trims

PROGRAM = """\
import sys, onnxruntime
onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
"""
PATIENCE_S = 150


def _status(trims: Trims) -> Any:
    return json.loads(trims("status", "--json").stdout)


def _wait(trims: Trims) -> list[Any]:
    """What became of it."""

    def rows_when_done() -> list[Any]:
        rows: list[Any] = _status(trims)["prepared"]
        return [] if any(row["state"] == "preparing" for row in rows) else rows

    done: list[Any] = wait_until(rows_when_done, "prepared", timeout_s=PATIENCE_S, interval_s=0.5)
    return done


@pytest.fixture(scope="module")
def onnx_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    path.write_bytes(perceptron(width=512).content)
    return path


def prepare(trims: Trims, model: Path) -> Trims:
    """A daemon runs, and has the model prepared."""
    trims.environment.update(
        TRIMS_MIN_BYTES="1", TRIMS_PREPARE_ANYWAY_BYTES="1", TRIMS_PREPARE_PRIORITY="normal"
    )
    done = trims("run", "-c", PROGRAM, str(model))
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in _wait(trims)] == ["ready"]
    return trims


@pytest.fixture(scope="module")
def prepared(new_trims: Callable[[], Trims], onnx_model: Path) -> Trims:
    """For those who look at it."""
    return prepare(new_trims(), onnx_model)


def test_status_shows_it(prepared: Trims, onnx_model: Path) -> None:
    prepared("run", "-c", PROGRAM, str(onnx_model))
    found = _status(prepared)
    (row,) = found["prepared"]
    assert row["names"] == [str(onnx_model)]
    assert row["hits"] >= 1
    assert found["prepared_opens"]["made"] == 1
    storage = found["storage"]
    assert storage["directory"] == f"{prepared.environment['XDG_CACHE_HOME']}/trims/prepared"
    assert storage["resident_bytes"] == row["size_bytes"]
    text = prepared("status").stdout
    assert f"in {storage['directory']}\n" in text
    assert "1 ONNX model, 0 in preparation, 0 not servable" in text
    assert row["key"][:12] in text


def test_top_shows_it(prepared: Trims, onnx_model: Path) -> None:
    text = prepared("top", COLUMNS="200").stdout
    assert "ready" in text
    assert onnx_model.name in text


def test_info_shows_the_place(prepared: Trims) -> None:
    found = json.loads(prepared("info", "--json").stdout)["prepared"]
    assert found["is_available"]
    assert found["exists"]
    assert found["budget_bytes"] > 0
    text = prepared("info").stdout
    assert "prepared ONNX models" in text
    assert found["directory"] in text


def test_info_says_why_there_are_none(trims: Trims, tmp_path: Path) -> None:
    (tmp_path / "prepared").symlink_to(tmp_path)
    done = trims("info", TRIMS_CACHE_DIR=str(tmp_path))
    assert f"models off: {tmp_path}/prepared is not a directory" in " ".join(done.stdout.split())
    done = trims("info", "--json", TRIMS_PREPARED_BYTES="0")
    found = json.loads(done.stdout)["prepared"]
    assert not found["is_available"]
    assert found["problem"] == "TRIMS_PREPARED_BYTES=0"


def test_evict(trims: Trims, onnx_model: Path) -> None:
    prepared = prepare(trims, onnx_model)
    (row,) = _status(prepared)["prepared"]
    done = prepared("evict", "--json", onnx_model.name, cwd=onnx_model.parent)
    assert done.returncode == Exit.OK, done.stderr
    reply = json.loads(done.stdout)
    assert reply["prepared"] == [row["key"]]
    assert reply["prepared_freed_bytes"] == row["size_bytes"]
    assert reply["digests"] == []
    assert _status(prepared)["prepared"] == []
    again = prepared("evict", str(onnx_model))
    assert again.returncode == Exit.FAILED
    assert "no resident image" in again.stderr
    assert "0 prepared models" in prepared("evict", "--all").stdout


def test_a_restart_serves_what_was_prepared(trims: Trims, onnx_model: Path) -> None:
    prepare(trims, onnx_model)
    assert trims("stop").returncode == Exit.OK
    trims("run", "-c", PROGRAM, str(onnx_model))
    assert _status(trims)["prepared_opens"]["hit"] == 1


# --- without a daemon -----------------------------------------------------------------------------


def _reply(*rows: admin.PreparedStatus, problem: str = "") -> admin.GetStatusReply:
    memory = admin.MemoryStatus("memfd", "", 1, 0, 0, 0)
    storage = admin.PreparedStorage("/cache/prepared", 1 << 20, 1 << 19, problem)
    return admin.GetStatusReply(
        "1.0", 3, 1, 0, 10**9, 0.0, "", memory, (), (), {}, (), rows, storage
    )


def _row(state: str, key: str = "a" * 64, reason: str = "") -> admin.PreparedStatus:
    return admin.PreparedStatus(key, state, 1 << 20, 1, 2, 0, 5, ("/m.onnx",), "1.31.1", reason)


def test_lines() -> None:
    rows = (_row("ready"), _row("preparing", ""), _row("refused", reason="unknown_model"))
    first, second, third, fourth = prepared_lines(_reply(*rows))
    assert first.endswith("512 KiB of 1.0 MiB")
    assert second.endswith("in /cache/prepared")
    assert "1 ONNX model, 1 in preparation, 1 not servable" in third
    assert "0 hits" in fourth
    assert prepared_lines(_reply(problem="no disk")) == ["prepared  no ONNX models: no disk"]
    long = prepared_lines(_reply(problem="no room " * 20))
    assert len(long) > 1
    assert all(len(line) <= 80 for line in long)
    assert all(line.startswith(" " * 10) for line in long[1:])
    nothing_told = admin.GetStatusReply(
        "1.0", 3, 1, 0, 0, 0.0, "", admin.MemoryStatus("memfd", "", 1, 0, 0, 0), (), (), {}
    )
    assert prepared_lines(nothing_told) == []


def test_each_number_is_in_its_place() -> None:
    rows = [_row("ready")] * 3 + [_row("preparing")] * 2 + [_row("refused")] * 4
    counters = {"prepared_hit": 5, "prepared_made": 6, "prepared_failed": 7, "prepared_refused": 8}
    first, _, third, fourth = prepared_lines(_reply(*rows)._replace(counters=counters))
    assert first.count("#") == first.count(".") - 1 == 15  # and 1.0 MiB
    assert third.strip() == "3 ONNX models, 2 in preparation, 4 not servable;"
    assert fourth.strip() == "5 hits, 6 made, 7 failed, 8 refused"


def test_a_full_reply_may_leave_some_out() -> None:
    """Found: of 300 models that could not be prepared, 200 were said to be all."""
    rows = [_row("ready")] + [_row("refused")] * (admin.PREPARED_IN_REPLY - 1)
    third = prepared_lines(_reply(*rows))[2]
    assert third.strip() == "1 ONNX model, 0 in preparation, 199 not servable, or more;"
    assert "or more" not in prepared_lines(_reply(*rows[1:]))[2]


def test_no_models() -> None:
    """Yet, or any more."""
    assert prepared_lines(_reply()) == ["prepared  no ONNX model yet; there may be 1.0 MiB of them"]
    after = prepared_lines(_reply()._replace(counters={"prepared_made": 1}))
    assert after[-1].strip() == "0 hits, 1 made, 0 failed, 0 refused"


def test_a_path_is_not_cut_in_a_problem() -> None:
    path = f"/{'long-' * 20}"
    assert any(line.strip() == path for line in prepared_lines(_reply(problem=f"{path} is full")))


def test_table() -> None:
    rows = (_row("ready"), _row("preparing", ""), _row("refused", reason="unknown_model"))
    _, ready, preparing, refused = prepared_table(_reply(*rows)).splitlines()
    assert ready.split() == [
        "aaaaaaaaaaaa",
        "ready",
        "1.0",
        "MiB",
        "1",
        "2",
        "1",
        "s",
        "ago",
        "/m.onnx",
    ]
    assert preparing.split()[:2] == ["?", "preparing"]
    assert "refused: unknown_model" in refused
    many = prepared_table(_reply(*[_row("ready")] * 25))
    assert many.endswith("... 5 more: `trims status --json`")
    assert "more" not in prepared_table(_reply(*[_row("ready")] * 20))


@pytest.mark.parametrize("state", ["preparing", "refused"])
def test_what_only_ready_models_have_is_left_blank(state: str) -> None:
    assert row_of(_row(state), 0)[2:5] == ("", "", "")


def test_names_are_told_apart_and_printable() -> None:
    row = _row("ready")._replace(names=("/a b.onnx", "/\x1b[2J.onnx"))
    assert row_of(row, 0)[-1] == "/a b.onnx, /\\x1b[2J.onnx"


@pytest.mark.parametrize(("images", "rows"), [(50, 1), (2, 50), (50, 50)])
def test_top_fits_the_screen_and_says_what_it_leaves_out(images: int, rows: int) -> None:
    image = admin.ImageStatus("b" * 64, 1 << 20, 1 << 20, 0, False, 0, 0, 0, 1, ("/m.pt",))
    reply = _reply(*[_row("ready")] * rows)._replace(images=(image,) * images)
    drawn = io.StringIO()
    rich.console.Console(width=80, file=drawn).print(top._draw(reply, None, 80, 30))
    lines = drawn.getvalue().splitlines()
    assert 25 <= len(lines) <= 30
    shown = sum(line.endswith(("/m.pt", "/m.onnx")) for line in map(str.rstrip, lines))
    left_out = sum(int(line.split()[1]) for line in lines if line.startswith(" ... "))
    assert shown + left_out == images + rows
    assert left_out
