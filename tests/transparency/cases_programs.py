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
    work: Work,
    name: str,
    imports: str,
    body: str,
    *,
    options: tuple[str, ...] = (),
    orders: tuple[str, ...] = ORDERS,
) -> list[object]:
    """Run a program of its own, with the shim imported first and last where there is a shim."""
    text = SCRIPT.format(imports=imports, body=body)
    path = work.file(f"{name}.py", lambda path: path.write_text(text))
    seen: dict[str, list[object]] = {}
    for order in orders:
        # Without the shim there is one program only, whose answer stands for all orders.
        spoken = order if os.environ["TRIMS_ENABLED"] == "1" else "never"
        if spoken not in seen:
            command = [sys.executable, *options, str(path), spoken]
            done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
            seen[spoken] = [done.returncode, done.stdout, done.stderr]
    return [list(seen.get(order, seen.get("never", []))) for order in orders]


@case()
def program_with_warnings_as_errors(work: Work) -> object:
    _model(work)
    body = (
        "loaded = torch.load('model.pt')\n"
        "print(sorted(loaded), loaded['bulk'].sum().item(), loaded['bias'].tolist())\n"
        "module = torch.nn.Linear(320, 1024, bias=False)\n"
        "print(module.load_state_dict({'weight': loaded['bulk']}), module.weight.sum().item())\n"
    )
    # Other libraries warn while they are imported: errors only afterwards.
    imports = "import warnings, torch\nwarnings.simplefilter('error')"
    return _script(work, "strict", imports, body)


@case()
def program_in_development_mode(work: Work) -> object:
    """``-X dev`` reports descriptors that are never closed, and more."""
    _model(work)
    body = (
        "warnings.simplefilter('always')\n"
        "loaded = torch.load('model.pt')\n"
        "del loaded\n"
        "gc.collect()\n"
        "print('done')\n"
    )
    imports = "import gc, warnings\nwarnings.simplefilter('ignore')\nimport torch"
    return _script(work, "development", imports, body, options=("-X", "dev"), orders=("first",))


@case()
def program_that_takes_no_bytes_for_text(work: Work) -> object:
    """``-bb`` makes an error of ``str()`` of bytes, which the name of an open file may be."""
    _model(work)
    body = "print(torch.load(open(b'model.pt', 'rb'))['bias'].tolist())\n"
    return _script(work, "bytes", "import torch", body, options=("-bb",), orders=("first",))


@case()
def program_ends_in_every_way(work: Work) -> object:
    """Exit handlers, tensors alive at the end, an error, exit codes."""
    _model(work)
    start = "loaded = torch.load('model.pt')\n"
    ends = {
        "normal": (
            "import atexit\natexit.register(lambda: print(loaded['bias'].tolist()))\n"
            "class C: pass\nc = C()\nc.c, c.t = c, loaded\n"
            "raise SystemExit(loaded['bias'].sum().item())\n"
        ),
        "hard": "print('hard', flush=True)\nimport os\nos._exit(7)\n",
    }
    return {
        name: _script(work, name, "import torch", start + end, orders=("first",))
        for name, end in ends.items()
    }


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
