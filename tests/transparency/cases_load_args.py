"""torch.load: its arguments other than the device."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch

from .payloads import net, saved, state, with_bulk
from .registry import Work, attempt, case, cases


@case(served=True)
def plain(work: Work) -> object:
    return torch.load(work.file("model.pt", saved(state())))


@cases({"true": True, "false": False, "none": None}, served=True)
def weights_only(work: Work, value: Any) -> object:
    return torch.load(work.file("model.pt", saved(state())), weights_only=value)


@cases({"true": True, "false": False}, served=True)
def names_of_attributes(work: Work, value: bool) -> object:
    """A pickler writes a name once: the size of what is saved tells whether it is one object."""
    path = work.file("module.pt", saved(net().state_dict()))
    loaded = [torch.load(path, weights_only=value) for _ in range(2)]
    names = [name for each in loaded for name in vars(each)]
    return [len(pickle.dumps(names)), [name is sys.intern(name) for name in names]]


@cases({"true": True, "false": False, "none": None}, served=None)
def memory_mapped(work: Work, value: Any) -> object:
    return torch.load(work.file("model.pt", saved(state())), mmap=value)


@case(served=True)
def memory_mapped_is_served(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return [torch.load(path, mmap=True), torch.load(str(path), mmap=True, map_location="cpu")]


@case()
def memory_mapped_file_object(work: Work) -> object:
    with work.file("model.pt", saved(state())).open("rb") as file:
        return [attempt(torch.load, file, mmap=True), file.tell()]


@case(served=True)
def pickle_module_of_the_standard_library(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return torch.load(path, pickle_module=pickle, weights_only=False)


class RenamingPickle:
    """A pickle module with an own Unpickler that sees every global."""

    seen: list[str]

    class Unpickler(pickle.Unpickler):
        """Notes the globals it is asked for."""

        def find_class(self, module: str, name: str) -> Any:
            RenamingPickle.seen.append(f"{module}.{name}")
            return super().find_class(module, name)

    load = staticmethod(pickle.load)
    loads = staticmethod(pickle.loads)
    __name__ = "renaming"


@case()
def pickle_module_of_the_user(work: Work) -> object:
    RenamingPickle.seen = []
    path = work.file("model.pt", saved(state()))
    loaded = torch.load(path, pickle_module=RenamingPickle, weights_only=False)
    return [loaded, RenamingPickle.seen]


@case()
def pickle_module_with_weights_only(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load, path, pickle_module=pickle, weights_only=True),
        attempt(torch.load, path, pickle_module=pickle),
    ]


@cases({"latin1": "latin1", "ascii": "ascii", "bytes": "bytes", "unknown": "no-such-encoding"})
def encoding(work: Work, value: str) -> object:
    path = work.file("model.pt", saved(with_bulk("grün")))
    return [
        attempt(torch.load, path, encoding=value, weights_only=False),
        attempt(torch.load, path, encoding=value, weights_only=True),
    ]


@case()
def unknown_keyword(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load, path, no_such_argument=1),
        attempt(torch.load, path, no_such_argument=1, weights_only=False),
        attempt(torch.load, path, fix_imports=False, weights_only=False),
    ]


@case()
def wrong_calls(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return [
        attempt(torch.load),
        attempt(torch.load, path, "cpu", None, True),
        attempt(torch.load, path, weights_only="yes"),
        attempt(torch.load, path, mmap="yes"),
        attempt(torch.load, f=path),
        attempt(torch.load, path, f=path),
    ]


@case(served=True)
def positional_map_location_and_pickle_module(work: Work) -> object:
    return torch.load(work.file("model.pt", saved(state())), "cpu", None)


@case(served=True)
def whole_module(work: Work) -> object:
    path = work.file("model.pt", saved(net()))
    loaded = torch.load(path, weights_only=False)
    loaded.eval()
    return [loaded, loaded(torch.ones(2, 256)), attempt(torch.load, path)]


@case(served=True)
def environment_forces_weights_only(work: Work) -> object:
    import os

    path = work.file("model.pt", saved(with_bulk({1, 2})))
    seen = []
    for variable in ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        os.environ[variable] = "1"
        seen += [attempt(torch.load, path), attempt(torch.load, path, weights_only=False)]
        seen += [attempt(torch.load, path, weights_only=True)]
        del os.environ[variable]
    return seen


@case(served=True)
def serialization_debug(work: Work) -> object:
    import os

    path = work.file("model.pt", saved(state()))
    os.environ["TORCH_SERIALIZATION_DEBUG"] = "1"
    return torch.load(path)


@case(served=True)
def random_state_is_not_touched(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    before = torch.get_rng_state()
    torch.load(path)
    return [torch.equal(before, torch.get_rng_state()), torch.rand(3)]


@case(served=True)
def public_signature(work: Work) -> object:
    import inspect

    torch.load(work.file("model.pt", saved(state())))
    return [
        str(inspect.signature(torch.load)),
        torch.load.__name__,
        torch.load.__qualname__,
        torch.load.__module__,
        torch.load.__doc__,
        torch.load is torch.serialization.load,
        sorted(name for name in vars(torch.serialization) if not name.startswith("__")),
    ]
