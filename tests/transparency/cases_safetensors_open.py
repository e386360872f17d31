"""safetensors.safe_open: every method, framework and device."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .payloads import bulk, counting, state
from .registry import Work, attempt, case, cases

METADATA = {"format": "pt", "note": "grün", "empty": ""}


def _file(work: Work) -> Path:
    return work.file("m.safetensors", lambda path: save_file(state(), path, metadata=METADATA))


@cases({"pt": "pt", "torch": "torch", "pytorch": "pytorch"}, served=True)
def framework(work: Work, name: str) -> object:
    with safe_open(_file(work), framework=name) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@cases({"np": "np", "numpy": "numpy"})
def framework_numpy(work: Work, name: str) -> object:
    with safe_open(_file(work), framework=name) as file:
        slices = file.get_slice("bulk")[3:5, :7], file.get_slice("bias")[:]
        return [{key: file.get_tensor(key) for key in file.keys()}, slices]  # noqa: SIM118


@cases({"unknown": "caffe", "empty": "", "none": None, "jax": "jax", "flax": "flax", "number": 3})
def framework_refused(work: Work, name: Any) -> object:
    opened = attempt(safe_open, _file(work), framework=name)
    return opened if isinstance(opened, Exception) else attempt(opened.get_tensor, "bulk")


@case(served=True)
def all_methods(work: Work) -> object:
    with safe_open(_file(work), framework="pt") as file:
        return {
            "keys": file.keys(),
            "offset_keys": file.offset_keys(),
            "metadata": sorted(file.metadata().items()),
            "tensors": [file.get_tensor(key) for key in file.offset_keys()],
            "again": [file.get_tensor("weight"), file.get_tensor("weight")],
            "many": attempt(file.get_tensors),
            "missing": attempt(file.get_tensor, "none"),
            "missing_slice": attempt(file.get_slice, "none"),
            "public": [name for name in dir(file) if not name.startswith("_")],
        }


@case(served=True)
def one_tensor_only(work: Work) -> object:
    with safe_open(str(_file(work)), "pt") as file:
        tensor = file.get_tensor("weight")
    storage = tensor.untyped_storage()
    return [tensor, storage.nbytes(), storage.resizable(), storage.filename, storage.is_shared()]


@case(served=True)
def one_large_tensor_only(work: Work) -> object:
    with safe_open(str(_file(work)), "pt", "cpu") as file:
        return file.get_tensor("bulk")


@case(served=True)
def aliases_between_tensors(work: Work) -> object:
    with safe_open(_file(work), framework="pt") as file:
        first, second = file.get_tensor("bulk"), file.get_tensor("bulk")
        part = file.get_slice("bulk")[:5]
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first[0] = -1
    return [first, second, part, same, torch._C._is_alias_of(first, second)]


INDICES: dict[str, Callable[[Any], Any]] = {
    "all": lambda s: s[:],
    "rows": lambda s: s[3:7],
    "block": lambda s: s[3:7, 10:20],
    "column": lambda s: s[:, 5],
    "row": lambda s: s[2],
    "negative": lambda s: s[-1],
    "negative_range": lambda s: s[-5:-2],
    "element": lambda s: s[1, 2],
    "ellipsis": lambda s: s[..., :3],
    "none": lambda s: s[None, 2],
    "step": lambda s: s[::2],
    "empty": lambda s: s[5:5],
    "reversed": lambda s: s[7:3],
    "beyond": lambda s: s[1000:5000],
    "out_of_range": lambda s: s[5000],
    "list": lambda s: s[[1, 2]],
    "too_many": lambda s: s[1, 2, 3],
    "text": lambda s: s["a"],
    "tensor": lambda s: s[torch.tensor([1])],
}


@cases(INDICES)
def get_slice(work: Work, take: Callable[[Any], Any]) -> object:
    with safe_open(_file(work), framework="pt") as file:
        one = file.get_slice("bulk")
        seen = [one.get_shape(), one.get_dtype(), attempt(take, one)]
    with safe_open(_file(work), framework="np") as file:
        return [seen, attempt(take, file.get_slice("bulk"))]


@case(served=True)
def slices_only(work: Work) -> object:
    with safe_open(_file(work), framework="pt") as file:
        part = file.get_slice("bulk")[100:200]
        part[0] = 5
        return [part, file.get_slice("bulk")[100:102], file.get_slice("count").get_shape()]


@cases({"string": "cpu", "device": torch.device("cpu"), "indexed": "cpu:0"})
def device(work: Work, name: Any) -> object:
    opened = attempt(safe_open, _file(work), framework="pt", device=name)
    return opened if isinstance(opened, Exception) else opened.get_tensor("bulk")


REFUSED = {"cuda": "cuda", "cuda_0": "cuda:0", "number": 0, "nonsense": "x", "meta": "meta"}


@cases(REFUSED | {"mps": "mps", "negative": -1, "none": None, "list": []})
def device_refused(work: Work, name: Any) -> object:
    opened = attempt(safe_open, _file(work), framework="pt", device=name)
    if isinstance(opened, Exception):
        return opened
    return [attempt(opened.get_tensor, "bulk"), attempt(opened.get_slice, "bulk").get_shape()]


@case(served=True)
def without_a_with_statement(work: Work) -> object:
    file = safe_open(_file(work), framework="pt")
    tensor = file.get_tensor("bulk")
    del file
    return tensor


@case(served=True)
def used_after_the_with_statement(work: Work) -> object:
    with safe_open(_file(work), framework="pt") as file:
        part = file.get_slice("bulk")
        tensor = file.get_tensor("weight")
    return [
        attempt(file.keys),
        attempt(file.get_tensor, "weight"),
        attempt(file.metadata),
        attempt(lambda: part[:2]),
        attempt(file.__enter__),
        tensor,
    ]


@case(served=True)
def exception_inside_the_with_statement(work: Work) -> object:
    def run() -> None:
        with safe_open(_file(work), framework="pt") as file:
            file.get_tensor("bulk")
            raise LookupError("inside")

    return [attempt(run), type(safe_open).__name__, safe_open.__name__, safe_open.__module__]


@case()
def wrong_calls(work: Work) -> object:
    path = _file(work)
    return [
        attempt(safe_open),
        attempt(safe_open, path),
        attempt(safe_open, None, "pt"),
        attempt(safe_open, "no-such-file", "pt"),
        attempt(safe_open, ".", "pt"),
        attempt(safe_open, bytes(path), "pt"),
        attempt(safe_open, path, "pt", "cpu", 3, 4, 5),
        attempt(safe_open, path.open("rb"), "pt"),
    ]


def _header(entries: Any, size: int = 1 << 21) -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text)) + text + bytes(size)


def _entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


WHOLE = _entry(0, 1 << 21, [1 << 19])
DAMAGED = {
    "empty": b"",
    "short": b"\x01\x02",
    "huge_header": struct.pack("<Q", 1 << 60) + bytes(1 << 21),
    "header_beyond_end": struct.pack("<Q", 1 << 22) + bytes(1 << 21),
    "no_json": _header(b"no json at all"),
    "no_object": _header(b"[1, 2]"),
    "bad_dtype": _header({"a": _entry(0, 1 << 21, [1 << 19], "F33")}),
    "beyond_end": _header({"a": _entry(0, 1 << 22, [1 << 20])}),
    "truncated": _header({"a": WHOLE}, size=1000),
    "trailing": _header({"a": WHOLE}, size=(1 << 21) + 8),
    "gap": _header({"a": _entry(8, (1 << 21) + 8, [1 << 19])}, size=(1 << 21) + 8),
    "overlap": _header({"a": WHOLE, "b": _entry(0, 4, [1])}),
    "wrong_shape": _header({"a": _entry(0, 1 << 21, [5])}),
    "negative_shape": _header({"a": _entry(0, 1 << 21, [-1])}),
    "no_tensors": _header({"__metadata__": {"a": "b"}}, size=0),
    "torch_zip": b"PK\x03\x04" + bytes(1 << 21),
    "good": _header({"a": WHOLE}),
    "unaligned": _header(
        {"a": _entry(0, 1, [1], "U8"), "b": _entry(1, 1 << 21, [(1 << 21) - 1], "I8")}
    ),
}


@cases(DAMAGED)
def damaged(work: Work, content: bytes) -> object:
    from safetensors import torch as by_torch

    path = work.file("m.safetensors", lambda path: path.write_bytes(content))
    opened = attempt(safe_open, path, framework="pt")
    keys = opened if isinstance(opened, Exception) else opened.keys()
    return [keys, attempt(by_torch.load_file, path), attempt(torch.load, path)]


@case(served=True)
def overwritten_after_load(work: Work) -> object:
    """safetensors maps the file: only a replacement keeps the old values in the original."""
    path = work.fresh("m.safetensors", lambda path: save_file(state(), path))
    with safe_open(path, framework="pt") as file:
        before = file.get_tensor("bulk")
        save_file(state(start=50), "next.safetensors")
        Path("next.safetensors").replace(path)
        still = file.get_tensor("weight")
    with safe_open(path, framework="pt") as file:
        return [before, still, file.get_tensor("bulk"), file.get_tensor("weight")]


@case(served=False)
def names_only(work: Work) -> object:
    """Asks the cache nothing."""
    with safe_open(_file(work), framework="pt") as file:
        names = sorted(file.keys()), sorted(file.metadata().items())
        return [names, [file.get_slice(name).get_shape() for name in file.offset_keys()]]


@cases({"replaced": False, "written": True}, served=False)
def changed_after_open(work: Work, in_place: bool) -> object:
    """Before the first tensor: a replacement keeps the old values, a write is seen."""
    path = work.fresh("m.safetensors", lambda path: save_file(state(), path))
    save_file(state(start=50), "next.safetensors")
    with safe_open(path, framework="pt") as file:
        if in_place:
            path.write_bytes(Path("next.safetensors").read_bytes())
        else:
            Path("next.safetensors").replace(path)
        return [file.get_tensor("bulk"), file.get_tensor("weight")]


@case(served=True)
def in_another_directory_after_open(work: Work) -> object:
    path = work.fresh("m.safetensors", lambda path: save_file(state(), path))
    with safe_open(path.name, framework="pt") as file:
        os.chdir("/")
        return file.get_tensor("bulk")


@case(served=True)
def first_tensors_in_threads(work: Work) -> object:
    """All of one mapping: a write in one thread is seen in the others."""
    with safe_open(_file(work), framework="pt") as file, ThreadPoolExecutor(8) as pool:
        tensors = list(pool.map(file.get_tensor, ["bulk"] * 16))
    tensors[0][0] = -1
    return tensors


@case(served=False)
def deleted_after_open(work: Work) -> object:
    path = work.fresh(
        "m.safetensors", lambda path: save_file({"a": bulk(), "b": counting(3)}, path)
    )
    with safe_open(path, framework="pt") as file:
        path.unlink()
        seen = [file.get_tensor("a"), file.get_slice("b")[:]]
    return [seen, attempt(safe_open, path, "pt")]


@cases({"cpu": "cpu", "meta": "meta"})
def device_context(work: Work, name: str) -> object:
    path = _file(work)
    with torch.device(name), safe_open(path, framework="pt") as file:
        return [attempt(file.get_tensor, "bulk"), attempt(lambda: file.get_slice("bulk")[:2])]


@case(served=True)
def inference_mode(work: Work) -> object:
    path = _file(work)
    with torch.inference_mode(), safe_open(path, framework="pt") as file:
        return [file.get_tensor("bulk"), file.get_slice("bulk")[:2]]
