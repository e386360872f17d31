"""Cases that need an interpreter of their own: import orders, warnings as errors, process ends.

This module imports neither torch nor safetensors: the order of the imports is what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .registry import Work, attempt, case, cases


def _make(work: Work) -> tuple[Path, Path]:
    import torch
    from safetensors.torch import save_file

    from .payloads import saved, state

    tensors = work.file("model.safetensors", lambda path: save_file(state(), path))
    assert torch
    return work.file("model.pt", saved(state())), tensors


@case(fresh=True, early=False, served=True)
def names_imported_before_the_shim(work: Work) -> object:
    """``from torch import load`` and the like keep working when the shim comes later."""
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import load
    from torch.nn import Linear
    from torch.serialization import load as other

    model, tensors = _make(work)
    before = load(model)
    work.enable_shim()
    module = Linear(1024, 1024, bias=False)
    module.load_state_dict({"weight": load(model)["bulk"]})
    with safe_open(tensors, "pt") as file:
        opened = file.get_tensor("bulk")
    return [before, load(model), other(model), load_file(tensors), opened, module]


@case(fresh=True, served=True)
def names_imported_after_the_shim(work: Work) -> object:
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import load

    model, tensors = _make(work)
    with safe_open(tensors, "pt") as file:
        return [load(model), load_file(tensors), file.get_tensor("bulk")]


def _noting(holder: Any, name: str, calls: list[str]) -> None:
    """Replace a function by one that notes its calls."""
    original: Callable[..., Any] = getattr(holder, name)

    def replacement(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    setattr(holder, name, replacement)


def _note_modules(calls: list[str]) -> None:
    import torch

    _noting(torch.nn.Module, "_load_from_state_dict", calls)


def _note_norms(calls: list[str]) -> None:
    from torch.nn.modules import batchnorm

    _noting(batchnorm._NormBase, "_load_from_state_dict", calls)


def _note_loads(calls: list[str]) -> None:
    import torch

    original = torch.serialization._load

    def replacement(*arguments: Any, **keywords: Any) -> Any:
        calls.append("_load")
        return original(*arguments, **keywords)

    torch.serialization._load = replacement  # type: ignore[assignment]


def _subclass_reader(calls: list[str]) -> None:
    import torch

    original: Any = torch.serialization._open_zipfile_reader

    class Noting(original):  # type: ignore[misc]
        def __init__(self, file: Any) -> None:
            calls.append("reader")
            super().__init__(file)

    torch.serialization._open_zipfile_reader = Noting  # type: ignore[misc]


def _note_mappings(calls: list[str]) -> None:
    import torch

    _noting(torch.UntypedStorage, "from_file", calls)


def _note_tensors(calls: list[str]) -> None:
    import torch

    _noting(torch._utils, "_rebuild_tensor_v2", calls)


def _note_parameters(calls: list[str]) -> None:
    import torch

    _noting(torch._utils, "_rebuild_parameter", calls)


def _note_locations(calls: list[str]) -> None:
    import torch

    _noting(torch.serialization, "default_restore_location", calls)


def _subclass_unpickler(calls: list[str]) -> None:
    import pickle

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            calls.append(name)
            return super().find_class(module, name)

    pickle.Unpickler = Noting  # type: ignore[misc]


def _register_package(calls: list[str]) -> None:
    import torch

    def restore(storage: Any, location: str) -> Any:
        calls.append(location)
        return storage.clone()

    torch.serialization.register_package(1, lambda _: None, restore)


REPLACEMENTS = {
    function.__name__.strip("_"): function
    for function in (
        *(_note_modules, _note_norms, _note_loads, _note_tensors, _note_parameters),
        *(_note_locations, _subclass_unpickler, _register_package),
        *(_subclass_reader, _note_mappings),
    )
}


@cases(REPLACEMENTS, fresh=True, early=False)
def replaced_before_the_shim(work: Work, replace: Callable[[list[str]], None]) -> object:
    """What a program put in the place of torch's own runs, also where the shim comes later."""
    import torch

    from .payloads import net, saved

    state = net().state_dict() | {"parameter": torch.nn.Parameter(torch.ones(3))}
    path = work.file("model.pt", saved(state))
    calls: list[str] = []
    replace(calls)
    work.enable_shim()
    safe = attempt(torch.load, path)
    loaded = torch.load(path, weights_only=False)
    mapped = attempt(torch.load, path, mmap=True)
    module = net(2)
    result = module.load_state_dict({name: loaded[name] for name in module.state_dict()})
    return [calls, safe, loaded, mapped, result, module]


@case(fresh=True, served=True)
def safetensors_before_torch(work: Work) -> object:
    import safetensors

    loaded_early = "torch" in sys.modules
    model, tensors = _make(work)
    import torch

    with safetensors.safe_open(tensors, "pt") as file:
        # The runner itself imports torch before a case: what counts is that both sides agree.
        return [loaded_early, file.get_tensor("bulk"), torch.load(model)]


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


@case(fresh=True)
def program_with_warnings_as_errors(work: Work) -> object:
    _make(work)
    body = (
        "loaded = torch.load('model.pt')\n"
        "print(sorted(loaded), loaded['bulk'].sum().item(), loaded['bias'].tolist())\n"
        "module = torch.nn.Linear(1024, 1024, bias=False)\n"
        "print(module.load_state_dict({'weight': loaded['bulk']}), module.weight.sum().item())\n"
    )
    # Other libraries warn while they are imported: errors only afterwards.
    imports = "import warnings, torch\nwarnings.simplefilter('error')"
    return _script(work, "strict", imports, body)


@case(fresh=True)
def program_in_development_mode(work: Work) -> object:
    """``-X dev`` reports descriptors that are never closed, and more."""
    _make(work)
    body = (
        "warnings.simplefilter('always')\n"
        "loaded = torch.load('model.pt')\n"
        "del loaded\n"
        "gc.collect()\n"
        "print('done')\n"
    )
    imports = "import gc, warnings\nwarnings.simplefilter('ignore')\nimport torch"
    return _script(work, "development", imports, body, options=("-X", "dev"), orders=("first",))


@case(fresh=True)
def program_that_takes_no_bytes_for_text(work: Work) -> object:
    """``-bb`` makes an error of ``str()`` of bytes, which the name of an open file may be."""
    _make(work)
    body = "print(torch.load(open(b'model.pt', 'rb'))['bias'].tolist())\n"
    return _script(work, "bytes", "import torch", body, options=("-bb",), orders=("first",))


@case(fresh=True)
def program_ends_in_every_way(work: Work) -> object:
    """Exit handlers, tensors alive at the end, an error, exit codes."""
    _make(work)
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


@case(fresh=True)
def program_without_torch(work: Work) -> object:
    """Programs that never load a model are left alone, whatever they import."""
    body = "print(sorted(m for m in ('torch', 'safetensors', 'numpy') if m in sys.modules))"
    return _script(work, "light", "import json", body)


@case(fresh=True)
def refused_file_warns_once_in_each_place(work: Work) -> object:
    """The default filter shows a warning once for each line of the caller."""
    import torch

    model, _ = _make(work)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            attempt(torch.load(model)["bulk"].storage)
    return [[w.category.__name__, os.path.basename(w.filename), w.lineno] for w in caught]
