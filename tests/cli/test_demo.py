"""``trims demo``: what a person sees of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trims_shim.cli import demo
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

from .conftest import Trims

WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None\n"
    "from trims_shim.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def test_without_torch_it_says_so(trims: Trims) -> None:
    without = WITHOUT_RICH.replace("rich", "torch")
    done = trims.python("-c", without, "demo")
    assert (done.returncode, done.stdout) == (Exit.FAILED, "")
    assert done.stderr.endswith("has no torch; install it there\n")
    assert "Traceback" not in done.stderr


def test_with_a_setting_that_cannot_be_used_nothing_is_measured(trims: Trims) -> None:
    done = trims("demo", "--size-mb=1", "--processes=2", TRIMS_HOST_BYTES="lots")
    assert (done.returncode, done.stdout) == (Exit.USAGE, ""), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()  # said once, and nothing was begun
    assert line.startswith("trims_shim stays inactive: TRIMS_HOST_BYTES: 'lots' is not a size")


@pytest.mark.slow
def test_the_demonstration_succeeds_without_extras_and_fits_a_narrow_terminal(
    trims: Trims, tmp_path: Path
) -> None:
    temporary = tmp_path / ("longer_than_a_name_of_a_socket_" * 4)
    temporary.mkdir()
    done = trims.python(
        *("-c", WITHOUT_RICH, "demo", "--size-mb=1", "--processes=2"),
        TRIMS_HOST_BYTES="1G",
        TMPDIR=str(temporary),
    )
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    table, _, conclusion = done.stdout.partition("\n\n#1 fills the cache.")
    assert [line.split()[0] for line in table.splitlines()[2:]] == [
        "PROCESS",
        "without",
        "#1",
        "#2",
    ]
    assert table.count("the same") == 3
    assert max(map(len, done.stdout.splitlines())) < 80
    assert "Once the model is in the cache" in conclusion
    assert not list(temporary.iterdir()), "nothing is left"


def test_a_model_that_is_not_made_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_ANSWER_DEADLINE_S", 0.01)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert main(["demo", "--size-mb=1"]) == Exit.FAILED
    assert "not made within 0.01 s; try a smaller --size-mb" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_without_room_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert main(["demo", "--size-mb=1000000000"]) == Exit.FAILED
    assert f"needs 1000000000 MB on disk in {tmp_path}, and " in capsys.readouterr().err
    monkeypatch.setattr(demo, "available_bytes", lambda: 2_000_000)
    assert main(["demo", "--size-mb=1"]) == Exit.FAILED
    assert "needs 3 MB of memory, and 2 MB are free" in capsys.readouterr().err


def test_nothing_is_left_where_it_is_ended(trims: Trims, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trims_shim", "demo", "--size-mb=1"],
        env=trims.environment | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        while "process 1 of 4 with trims" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read().endswith("... interrupted; everything was removed\n")
    assert process.returncode == Exit.INTERRUPTED
    assert not list(tmp_path.iterdir())


def test_a_closed_terminal_ends_it_as_well_but_not_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), demo._ending_as_by_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with demo._ending_as_by_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_was_made_goes_also_if_the_end_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(demo, "_stop_daemon", interrupted)
    with pytest.raises(KeyboardInterrupt), demo._place(1):
        pass
    assert not list(tmp_path.iterdir())
