"""torch.load: global settings, modes and registries that change what it does."""

from __future__ import annotations

import collections
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.serialization import LoadEndianness

from .payloads import net, saved, state, with_bulk
from .registry import Work, attempt, case, cases


def _config() -> Any:
    from torch.utils.serialization import config  # torch 2.7 and newer

    return config


@cases({"private": mmap.MAP_PRIVATE, "shared": mmap.MAP_SHARED})
def default_mmap_options(work: Work, flags: int) -> object:
    path = work.fresh("model.pt", saved(state()))
    with torch.serialization.set_default_mmap_options(flags):
        loaded = torch.load(path, mmap=True)
        plain = torch.load(path)
    loaded["weight"].fill_(3)
    plain["weight"].fill_(4)
    # Under MAP_SHARED the write reaches the file: that is what the option promises.
    return [loaded, plain, torch.load(path), torch.load(path, mmap=True), _digest(path)]


def _digest(path: Path) -> bytes:
    return path.read_bytes()


@case()
def default_mmap_options_refused(work: Work) -> object:
    return attempt(torch.serialization.set_default_mmap_options, 3)


@case(served=True)
def configured_mmap(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    with _config().patch({"load.mmap": True}):
        return [torch.load(path), torch.load(path, mmap=False), torch.load(path, mmap=None)]


@cases(
    {"little": LoadEndianness.LITTLE, "big": LoadEndianness.BIG, "native": LoadEndianness.NATIVE}
)
def default_endianness(work: Work, order: LoadEndianness) -> object:
    """Matters for files that do not say what order they have: of torch before 2.1."""
    path = work.file("model.pt", saved(state()))
    # In place, so that the records stay aligned.
    silent = path.read_bytes().replace(b"byteorder", b"forgotten")
    old = work.file("old.pt", lambda path: path.write_bytes(silent))
    torch.serialization.set_default_load_endianness(order)
    try:
        return [[torch.load(each), torch.load(each, mmap=True)] for each in (path, old)]
    finally:
        torch.serialization.set_default_load_endianness(None)


@cases({"default": False, "calculated": True})
def storage_offsets(work: Work, calculate: bool) -> object:
    path = work.file("model.pt", saved(state()))
    with _config().patch({"load.calculate_storage_offsets": calculate}):
        return [torch.load(path), torch.load(path, mmap=True)]


@cases(
    {"crc": {"save.use_pinned_memory_for_d2h": False}, "aligned": {"save.storage_alignment": 4096}}
)
def saved_with_settings(work: Work, changes: dict[str, Any]) -> object:
    def write(path: Path) -> None:
        with _config().patch(changes):
            torch.save(state(), path)

    return torch.load(work.file("model.pt", write))


@case()
def saved_without_crc(work: Work) -> object:
    def write(path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        torch.save(state(), path)
        torch.serialization.set_crc32_options(True)

    return torch.load(work.file("model.pt", write))


def _shapes(loaded: Any) -> object:
    return [
        [name, list(t.shape), str(t.dtype), t.untyped_storage().nbytes()]
        for name, t in loaded.items()
    ]


@case()
def skip_data_on_load(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    with torch.serialization.skip_data():
        # The bytes are undefined by contract.
        return [_shapes(torch.load(path)), _shapes(torch.load(path, mmap=True))]


@case()
def skip_data_on_save(work: Work) -> object:
    def write(path: Path) -> None:
        with torch.serialization.skip_data():
            torch.save(state(), path)

    return torch.load(work.file("model.pt", write))


@cases({"plain": {}, "mmap": {"mmap": True}, "cpu": {"map_location": "cpu"}})
def fake_tensor_mode(work: Work, options: dict[str, Any]) -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    path = work.file("model.pt", saved(state()))
    with FakeTensorMode():
        loaded = attempt(torch.load, path, **options)
    if isinstance(loaded, Exception):
        return loaded
    return {
        name: [type(t), list(t.shape), str(t.device), str(t.dtype)] for name, t in loaded.items()
    }


@case(served=True)
def inference_mode(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    with torch.inference_mode():
        loaded = torch.load(path)
        mapped = torch.load(path, mmap=True)
    return [
        loaded,
        mapped,
        attempt(loaded["weight"].add_, 1),
        attempt(loaded["weight"].requires_grad_),
    ]


def _grad(function: Any, vector: torch.Tensor) -> object:
    return torch.func.grad(lambda row: function(row).sum())(vector)


def _vmap(function: Any, vector: torch.Tensor) -> object:
    return torch.func.vmap(function)(vector[None])


def _jvp(function: Any, vector: torch.Tensor) -> object:
    return torch.func.jvp(function, (vector,), (vector,))


def _functionalize(function: Any, vector: torch.Tensor) -> object:
    return torch.func.functionalize(function)(vector)


TRANSFORMS = {
    f"{transform.__name__.strip('_')}_{'mmap' if mmap else 'plain'}_{what}": (transform, mmap, what)
    for transform in (_grad, _vmap, _jvp, _functionalize)
    for mmap in (False, True)
    for what in ("state", "module")
}


@cases(TRANSFORMS, served=True)
def functorch_transform(work: Work, how: tuple[Any, bool, str]) -> object:
    """What is loaded inside a transform is wrapped by it, as what torch loads there."""
    transform, mapped, what = how
    module = net()
    value = module.state_dict() if what == "state" else module
    path = work.file(f"{what}.pt", saved(value))
    levels: list[object] = []

    def function(row: torch.Tensor) -> torch.Tensor:
        loaded = torch.load(path, mmap=mapped, weights_only=False)
        weight = loaded["large.weight"] if what == "state" else loaded.large.weight
        levels.append([type(weight), torch._C._functorch.maybe_get_level(weight)])
        return weight @ row

    return [transform(function, torch.ones(256)), levels]


@case(served=True)
def grad_modes(work: Work) -> object:
    path = work.file("model.pt", saved(with_bulk(torch.nn.Parameter(torch.ones(4)))))
    with torch.no_grad():
        first = torch.load(path)
    with torch.enable_grad():
        second = torch.load(path)
    return [first, second, second["value"].sum()]


@case(served=True)
def default_dtype(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    torch.set_default_dtype(torch.float64)
    return [torch.load(path), torch.ones(1)]


@case(served=True)
def function_mode_sees_the_same_calls(work: Work) -> object:
    from torch.overrides import TorchFunctionMode

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    path = work.file("model.pt", saved(state()))
    with Noting():
        loaded = torch.load(path)
    return [loaded, seen]


@case()
def dispatch_mode_sees_the_same_calls(work: Work) -> object:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    path = work.file("model.pt", saved(state()))
    with Noting():
        loaded = torch.load(path)
    return [loaded, seen]


class Allowed(collections.OrderedDict):  # type: ignore[type-arg]
    """A class that has to be allowed for weights_only."""


class AlsoAllowed:
    """Another one, with state."""

    def __init__(self) -> None:
        self.tensor = torch.arange(5)

    def __repr__(self) -> str:
        return f"AlsoAllowed({self.tensor.tolist()})"


@case(served=True)
def safe_globals(work: Work) -> object:
    path = work.file("model.pt", saved(with_bulk([Allowed(a=1), AlsoAllowed()])))
    refused = attempt(torch.load, path)
    with torch.serialization.safe_globals([Allowed, AlsoAllowed]):
        inside = attempt(torch.load, path)
    after = attempt(torch.load, path)
    torch.serialization.add_safe_globals([Allowed, (AlsoAllowed, f"{__name__}.AlsoAllowed")])
    listed = {repr(item).partition(" at ")[0] for item in torch.serialization.get_safe_globals()}
    added = attempt(torch.load, path)
    torch.serialization.clear_safe_globals()
    return [refused, inside, after, listed, added, attempt(torch.load, path)]


@case()
def unsafe_globals_listed(work: Work) -> object:
    path = work.file("model.pt", saved(with_bulk([Allowed(a=1), AlsoAllowed()])))
    find = torch.serialization.get_unsafe_globals_in_checkpoint
    with path.open("rb") as file:
        return [sorted(find(path)), sorted(find(file)), file.tell(), attempt(find, "no-such-file")]


@case()
def registered_package(work: Work) -> object:
    """A device of the user's own: tagged at save, restored at load, asked before and after cpu."""
    calls: list[object] = []

    def tag(storage: Any) -> str | None:
        return "mine:1" if storage.nbytes() == 40 else None

    def restore(storage: Any, location: str) -> Any:
        calls.append([location, storage.nbytes(), type(storage).__name__])
        return storage if location.startswith("mine") else None

    torch.serialization.register_package(5, tag, restore)
    path = work.fresh("model.pt", saved(state()))
    loaded = [
        torch.load(path),
        torch.load(path, mmap=True),
        torch.load(path, map_location="mine:2"),
    ]
    return [*loaded, attempt(torch.load, path, map_location="yours:2"), calls]


@case()
def registered_package_for_the_cpu(work: Work) -> object:
    """It is asked also for storages that nobody has tagged."""
    calls: list[str] = []

    def restore(storage: Any, location: str) -> Any:
        calls.append(location)
        return storage.clone()

    path = work.file("model.pt", saved(state()))
    torch.serialization.register_package(1, lambda _: None, restore)
    return [torch.load(path), torch.load(path, mmap=True), calls]


@case()
def replaced_reader_class(work: Work) -> object:
    """A program that patches the same seam keeps its patch."""
    original = torch.serialization._open_zipfile_reader
    calls: list[str] = []

    class Mine(original):  # type: ignore[misc, valid-type]
        def __init__(self, name_or_buffer: Any) -> None:
            calls.append(type(name_or_buffer).__name__)
            super().__init__(name_or_buffer)

    path = work.file("model.pt", saved(state()))
    torch.serialization._open_zipfile_reader = Mine
    loaded = torch.load(path)
    torch.serialization._open_zipfile_reader = original
    return [loaded, torch.load(path), calls]


@case()
def replaced_load_function(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    original = torch.load
    torch.load = lambda *arguments, **keywords: ["mine", original(*arguments, **keywords)]
    mine = torch.load(path)
    torch.load = original
    return [mine, torch.load(path)]


@cases({"meta": "meta", "cpu": "cpu"}, served=True)
def replaced_constructors(work: Work, device: str) -> object:
    """As accelerate and peft do while they make a model: tensors come into being elsewhere."""
    path = work.file("model.pt", saved(state()))

    def elsewhere(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments, **options: construct(*arguments, **(options | {"device": device}))

    names = ("tensor", "empty", "zeros", "ones", "full")
    with mock.patch.multiple(torch, **{name: elsewhere(getattr(torch, name)) for name in names}):
        during = [attempt(torch.load, path), attempt(torch.load, path, mmap=True)]
    return [during, torch.load(path)]


@case()
def config_is_not_changed(work: Work) -> object:
    torch.load(work.file("model.pt", saved(state())))
    return [
        repr(_config().load.mmap),
        repr(_config().load.endianness),
        torch.serialization.get_default_mmap_options(),
        str(torch.serialization.get_default_load_endianness()),
        len(torch.serialization._package_registry),
    ]


@cases({"mapped": {"mmap": True}, "read": {}}, served=True)
def compiled_program_loads(work: Work, options: dict[str, Any]) -> object:
    """torch.compile leaves torch's files alone, and warns of what it cannot compile elsewhere."""
    path = work.file("model.pt", saved(net().state_dict()))

    def step(inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.load(path, **options)["large.weight"]

    return torch.compile(step, backend="eager")(torch.ones(2, 256))
