"""The pytest plugin, in test runs of its own.

The inner suites use safetensors.numpy: importing torch in each would take longer than the tests.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from harness import process_state, wait_until
from onnx_models import perceptron, save
from safetensors.numpy import save_file

import _trims_pytest as plugin
from trims_shim.diagnostics import Stats
from trims_shim.wire.endpoint import Endpoint

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120
TRIMS = (sys.executable, "-m", "trims_shim")

SUITE = """
import os, subprocess, sys
import pytest
from safetensors.numpy import load_file
from trims_shim.testing import TrimsDaemon

MODEL = os.environ["MODEL"]

@pytest.mark.parametrize("i", range(4))
def test_served(i, trims_stats):
    assert load_file(MODEL)["w"][7] == 7
    stats = trims_stats()
    assert (stats.served, stats.bytes_shared) == (1, os.path.getsize(MODEL))

def test_small(tmp_path, trims_stats):
    from safetensors.numpy import save_file
    import numpy
    save_file({"w": numpy.zeros(1)}, tmp_path / "small")
    load_file(tmp_path / "small")
    assert trims_stats().fallbacks == {"small_file": 1}

def test_subprocess_uses_the_same_daemon(trims_daemon):
    assert trims_daemon.warm(MODEL) == trims_daemon.status().images[0].digest
    code = ("import sys, trims_shim; from safetensors.numpy import load_file; "
            "load_file(sys.argv[1]); print(trims_shim.stats().hits)")
    done = subprocess.run([sys.executable, "-c", code, MODEL], capture_output=True, text=True)
    assert done.stdout == "1\\n", done.stderr
    assert trims_daemon.socket_dir == os.environ["TRIMS_SOCKET_DIR"]
    assert type(trims_daemon) is TrimsDaemon
"""


@pytest.fixture(autouse=True)
def environment(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """As outside of any test run, with a model, and nothing left behind in the temp directory."""
    for name in list(os.environ):
        if name.startswith(("TRIMS_", "_TRIMS_", "PYTEST_")):
            monkeypatch.delenv(name)
    model = tmp_path / "model.safetensors"
    save_file({"w": numpy.arange(1 << 20, dtype=numpy.float32)}, model)
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    pytester.makepyfile(test_suite=SUITE)
    with tempfile.TemporaryDirectory(prefix="t-") as directory:  # sockets need short paths
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert not list(Path(directory).glob("trims-pytest-*"))


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *words, timeout=LIMIT_S)


def test_off_it_imports_nothing_and_says_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import os, sys\n"
        "def pytest_configure(config):\n"
        "    assert config.pluginmanager.has_plugin('trims')\n"
        "    assert not {'torch', 'trims_shim', 'numpy', 'zmq'} & set(sys.modules)\n"
        "    assert not [name for name in os.environ if name.startswith('TRIMS_')]\n"
    )
    result = run(pytester, "-rs")
    result.assert_outcomes(skipped=6)
    assert "trims:" not in result.stdout.str()
    assert "= trims =" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*trims is off; run with --trims*"])


def test_on_one_process(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import os, sys\nassert 'trims_shim' in sys.modules and os.environ['TRIMS_SOCKET_DIR']\n"
    )
    result = run(pytester, "--trims")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(
        [
            "trims: on, socket *trims-pytest-*, isolated (from --trims)",
            "4 loads served (4 hits, 1 miss)*",  # The other hit is of warm().
            "1 load by the framework's own loader: small_file 1",
        ]
    )


def test_workers_share_one_daemon(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntrims = true\ntrims_host_bytes = 64M\n")
    pytester.makepyfile(
        test_more="def test_one_daemon(trims_daemon, record_property):\n"
        "    trims_daemon.warm(__import__('os').environ['MODEL'])\n"
        "    status = trims_daemon.status()\n"
        "    assert status.memory.budget_bytes == 64 << 20\n"
        "    assert status.counters['open_miss'] == 1\n"
    )
    result = run(pytester, "-n", "2")
    result.assert_outcomes(passed=7)
    output = result.stdout.str()
    assert len(re.findall(r"trims: on, .* isolated \(from ini\)", output)) == 1
    assert "4 loads served" in output, "counted over both workers"
    assert "small_file 1" in output


def test_a_worker_that_is_interrupted_is_counted_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_exit="import pytest\ndef test_exit(): pytest.exit('enough')\n")
    output = run(pytester, "--trims", "-n", "1", "test_suite.py", "test_exit.py").stdout.str()
    assert "received keyboard-interrupt" in output
    assert "4 loads served" in output
    assert "small_file 1" in output


def test_loads_that_joined_another_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first ones of workers that start together."""
    counted = Stats(3, 1, 1, 1, 0, 6_000_000, {}, {})
    monkeypatch.setattr(plugin, "_since", lambda before: counted)
    lines: list[str] = []
    reporter = SimpleNamespace(section=lambda title: None, line=lines.append)
    config = object.__new__(pytest.Config)
    monkeypatch.setitem(plugin._runs, config, plugin._Run("ini", "", True, True, True))
    plugin.pytest_terminal_summary(reporter, config)
    assert lines == [
        "3 loads served (1 hit, 1 miss, 1 joined), 6 MB shared, 0 copies elided",
    ]


def test_a_conftest_may_load_the_plugin(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\ntrims = true\n")
    pytester.makeconftest("pytest_plugins = ['_trims_pytest']\n")
    result = run(pytester, "-k", "served")
    result.assert_outcomes(passed=4, deselected=2)
    result.stdout.fnmatch_lines(["trims: on, * isolated (from ini)"])


def configured(root: Path, **ini: object) -> pytest.Config:
    """As pytest's, with these ini keys."""
    values = {"trims": False, "trims_shared": False, "trims_socket_dir": "", "trims_host_bytes": ""}
    config: Any = SimpleNamespace(rootpath=root, getini={**values, **ini}.__getitem__)
    return cast(pytest.Config, config)


@pytest.mark.parametrize(
    ("text", "source"),
    [("0", ""), ("false", ""), ("NO", ""), ("Off", ""), ("1", "ini"), ("", "ini")],
)
def test_spellings_that_switch_the_ini_key_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, source: str
) -> None:
    monkeypatch.setenv("TRIMS_ENABLED", text)
    assert plugin._source(configured(tmp_path, trims=True), None) == source


def test_a_run_leaves_the_variables_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = configured(tmp_path)
    run = plugin._choose(config, "ini")
    ours = {"TRIMS_IDLE_EXIT", "TRIMS_CACHE_DIR"}
    assert ours < set(plugin._environment(config, run))
    for name in ours:
        monkeypatch.setenv(name, "7")
    assert not ours & set(plugin._environment(config, run))


def test_what_a_killed_run_has_left_goes_a_day_later(
    pytester: pytest.Pytester,
) -> None:
    """Else prepared models would fill the disk. A daemon may be in use all the time."""
    base = Path(os.environ["TMPDIR"])
    left, young, held, other = (
        base / name for name in ("trims-pytest-1", "trims-pytest-2", "trims-pytest-3", "trims")
    )
    day_before = time.time() - 86_400 - 60
    for directory in (left, young, held, other):
        (directory / "cache").mkdir(parents=True)
        Path(Endpoint(str(directory)).lock).touch()
        if directory is not young:
            os.utime(directory, (day_before, day_before))
    (base / "trims-pytest-4").symlink_to(other)
    with open(Endpoint(str(held)).lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(pytester, "--trims", "-k", "small").assert_outcomes(passed=1)
    kept = sorted(base.glob("trims-pytest-*"))
    for each in kept:
        each.rename(base / f"kept-{each.name}")  # nothing of this name may be left by a test
    assert [each.name[-1] for each in kept] == ["2", "3", "4"]
    assert (other / "cache").is_dir()


def test_which_directory_is_whose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choose(**ini: object) -> tuple[str, bool, bool]:
        run = plugin._choose(configured(tmp_path, **ini), "ini")
        return run.socket_dir, run.is_owner, run.is_directory_ours

    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setenv("HOME", "/home/x")
    assert choose(trims_socket_dir="s") == (f"{tmp_path}/s", True, False)
    assert choose(trims_socket_dir="~/s") == ("/home/x/s", True, False)
    assert choose(trims_shared=True) == ("", False, False)
    # A test's own test run, and a worker on another machine: the run's name alone, or no name.
    for name, value in (("_TRIMS_PYTEST_SOCKET_DIR", "/run/s"), ("PYTEST_XDIST_WORKER", "gw0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            directory, *mine = choose()
            assert os.path.dirname(directory) == "/tmp"
            assert mine == [True, True]
    monkeypatch.setenv("_TRIMS_PYTEST_SOCKET_DIR", "/run/s")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert choose() == ("/run/s", False, False)


def test_a_long_temporary_directory_has_no_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 60)
    directory = plugin._choose(configured(tmp_path), "ini").socket_dir
    assert os.path.dirname(directory) == "/tmp"


def test_stats_of_a_test_have_what_its_fixtures_load(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_suite="import os, pytest\n"
        "from safetensors.numpy import load_file\n"
        "@pytest.fixture\n"
        "def weights():\n"
        "    return load_file(os.environ['MODEL'])\n"
        "@pytest.mark.parametrize('i', range(2))\n"
        "def test_served(i, weights, trims_stats):\n"
        "    assert trims_stats().served == 1\n"
    )
    run(pytester, "--trims").assert_outcomes(passed=2)


def test_all_workers_have_the_same_daemon(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(
        test_suite="import os, pathlib\n"
        "def test_daemon(trims_daemon, worker_id):\n"
        "    trims_daemon.warm(os.environ['MODEL'])\n"
        "    seen = f'{trims_daemon.status().pid} in {trims_daemon.socket_dir}'\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'seen-' + worker_id).write_text(seen)\n"
    )
    result = run(pytester, "--trims", "-n", "2", "--dist", "each")
    result.assert_outcomes(passed=2)
    seen = [path.read_text() for path in tmp_path.glob("seen-gw*")]
    assert len(seen) == 2
    assert len(set(seen)) == 1
    result.stdout.fnmatch_lines([f"trims: on, socket {seen[0].split(' in ')[1]}, isolated*"])


def test_models_of_onnxruntime_are_prepared_for_the_run(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    save(perceptron(width=700))(tmp_path / "model.onnx")
    pytester.makepyfile(
        test_suite="import os, onnxruntime\n"
        f"MODEL = {str(tmp_path / 'model.onnx')!r}\n"
        "def test_served(trims_daemon, trims_stats):\n"
        "    key = trims_daemon.warm(MODEL)\n"
        "    onnxruntime.InferenceSession(MODEL)\n"
        "    assert trims_stats().served == 1\n"
        "    status = trims_daemon.status()\n"
        "    assert status.storage.directory.startswith(os.environ['TRIMS_SOCKET_DIR'])\n"
        "    assert [row.key for row in status.prepared] == [key]\n"
    )
    variables = {
        "TRIMS_MIN_BYTES": "1",
        "TRIMS_PREPARE_ANYWAY_BYTES": "1",
        "TRIMS_PREPARE_PRIORITY": "normal",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        run(pytester, "--trims").assert_outcomes(passed=1)


def test_which_wish_wins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeini("[pytest]\ntrims = true\n")
    one = ("-k", "small")
    run(pytester, "--no-trims", *one).assert_outcomes(skipped=1, deselected=5)
    monkeypatch.setenv("TRIMS_ENABLED", "0")
    run(pytester, *one).assert_outcomes(skipped=1, deselected=5)
    run(pytester, "--trims", *one).assert_outcomes(passed=1, deselected=5)


def test_shared_daemon_is_left_running(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = tempfile.mkdtemp(prefix="trims-plug-")
    try:
        pytester.makeini(f"[pytest]\ntrims_shared = true\ntrims_socket_dir = {sockets}\n")
        result = run(pytester, "--trims", "-k", "served")
        result.assert_outcomes(passed=4, deselected=2)
        result.stdout.fnmatch_lines([f"trims: on, socket {sockets}, shared with*"])
        monkeypatch.setenv("TRIMS_SOCKET_DIR", sockets)
        assert os.environ["MODEL"] in pytester.run(*TRIMS, "ls", timeout=LIMIT_S).stdout.str()
        monkeypatch.delenv("TRIMS_SOCKET_DIR")
        # The same directory, not shared: this run's to stop, but not to remove.
        pytester.makeini(f"[pytest]\ntrims_socket_dir = {sockets}\n")
        run(pytester, "--trims", "-k", "served").assert_outcomes(passed=4, deselected=2)
        assert not os.path.exists(os.path.join(sockets, "handover.sock"))
        assert os.path.isdir(sockets)
    finally:
        monkeypatch.setenv("TRIMS_SOCKET_DIR", sockets)
        pytester.run(*TRIMS, "stop", timeout=LIMIT_S)
        for path in Path(sockets).iterdir():
            path.unlink()
        Path(sockets).rmdir()


PROGRAM = """
import os, sys
{first}
import pytest
assert pytest.main(["--trims", "-q", "-p", "no:cacheprovider", "-k", "served"]) == 0
import trims_shim
from safetensors.numpy import load_file
before = trims_shim.stats().served
load_file(os.environ["MODEL"])
print("in the program:", trims_shim.enabled(), trims_shim.stats().served - before)
"""


@pytest.mark.parametrize(
    ("first", "outcome"),
    [
        ("import trims_shim", "True 1"),
        ("", "False 0"),
        (
            "import trims_shim; from safetensors.numpy import load_file\n"
            "load_file(os.environ['MODEL'])",
            "True 1",
        ),
    ],
    ids=["on", "off", "has loaded"],
)
def test_a_program_goes_on_as_before(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, first: str, outcome: str
) -> None:
    """Its loads start no daemon in the directory of the run, which would stay behind."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("TRIMS_SOCKET_DIR", directory)
        program = pytester.makepyfile(program=PROGRAM.format(first=first))
        result = pytester.run(sys.executable, program, timeout=LIMIT_S)
        result.stdout.fnmatch_lines(["4 loads served *", f"in the program: {outcome}"])
        pytester.run(*TRIMS, "stop", timeout=LIMIT_S)


def test_a_program_goes_on_without_a_shared_daemon(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not the daemon's owner, but has patched the program's libraries."""
    pytester.makeini("[pytest]\ntrims_shared = true\n")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("TRIMS_SOCKET_DIR", directory)
        program = pytester.makepyfile(program=PROGRAM.format(first=""))
        result = pytester.run(sys.executable, program, timeout=LIMIT_S)
        pytester.run(*TRIMS, "stop", timeout=LIMIT_S)
    result.stdout.fnmatch_lines(["in the program: False 0"])


HANGING = """
import trims_shim.cli.daemon as cli
from trims_shim.errors import DaemonTimeout
names = [name for name in os.environ if "TRIMS" in name]
stop = cli.stop_daemon
def stop_too_late(*args, **settings):
    stop(*args, **settings)
    raise DaemonTimeout("it hangs")
cli.stop_daemon = stop_too_late
"""


def test_a_daemon_that_does_not_stop_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends as its tests did, and what comes after it is as before."""
    text = PROGRAM.format(first=HANGING)
    text += 'print(names == [name for name in os.environ if "TRIMS" in name])\n'
    program = pytester.makepyfile(program=text)
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("TRIMS_SOCKET_DIR", directory)
        result = pytester.run(sys.executable, program, timeout=LIMIT_S)
        pytester.run(*TRIMS, "stop", timeout=LIMIT_S)
    result.stdout.fnmatch_lines(["in the program: True 1", "True"])
    assert result.stderr.str().splitlines() == ["trims: it hangs"]


def test_a_package_that_was_imported_first_is_no_warning(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By `trims run`, or autostart; pytest looks at what the package's files are, as of a wheel."""
    installed = tmp_path / "site" / "trims_wheel-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: trims-wheel\nVersion: 1\n")
    (installed / "RECORD").write_text("trims_shim/__init__.py,,\n_trims_pytest.py,,\n")
    (installed / "entry_points.txt").write_text("[pytest11]\ntrims = _trims_pytest\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{installed.parent}")
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    suite = pytester.makepyfile(test_nothing="def test_nothing(): pass\n")
    result = pytester.run(*TRIMS, "run", sys.executable, "-m", "pytest", suite, timeout=LIMIT_S)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("words", [[], ["--trims", "-k", "served"]])
def test_a_pytest_from_before_the_stash(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Of pytest 6, which loads the plugin in every run. Other plugins need the stash."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    code = f"import pytest; del pytest.StashKey; pytest.main(['-p', '_trims_pytest', *{words!r}])"
    result = pytester.run(sys.executable, "-c", code, timeout=LIMIT_S)
    result.assert_outcomes(**({"passed": 4, "deselected": 2} if words else {"skipped": 6}))


@pytest.mark.parametrize(
    ("last_line", "words"), [("", ["--unknown"]), ("import nothing_of_this_name", [])]
)
def test_a_run_that_does_not_begin_leaves_no_daemon(
    pytester: pytest.Pytester, tmp_path: Path, last_line: str, words: list[str]
) -> None:
    """Its conftest has loaded a model; that the directory is gone, the fixture checks."""
    pid = tmp_path / "pid"
    pytester.makeconftest(
        f"from safetensors.numpy import load_file\nload_file({os.environ['MODEL']!r})\n"
        "from trims_shim.testing import TrimsDaemon\n"
        f"open({str(pid)!r}, 'w').write(str(TrimsDaemon().status().pid))\n{last_line}\n"
    )
    assert run(pytester, "--trims", *words).ret == pytest.ExitCode.USAGE_ERROR
    wait_until(lambda: process_state(int(pid.read_text())) in ("", "Z"))


def test_unusable_setting_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntrims_host_bytes = plenty\n")
    result = run(pytester, "--trims")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    source = "ini option trims_host_bytes"
    result.stderr.fnmatch_lines([f"*trims (--trims): {source}: 'plenty' is not a size*"])


def test_a_setting_of_the_environment_that_only_the_run_replaces(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back, and unusable, at the end of the run."""
    monkeypatch.setenv("TRIMS_HOST_BYTES", "plenty")
    result = run(pytester, "--trims", "-o", "trims_host_bytes=64M", "-k", "served")
    result.assert_outcomes(passed=4, deselected=2)
    assert (result.ret, result.stderr.str()) == (pytest.ExitCode.OK, "")


def test_a_usage_error_leaves_the_environment_of_a_program(pytester: pytest.Pytester) -> None:
    program = pytester.makepyfile(
        program="import os, pytest\nbefore = dict(os.environ)\n"
        "status = pytest.main(['--trims', '-o', 'trims_host_bytes=plenty'])\n"
        "print(status, os.environ == before)\n"
    )
    result = pytester.run(sys.executable, program, timeout=LIMIT_S)
    result.stdout.fnmatch_lines(["4 True"])


def test_elsewhere_than_on_linux_it_is_off_and_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        elsewhere="import sys, sysconfig\nsysconfig.get_config_vars()\nsys.platform = 'darwin'\n"
    )
    result = run(pytester, "-p", "elsewhere", "--trims")
    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines(["trims: off, the cache needs Linux (from --trims)"])
