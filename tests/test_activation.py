"""What ``import trims_shim`` does to a process, in every order and with every switch.

Each case is a program of its own in a fresh interpreter: what is imported, and when, is the point.
Only five of them import torch; the others use safetensors.numpy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from trims_shim import config
from trims_shim.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Sockets and a model; the daemon is stopped at the end."""
    base = Path(tempfile.mkdtemp(prefix="trims-act-"))  # short: socket paths are limited
    save_file({"w": numpy.arange(1 << 20, dtype=numpy.float32)}, base / "m.safetensors")
    try:
        yield base
    finally:
        if (base / "s").exists():
            stop = [sys.executable, "-m", "trims_shim", "stop"]
            sockets = {"TRIMS_SOCKET_DIR": str(base / "s"), "PYTHONPATH": str(ROOT)}
            subprocess.run(stop, env=os.environ | sockets, timeout=LIMIT_S, check=False)
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def run(directory: Path) -> Run:
    """Run a program; ``model`` is a path in it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRIMS_", "_TRIMS_"))}
    variables = {
        "TRIMS_SOCKET_DIR": str(directory / "s"),
        "TRIMS_HOST_BYTES": "64M",
        "XDG_CONFIG_HOME": str(directory),
        "PYTHONPATH": str(ROOT),
    }

    def run(program: str, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, str(directory / "m.safetensors")],
            env=inherited | variables | more,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_import_is_light(run: Run) -> None:
    """The time it takes is measured by the benchmarks; what costs time is checked here."""
    done = run(
        "import sys, threading; before = set(sys.modules); import trims_shim\n"
        "heavy = {'torch', 'zmq', 'numpy', 'msgpack', 'asyncio', 'rich', 'safetensors', 'blake3',\n"
        "         'tomllib', 'subprocess', 'importlib.metadata'}\n"
        "assert not heavy & set(sys.modules) - before, heavy & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "assert trims_shim.__all__ == sorted(trims_shim.__all__) == dir(trims_shim)\n"
        "assert all(hasattr(trims_shim, name) for name in trims_shim.__all__)\n"
    )
    assert (done.stdout, done.stderr) == ("", "")


DEVICES_NEED = """
for name in ("client.device_arenas", "memory.device", "memory.driver"):
    is_imported = f"trims_shim.{name}" in sys.modules
    assert is_imported == bool(torch.version.cuda), name
assert "trims_shim.patches.torch_elision" in sys.modules
"""


def test_what_devices_need_is_imported_with_a_torch_for_them(run: Run) -> None:
    imports = "import sys, torch, safetensors.torch; torch.version.cuda = '13.0'; import trims_shim"
    run(f"{imports}\n{DEVICES_NEED}")


def test_import_starts_no_daemon(run: Run, tmp_path: Path) -> None:
    run("import trims_shim; trims_shim.stats()", TRIMS_SOCKET_DIR=str(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_disabled_by_the_environment_patches_nothing(run: Run) -> None:
    run(
        "import sys, safetensors.numpy as library; original = library.load_file\n"
        "finders = list(sys.meta_path); import trims_shim\n"
        "assert sys.meta_path == finders\n"
        "assert library.load_file is original and not hasattr(original, '__wrapped__')\n"
        "assert 'trims_shim.patches' not in sys.modules\n"
        "assert not trims_shim.enabled()\n"
        "library.load_file(sys.argv[1])\n"
        "assert trims_shim.stats().events == {}\n",
        TRIMS_ENABLED="0",
    )


def test_log_file_that_cannot_be_written_fails_no_load(run: Run, tmp_path: Path) -> None:
    load = (
        "import trims_shim, sys; from safetensors.numpy import load_file\n"
        "assert load_file(sys.argv[1])['w'][7] == 7\n"
        "assert trims_shim.stats().fallbacks == {'small_file': 1}\n"
    )
    settings = {"TRIMS_LOG": "debug", "TRIMS_MIN_BYTES": "1G"}
    file = tmp_path / "log"
    assert run(load, **settings, TRIMS_LOG_FILE=str(file)).stderr == ""
    assert "(small_file)" in file.read_text()
    done = run(load, **settings, TRIMS_LOG_FILE=str(tmp_path / "nosuch" / "log"))
    (line,) = done.stderr.splitlines()
    assert "(small_file): " in line
    assert "(TRIMS_LOG_FILE: [Errno 2] No such file" in line
    gone = (
        f"import os; os.chdir({str(tmp_path)!r})\nos.mkdir('x'); os.chdir('x'); os.rmdir('../x')\n"
    )
    assert "(small_file)" in run(gone + load, **settings, TRIMS_LOG_FILE="log").stderr


def test_log_file_may_be_below_the_home(run: Run, tmp_path: Path) -> None:
    # ~ is the shell's business, but for trims.toml, and for what containers and services set.
    settings = {"TRIMS_LOG": "debug", "TRIMS_MIN_BYTES": "1G", "TRIMS_LOG_FILE": "~/log"}
    load = "import trims_shim, sys; from safetensors.numpy import load_file; load_file(sys.argv[1])"
    assert run(load, **settings, HOME=str(tmp_path)).stderr == ""
    assert "(small_file)" in (tmp_path / "log").read_text()


def test_a_reload_writes_no_line_twice(run: Run, tmp_path: Path) -> None:
    load = (
        "import importlib, sys, trims_shim; from safetensors.numpy import load_file\n"
        "importlib.reload(trims_shim); load_file(sys.argv[1])\n"
    )
    settings = {"TRIMS_LOG": "debug", "TRIMS_MIN_BYTES": "1G"}
    file = tmp_path / "log"
    assert run(load, **settings).stderr.count("(small_file)") == 1
    assert run(load, **settings, TRIMS_LOG_FILE=str(file)).stderr == ""
    assert file.read_text().count("(small_file)") == 1


@pytest.mark.parametrize(
    "set_up",
    [
        "logging.basicConfig()",
        "logging.basicConfig(stream=sys.stdout)",
        "logging.basicConfig(handlers=[logging.NullHandler()])",
        "logging.basicConfig(); logging.getLogger('trims_shim').propagate = False",
        "logging.basicConfig(); logging.root.handlers[0].setLevel('ERROR')",
    ],
)
def test_a_program_that_sets_up_logging_sees_each_line_once(run: Run, set_up: str) -> None:
    load = (
        f"import logging, sys, trims_shim; {set_up}\n"
        "from safetensors.numpy import load_file; load_file(sys.argv[1])\n"
    )
    done = run(load, TRIMS_LOG="debug", TRIMS_MIN_BYTES="1G")
    assert (done.stdout + done.stderr).count("(small_file)") == 1


def test_the_log_has_every_name(run: Run, tmp_path: Path) -> None:
    done = run(
        "import os, shutil, sys, trims_shim; from safetensors.numpy import load_file\n"
        "name = shutil.copyfile(sys.argv[1], os.fsencode(sys.argv[1]) + b'\\xff')\n"
        "load_file(os.fsdecode(name))\n",
        TRIMS_LOG="debug",
        TRIMS_LOG_FILE=str(tmp_path / "log"),
        TRIMS_MIN_BYTES="1G",
    )
    assert done.stderr == ""
    assert r"\udcff: the framework's own loader is used (small_file)" in (
        (tmp_path / "log").read_text()
    )


def test_sockets_that_cannot_be_had_are_reported_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    done = run(
        "import trims_shim, sys; from safetensors.numpy import load_file\n"
        "load_file(sys.argv[1]); load_file(sys.argv[1])\n"
        "assert trims_shim.stats().fallbacks == {'socket_dir': 2}\n",
        TRIMS_SOCKET_DIR=str(tmp_path / "s"),
    )
    assert done.stderr.count("is not a directory") == 1


def test_load_state_dict_can_be_left_alone(run: Run) -> None:
    program = "import trims_shim; from trims_shim import patches\nprint(*patches.requested())"
    assert "torch_module" in run(program).stdout.split()
    requested = run(program, TRIMS_ELIDE_COPIES="0").stdout.split()
    assert "torch_load" in requested
    assert "torch_module" not in requested


def test_patches_can_be_chosen(run: Run) -> None:
    program = (
        "import safetensors.numpy as library, trims_shim\n"
        "states = {each['target']: each['state'] for each in trims_shim.info()['patches']}\n"
        "print(hasattr(library.load_file, '__wrapped__'), states['safetensors.numpy:load_file'],\n"
        "      states['torch.serialization:_load'])\n"
    )
    assert run(program, TRIMS_PATCHES="safetensors").stdout == "True applied off\n"
    assert run(program, TRIMS_PATCHES="torch").stdout == "False off waiting\n"
    assert run(program, TRIMS_PATCHES="safetensors, torch").stdout == "True applied waiting\n"


def test_safetensors_patch_serves_mappings_of_torch_load(run: Run) -> None:
    """Both map files with the same method of torch."""
    run(
        "import sys, torch, trims_shim\n"
        "path = sys.argv[1] + '.mapped.pt'\n"
        "torch.save({'w': torch.arange(1 << 20)}, path)\n"
        "for is_mapped in (False, True):\n"
        "    assert torch.load(path, mmap=is_mapped)['w'][7] == 7\n"
        "    assert trims_shim.stats().served == is_mapped\n",
        TRIMS_PATCHES="safetensors",
    )


@pytest.mark.parametrize("is_before", [True, False], ids=["shim first", "library first"])
def test_order_of_imports_and_names_held(run: Run, is_before: bool) -> None:
    """Also what was imported by name before the shim came is shared; so are threads' contexts."""
    library = "from safetensors.numpy import load_file\n"
    shim = "import trims_shim\n"
    run(
        "import sys\n" + (shim + library if is_before else library + shim) + "def served():\n"
        "    before = trims_shim.stats().served\n"
        "    assert load_file(sys.argv[1])['w'][7] == 7\n"
        "    return trims_shim.stats().served - before\n"
        "assert trims_shim.enabled() and served() == 1\n"
        "with trims_shim.disabled():\n"
        "    assert not trims_shim.enabled() and served() == 0\n"
        "    with trims_shim.disabled(): pass\n"
        "    assert served() == 0\n"
        "assert served() == 1\n"
        "trims_shim.disable(); trims_shim.disable()\n"
        "assert not trims_shim.enabled() and served() == 0\n"
        "assert load_file.__module__ == 'safetensors.numpy'\n"
        "assert not hasattr(load_file, '__wrapped__')\n"
        "trims_shim.enable(); trims_shim.enable()\n"
        "assert trims_shim.enabled() and served() == 1\n"
    )


TORCH_SERVES = """
path = sys.argv[1] + ".pt"
with trims_shim.disabled():
    torch.save({"w": torch.arange(1 << 20)}, path)
def served():
    before = trims_shim.stats().served
    assert load(path)["w"][7] == 7
    return trims_shim.stats().served - before
assert trims_shim.enabled() and served() == 1
with trims_shim.disabled():
    assert served() == 0
trims_shim.disable()
assert served() == 0
assert not hasattr(torch.nn.Module.load_state_dict, "__wrapped__")
trims_shim.enable()
assert served() == 1
points = trims_shim.info()["patches"]
points = [point for point in points if "built without CUDA" not in point["reason"]]
points = [point for point in points if point["reason"] != "torch_module does it"]
points = [point for point in points if point["library"] == "torch"]
# imported by the programs that use them
late = ("torch.export.", "torch.distributed.checkpoint.", "torch.distributed.tensor.")
states = {(point["target"].startswith(late), point["state"]) for point in points}
assert states == {(False, "applied"), (True, "waiting")}, points
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import trims_shim, torch; from torch import load",
        "from torch import load; import safetensors.torch, trims_shim, torch",
    ],
    ids=["shim first", "torch first"],
)
def test_torch_in_both_orders(run: Run, imports: str) -> None:
    run(f"import sys; {imports}\n{DEVICES_NEED}{TORCH_SERVES}")


RELOADED = """
import importlib, sys, trims_shim, torch
def replaced():
    points = trims_shim.info()["patches"]
    return {p["target"] for p in points if p["state"] == "applied" and p["reason"]}
assert replaced() == set()
importlib.reload(torch.serialization)
assert "torch.serialization:_load" in replaced(), replaced()
assert all(each.startswith("torch.serialization:") for each in replaced()), replaced()
trims_shim.disable()
trims_shim.enable()
assert replaced() == set()
"""


def test_what_a_reload_replaced_is_told(run: Run) -> None:
    """Found: it counted as applied, though loads were the framework's own."""
    run(RELOADED)


IMPORTED_ANEW = """
import sys, trims_shim, safetensors.numpy
def reasons():
    points = trims_shim.info()["patches"]
    return {p["reason"] for p in points if p["target"] == "safetensors.numpy:load_file"}
assert reasons() == {""}
del sys.modules["safetensors.numpy"]
import safetensors.numpy
assert "replaced since" in " ".join(reasons()), reasons()
trims_shim.disable()
trims_shim.enable()
assert reasons() == {""}
"""


def test_a_module_that_was_imported_anew_is_told(run: Run) -> None:
    """As by test runners that clear sys.modules."""
    run(IMPORTED_ANEW)


INTERRUPTED = """
import os, sys, torch, warnings
def interrupt(frame, event, argument):
    code, target = frame.f_code, str(frame.f_locals.get("target", ""))
    if (code.co_filename + target).endswith(at):
        sys.settrace(None)
        raise KeyboardInterrupt
warnings.simplefilter("ignore")  # a fork beside threads, from Python 3.12 on
for at in ("torch_unshare.py", ":_legacy_load"):
    child = os.fork()
    if child == 0: break
    assert os.waitpid(child, 0)[1] == 0, at
else:
    sys.exit()
sys.settrace(interrupt)
try:
    import trims_shim
    sys.exit("not interrupted")
except KeyboardInterrupt:
    import trims_shim
from trims_shim import patches
for name, _, modules, _ in patches.PATCH_FILES:
    if modules == ("torch",):
        points = sys.modules["trims_shim.patches." + name].POINTS
        assert [each.point for each in patches.applied()[name]] == list(points), name
"""


def test_an_interrupted_import_that_is_tried_again(run: Run) -> None:
    """Found: what was being patched stayed as it was, half patched or not at all."""
    run(INTERRUPTED)


@pytest.mark.parametrize("broken", ["config", "late_imports", "patches", "patches.importing"])
def test_what_breaks_the_import_of_our_code_breaks_no_program(run: Run, broken: str) -> None:
    """Found with beartype.claw.beartype_all(): it looks up what is imported for type checkers."""
    done = run(
        f"import sys; sys.modules['trims_shim.{broken}'] = None; import trims_shim\n"
        "import safetensors.numpy as library; library.load_file(sys.argv[1])"
    )
    assert done.stderr.count("trims_shim stays inactive: ModuleNotFoundError") == 1
    assert done.stderr.count("\n") == 1


def test_a_package_that_is_removed_under_a_program_breaks_no_import(run: Run) -> None:
    """Found: `import torch` failed after an upgrade or removal, and could not be tried again."""
    done = run(
        "import sys, trims_shim\n"
        "for name in ('diagnostics', 'patches.points'):\n"
        "    assert sys.modules.setdefault('trims_shim.' + name) is None\n"
        "import safetensors.numpy as library; library.load_file(sys.argv[1])"
    )
    assert done.stderr.count("trims_shim stays inactive: it was removed or replaced") == 1
    assert done.stderr.count("\n") == 1


def test_what_a_signal_handler_raises_ends_the_import(run: Run) -> None:
    """A time limit holds for the import of the shim as well."""
    done = run(
        "import signal, sys\n"
        "def expire(number, frame): raise TimeoutError('time is up')\n"
        "def find(name, *_): name == 'trims_shim.patches' and signal.raise_signal(signal.SIGALRM)\n"
        "signal.signal(signal.SIGALRM, expire)\n"
        "sys.meta_path.insert(0, type('Finder', (), {'find_spec': staticmethod(find)}))\n"
        "import trims_shim",
        status=1,
    )
    assert done.stderr.endswith("TimeoutError: time is up\n")


def test_unusable_setting_leaves_everything_alone_and_warns_once(run: Run) -> None:
    done = run(
        "import sys, safetensors.numpy as library; original = library.load_file\n"
        "finders = list(sys.meta_path)\n"
        "import trims_shim, importlib\n"
        "assert not hasattr(original, '__wrapped__') and sys.meta_path == finders\n"
        "assert not trims_shim.enabled()\n"
        "library.load_file(sys.argv[1]); library.load_file(sys.argv[1])\n"
        "assert 'TRIMS_MIN_BYTES' in trims_shim.info()['problems'][0]\n"
        "try: trims_shim.warm(sys.argv[1])\n"
        "except trims_shim.ConfigError: pass\n",
        TRIMS_MIN_BYTES="many",
    )
    assert done.stderr.count("trims_shim stays inactive: TRIMS_MIN_BYTES") == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_setting_that_is_made_unusable_later_fails_no_load(run: Run) -> None:
    # The daemon is to run already: with that setting it would not start.
    run("import sys, trims_shim, safetensors.numpy as library; library.load_file(sys.argv[1])")
    done = run(
        "import os, sys, trims_shim, safetensors.numpy as library\n"
        "os.environ['TRIMS_MIN_BYTES'] = 'many'\n"
        "library.load_file(sys.argv[1])\n"
    )
    assert not done.stderr


def test_unknown_variable_is_named_with_the_nearest_known_one() -> None:
    for variable, near in (
        ("TRIMS_ENABLE", "TRIMS_ENABLED"),
        ("TRIMS_HOSTBYTES", "TRIMS_HOST_BYTES"),
        ("TRIMS_SOCKETDIR", "TRIMS_SOCKET_DIR"),
    ):
        with pytest.raises(ConfigError, match=f"{variable} .*did you mean {near}\\?"):
            config.load({variable: "1"})
    with pytest.raises(ConfigError, match="`trims info` lists all settings"):
        config.load({"TRIMS_XYZZY": "1"})


def test_usable_settings_are_told_from_the_others(tmp_path: Path) -> None:
    environment = {"TRIMS_STRICT": "1", "TRIMS_LOG": "loud", "TRIMS_NO": "1", "PATH": "/bin"}
    environment["XDG_CONFIG_HOME"] = str(tmp_path)
    settings, problems = config.load_usable(environment)
    assert settings.strict
    assert settings.source("log") == "default"
    assert len(problems) == 2
    (tmp_path / "trims").mkdir()
    (tmp_path / "trims" / "trims.toml").write_text("hosts = 1\nlog = 'info'\n")
    settings, problems = config.load_usable(environment)
    assert settings.strict
    assert "hosts" in problems[0]
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("platform", "missing"),
    [
        ("darwin", ["memfd_create", "sched_getaffinity", "eventfd"]),
        ("win32", ["memfd_create", "sched_getaffinity", "register_at_fork", "fork", "sysconf"]),
    ],
)
def test_other_systems_stay_without_the_cache(run: Run, platform: str, missing: list[str]) -> None:
    """One reason for everything, and batching works."""
    done = run(
        "import os, sys, numpy, safetensors.numpy\n"
        f"sys.platform, missing = {platform!r}, {missing!r}\n"
        "for name in missing: hasattr(os, name) and delattr(os, name)\n"
        f"if {platform!r} == 'win32': sys.modules.update(fcntl=None, resource=None, ctypes=None)\n"
        "import trims_shim\n"
        "assert not trims_shim.enabled()\n"
        "with trims_shim.disabled(): safetensors.numpy.load_file(sys.argv[1])\n"
        "assert trims_shim.stats().events == {}\n"
        "for call in (trims_shim.enable, trims_shim.info, lambda: trims_shim.open(sys.argv[1])):\n"
        "    try: call()\n"
        "    except trims_shim.TrimsError as error: print(error)\n"
        "from trims_shim.batching import batched\n"
        "assert batched(slo_ms=1000)(lambda rows: rows + 1)(numpy.zeros(2)).sum() == 2\n"
        "from trims_shim.cli.main import main\n"
        "assert main(['status']) == 3\n"
    )
    reason = f"the cache needs Linux, and this is {platform!r}"
    assert done.stdout.splitlines() == [reason] * 3
    assert done.stderr.splitlines() == [
        f"trims_shim stays inactive: {reason}",
        f"trims: {reason}",
    ]
