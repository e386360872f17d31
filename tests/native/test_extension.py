"""The extension's border: what it exports, what it is linked to, and what Python knows of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import types
from pathlib import Path

import pytest

from trims_shim.memory import copying, copying_native
from trims_shim.memory.copying_native import Code

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture
def library() -> str:
    if not copying_native.is_available():
        pytest.skip("the extension was not built (no compiler)")
    return str(copying_native.extension.__file__)


def readelf(*arguments: str) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    done = subprocess.run(
        ["readelf", "--wide", *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_only_its_entry_is_exported(library: str) -> None:
    symbols = [line.split() for line in readelf("--dyn-syms", library).splitlines()]
    ours = {
        each[7]
        for each in symbols
        if len(each) == 8 and each[4] == "GLOBAL" and each[6] not in ("UND", "Ndx")
    }
    assert ours == {"PyInit__native"}


def test_it_is_not_linked_to_the_driver(library: str) -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", readelf("--dynamic", library))
    assert needed
    assert not [each for each in needed if "cuda" in each or "nvidia" in each]


def test_importing_it_loads_no_driver(library: str) -> None:
    code = (
        "from trims_shim.memory import copying_native; assert copying_native.is_available()\n"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"


def test_free_threaded_python_keeps_its_lock_off(library: str) -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this Python is not free-threaded")
    code = (
        "import sys, trims_shim\nfrom trims_shim.memory import copying_native\n"
        "assert copying_native.is_available()\nprint(sys._is_gil_enabled())"
    )
    environment = {name: text for name, text in os.environ.items() if name != "PYTHON_GIL"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "False\n", done.stderr


def test_the_codes_are_those_of_the_header() -> None:
    header = (NATIVE / "status.hpp").read_text()
    body = header.partition("enum class Code")[2].partition("};")[0]
    codes = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): int(value)
        for name, value in re.findall(r"k(\w+) = (\d+),", body)
    }
    assert codes == {each.name: each.value for each in Code}


@pytest.mark.parametrize("code", [each for each in Code if each is not Code.OK])
def test_every_code_has_an_error(library: str, code: Code) -> None:
    error = copying_native._error(code, 5, "cuCall", "model")
    assert "model" in str(error) or "cuCall" in str(error)


def test_an_extension_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_native, "extension", types.SimpleNamespace(INTERFACE=0))
    assert not copying_native.is_available()
    assert copying.engine() == "python"


IN_A_FORK = """
    import os, sys
    from trims_shim import _native

    source = os.memfd_create("source")
    os.ftruncate(source, 1 << 16)
    transfer = _native.upload(source, -1, -1, [], 1 << 16, 0, 1 << 12, 4)
    status = transfer.start(4)
    assert status[0] == 0, status
    with transfer.next() as part:
        assert part == bytes(len(part))
    child = os.fork()
    if child == 0:
        transfer.close()  # the threads are the parent's: joining them would never end
        assert transfer.next() is None
        os._exit(0)
    _, answer = os.waitpid(child, 0)
    while (part := transfer.next()) is not None:
        part.release()
    print(answer, transfer.finish())
    transfer.close()
"""


def test_a_forked_child_only_forgets(library: str, emulated_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(IN_A_FORK)],
        env=os.environ | emulated_environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "0 (0, 0, '')\n", done.stderr


WITHOUT_A_DRIVER = """
    import os
    from trims_shim.errors import DriverFailure
    from trims_shim.formats.device_layout import DeviceLayout
    from trims_shim.memory import copying, copying_native

    for engine in ("native", "python"):
        assert copying.engine() == engine
        source = os.memfd_create("source")
        os.ftruncate(source, 100)
        try:
            copying.upload(source, DeviceLayout((), 0, 100), 0, None, device_index=0,
                           is_hashed=True, on_progress=print)
        except DriverFailure as error:
            print(engine, "driver" in str(error))
        copying_native.extension = None
"""


def test_a_machine_without_a_driver(library: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_A_DRIVER)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "native True\npython True\n", done.stderr
