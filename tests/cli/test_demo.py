"""``trims demo``: what a person sees of it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trims_shim
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
def test_the_demonstration_succeeds_without_extras_or_numpy_and_fits_a_narrow_terminal(
    trims: Trims, tmp_path: Path
) -> None:
    temporary = tmp_path / ("longer_than_a_name_of_a_socket_" * 4)
    temporary.mkdir()
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError\n")
    done = trims.python(
        *("-c", WITHOUT_RICH, "demo", "--size-mb=1", "--processes=2"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        TRIMS_HOST_BYTES="1G",
        TMPDIR=str(temporary),
    )
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    table, _, conclusion = done.stdout.partition("\n\n#1 starts the daemon and fills the cache.")
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
    assert "a model of 84 MB needs 252 MB of memory, and 2 MB are free\n" in capsys.readouterr().err


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


def test_a_program_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_STOP_DEADLINE_S", 0.05)
    process = subprocess.Popen(
        ["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    demo._end(process)
    assert process.returncode == -signal.SIGKILL


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


_PROGRAM = """
import json, sys, trims_shim
numbers = dict.fromkeys(("pid", "load_s", "load_state_dict_s", "first_answer_s"), 0)
print(json.dumps({**numbers, "checksum": trims_shim.__file__}), flush=True)
sys.stdin.read()
"""


def test_no_code_comes_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found: below /tmp, another user's ``trims_shim`` was run."""
    others = tmp_path / "trims_shim"
    others.mkdir()
    (others / "__init__.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    with demo._place(1) as place:
        place.program.write_text(_PROGRAM)
        with demo._program(place, "#1", True) as run:
            assert run.checksum == trims_shim.__file__


def ran(label: str, ready_s: float, private_bytes: int, **others: Any) -> demo._Run:
    """One process; what it shares and computes is what a served one does, unless given."""
    served: dict[str, Any] = {"shared_fraction": 1.0, "segments": ("0:7",), "checksum": "c"}
    return demo._Run(
        label=label,
        pid=1,
        load_s=ready_s,
        load_state_dict_s=0.0,
        first_answer_s=1.0,
        private_bytes=private_bytes,
        **{"with_shim": True} | served | others,
    )


PLAIN = ran("without trims", 3.0, 900_000_000, with_shim=False, shared_fraction=0.0, segments=())
FIRST, LATER = ran("#1", 2.0, 200_000_000), ran("#2", 0.1, 100_000_000)


def test_what_is_concluded_is_what_was_measured() -> None:
    is_good, said = demo._conclude([PLAIN, FIRST, LATER, replace(LATER, private_bytes=300_000_000)])
    assert is_good
    assert said == [
        "Once the model is in the cache, a process has its weights after 100 ms instead of 3.00 s "
        "(30 times faster).",
        "Each further process takes 200 MB of memory of its own instead of 900 MB (700 MB less).",
    ]
    costly = replace(LATER, load_s=2.0, private_bytes=901_000_000)
    is_good, said = demo._conclude([PLAIN, FIRST, costly])
    assert is_good
    assert "(1.50 times the speed)" in said[0]
    assert "(1 MB more)" in said[1]


def test_other_results_are_no_success() -> None:
    is_good, said = demo._conclude([PLAIN, FIRST, replace(LATER, checksum="d")])
    assert not is_good
    assert said[0] == "The results differ. This is a bug: please report it."
    assert "ANOTHER" in demo._table([PLAIN, replace(LATER, checksum="d")])


@pytest.mark.parametrize(
    "change",
    [{"shared_fraction": 0.89}, {"segments": ("0:8",)}, {"segments": ()}, {"with_shim": False}],
)
def test_processes_that_were_not_served_are_no_success(change: dict[str, Any]) -> None:
    """Also those with a copy of their own that seems to be shared."""
    is_good, said = demo._conclude([PLAIN, FIRST, LATER, replace(LATER, **change)])
    assert not is_good
    assert "of 2 later processes were not served by the cache; " in said[0]
    assert len(said) == (1 if "segments" in change else 3), "of those that were, the rest is said"


@pytest.mark.slow
def test_why_processes_were_not_served_is_said(trims: Trims) -> None:
    done = trims("demo", "--size-mb=1", "--processes=2", TRIMS_GROUP="no-such-group")
    assert done.returncode == Exit.FAILED
    said = " ".join(done.stdout.split())
    assert "the framework's own loader was used (daemon_start_failed): the daemon could not" in said
    assert "no group 'no-such-group' on this machine" in said


def test_what_a_process_shares_is_what_it_has_mapped_and_not_written(tmp_path: Path) -> None:
    page, pages = mmap.PAGESIZE, 16
    named = tmp_path / "library"
    named.write_bytes(bytes(pages * page))
    memory = os.memfd_create("model")
    try:
        os.truncate(memory, pages * page)
        with named.open("rb") as file, contextlib.ExitStack() as stack:
            for descriptor in (memory, file.fileno()):
                each = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE)
                stack.enter_context(each)[: 3 * page] = bytes(3 * page)
            shared = demo._shared_by_segment(os.getpid())
            inodes = {int(segment.rpartition(":")[2]): shared[segment] for segment in shared}
        assert inodes[os.fstat(memory).st_ino] == (pages - 3) * page
        assert not inodes.keys() & {0, named.stat().st_ino}
    finally:
        os.close(memory)


def test_small_files_that_are_deleted_are_no_part_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are the libraries of a package that was upgraded under a program."""
    (tmp_path / "model.pt").write_bytes(bytes(100))
    monkeypatch.setattr(demo, "_shared_by_segment", lambda _: {"0:7": 95, "0:8": 40})
    (run,) = demo._observe([replace(LATER, pid=os.getpid())], demo._Place(tmp_path, tmp_path, 1))
    assert (run.segments, run.shared_fraction) == (("0:7",), 0.95)


MEMORY_OF_ITS_OWN = """
import json, mmap, os
from trims_shim.cli import demo
before, pages = demo._totals(os.getpid()), 8192
with mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE) as mapping:
    for page in range(pages):
        mapping[page * 4096] = 1
    after = demo._totals(os.getpid())
names = ("Private_Dirty", "Pss")
print(json.dumps([(after[name] - before[name]) / (pages * 4096) for name in names]))
"""


def test_memory_of_its_own() -> None:
    """In a process in which nothing else comes or goes."""
    words = [sys.executable, "-c", MEMORY_OF_ITS_OWN]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert [round(each, 1) for each in json.loads(said)] == [1, 1]
