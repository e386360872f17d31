"""Programs of their own: orders of imports, warnings as errors, ends of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from .payloads import saved, state
from .registry import Work, attempt, case


def _model(work: Work) -> Path:
    return work.file("model.pt", saved(state()))


SCRIPT = """
import sys
if sys.argv[1] == "first":
    import trims_shim
{imports}
if sys.argv[1] == "last":
    import trims_shim
{body}
"""


ORDERS = ("first", "last")


def _script(
    work: Work, name: str, imports: str, body: str, *, options: tuple[str, ...] = ()
) -> list[object]:
    """Run a program of its own, with the shim imported first and last where there is a shim."""
    text = SCRIPT.format(imports=imports, body=body)
    path = work.file(f"{name}.py", lambda path: path.write_text(text))
    seen: dict[str, list[object]] = {}
    for order in ORDERS:
        # Without the shim there is one program only, whose answer stands for all orders.
        spoken = order if os.environ["TRIMS_ENABLED"] == "1" else "never"
        if spoken not in seen:
            command = [sys.executable, *options, str(path), spoken]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            seen[spoken] = [done.returncode, done.stdout, done.stderr]
    return [list(seen.get(order, seen.get("never", []))) for order in ORDERS]


STRICT = """
module = torch.nn.Linear(80, 1024, bias=False)
def load():
    loaded = torch.load("model.pt")
    print(sorted(loaded), loaded["bulk"].sum().item(), loaded["bias"].tolist())
    print(module.load_state_dict({"weight": loaded["bulk"]}), module.weight.sum().item())
load()
gc.collect()
with open(b"model.pt", "rb") as file:
    loaded = torch.load(file)
atexit.register(lambda: print(loaded["bias"].tolist()))
class C: pass
c = C()
c.c, c.t = c, loaded
raise SystemExit(loaded["bias"].sum().item())
"""


@case(timeout_s=240.0)
def program_that_is_strict(work: Work) -> object:
    """Warnings are errors, ``-X dev`` reports descriptors that are never closed, and ``-bb`` makes
    an error of ``str()`` of bytes, which the name of an open file may be. At its end tensors are
    alive, in a cycle and for an exit handler, and its exit code is an error.
    """
    _model(work)
    # Other libraries warn while they are imported: errors only afterwards.
    imports = (
        "import atexit, gc, warnings\nwarnings.simplefilter('ignore')\n"
        "import torch\nwarnings.simplefilter('error')"
    )
    return _script(work, "strict", imports, STRICT, options=("-X", "dev", "-bb"))


@case()
def program_without_torch(work: Work) -> object:
    """Programs that never load a model are left alone, whatever they import."""
    body = "print(sorted(m for m in ('torch', 'safetensors', 'numpy') if m in sys.modules))"
    return _script(work, "light", "import json", body)


@case()
def refused_file_warns_once_in_each_place(work: Work) -> object:
    """The default filter shows a warning once for each line of the caller."""
    model = _model(work)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            attempt(torch.load(model)["bulk"].storage)
    return [[w.category.__name__, os.path.basename(w.filename), w.lineno] for w in caught]
