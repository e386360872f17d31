"""safetensors: load_file, load, load_model, save, numpy, and what happens to their tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

from .payloads import Net, bulk, counting, net, pickled_bytes, state
from .registry import Work, attempt, case, cases

NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


def _file(work: Work) -> Path:
    return work.file("m.safetensors", lambda path: save_file(state(), path))


@cases({"path": Path, "str": str, "relative": lambda path: path.name}, served=True)
def whole_file(work: Work, form: Any) -> object:
    return load_file(form(_file(work)))


@case(served=True)
def whole_file_to_cpu(work: Work) -> object:
    return load_file(_file(work), device="cpu")


@cases(
    {"device": torch.device("cpu"), "cuda": "cuda", "number": 0, "meta": "meta", "nonsense": "x"}
)
def whole_file_to_refused(work: Work, device: Any) -> object:
    return attempt(load_file, _file(work), device=device)


@cases({name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}, served=True)
def dtype(work: Work, kind: torch.dtype) -> object:
    values = (torch.arange(2 << 20) % 2).to(torch.uint8).view(kind).reshape(128, -1)
    small = values[:1, :8].clone()
    return load_file(
        work.file("m.safetensors", lambda path: save_file({"a": small, "b": values}, path))
    )


@case(served=True)
def odd_shapes_and_offsets(work: Work) -> object:
    tensors = {f"{n}": counting(n, dtype=torch.uint8) for n in (0, 1, 3, 7, 8, 9, 63, 64, 65)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(3, 0, 2), "bulk": bulk()}
    path = work.file("m.safetensors", lambda path: save_file(tensors, path))
    loaded = load_file(path)
    return [
        loaded,
        {key: tensor.data_ptr() % tensor.element_size() for key, tensor in loaded.items()},
    ]


@case()
def from_bytes(work: Work) -> object:
    # The order of this dict is random in the original.
    return dict(sorted(safetensors.torch.load(_file(work).read_bytes()).items()))


@case()
def numpy_files(work: Work) -> object:
    path = _file(work)
    loaded = safetensors.numpy.load_file(path)
    loaded["weight"] += 1
    by_bytes = dict(sorted(safetensors.numpy.load(path.read_bytes()).items()))
    return [loaded, safetensors.numpy.load_file(path), by_bytes]


def _write_unaligned(path: Path) -> None:
    sizes = {"bytes": ("U8", 3, 3), "halves": ("F16", 4, 8), "numbers": ("I64", 200_000, 1_600_000)}
    header, end = {}, 0
    for name, (dtype, count, size_bytes) in sizes.items():
        end += size_bytes
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end - size_bytes, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (bytes(range(1, 12)) * (end // 11 + 1))[:end]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@case(served=True)
def numpy_of_tensors_that_are_not_aligned(work: Work) -> object:
    path = work.file("odd.safetensors", _write_unaligned)
    loaded = safetensors.numpy.load_file(path)
    loaded["numbers"][0] = 1
    flags = {name: (a.flags.aligned, a.flags.writeable) for name, a in sorted(loaded.items())}
    return [loaded, flags, safetensors.numpy.load_file(path)]


@case(served=True)
def numpy_and_torch_together(work: Work) -> object:
    path = _file(work)
    arrays, tensors = safetensors.numpy.load_file(path), load_file(path)
    arrays["bulk"][0] = 3
    tensors["bulk"][1] = 4
    return [arrays, tensors, load_file(path)]


@case(served=True)
def written_tensors(work: Work) -> object:
    path = _file(work)
    first, second = load_file(path), load_file(path)
    first["bulk"].add_(1)
    first["weight"].numpy()[0] = 9
    return [first, second, load_file(path), path.read_bytes()]


@case(served=True)
def saved_again(work: Work) -> object:
    loaded = load_file(_file(work))
    save_file(loaded, "again.safetensors")
    torch.save(loaded, "again.pt")
    torch.save(loaded["weight"], "weight.pt")
    sizes = [Path(name).stat().st_size for name in ("again.safetensors", "again.pt", "weight.pt")]
    pickles = [pickled_bytes(loaded[name]) for name in ("weight", "bias")]
    return [sizes, pickles, load_file("again.safetensors"), torch.load("again.pt")]


@case(served=True)
def saved_over_itself(work: Work) -> object:
    """Saving over a mapped file is allowed where the new content is made first."""
    path = work.fresh("m.safetensors", lambda path: save_file(state(), path))
    loaded = {name: tensor.clone() for name, tensor in load_file(path).items()}
    loaded["weight"].add_(1)
    path.unlink()
    save_file(loaded, path)
    return load_file(path)


@case(served=True)
def questions_about_storages(work: Work) -> object:
    loaded = load_file(_file(work))
    return {
        name: [
            tensor.untyped_storage().nbytes(),
            tensor.untyped_storage().resizable(),
            tensor.untyped_storage().filename,
            tensor.untyped_storage().is_shared(),
            tensor.is_pinned(),
            tensor.storage_offset(),
            tensor.numpy().flags.writeable,
            attempt(copy.deepcopy, tensor),
        ]
        for name, tensor in loaded.items()
    }


@case(served=True)
def shared_memory(work: Work) -> object:
    loaded = load_file(_file(work))
    for tensor in loaded.values():
        tensor.share_memory_()
    return [loaded, [tensor.is_shared() for tensor in loaded.values()]]


@case(served=True)
def model(work: Work) -> object:
    path = work.file("m.safetensors", lambda path: save_model(net(), path))
    module = net(3)
    result = load_model(module, path)
    return [result, module, module.eval()(torch.ones(2, 256))]


@case(served=True)
def model_into_the_state_dict_way(work: Work) -> object:
    path = work.file("m.safetensors", lambda path: save_model(net(), path))
    module = net(3)
    source = load_file(path)
    result = module.load_state_dict(source)
    source["large.weight"].zero_()
    module.head[1].weight.data.fill_(2)
    return [repr(result), module, source]


class Other(Net):
    """One layer more, one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(3, 3)


@cases({"strict": True, "lenient": False})
def model_that_does_not_fit(work: Work, strict: bool) -> object:
    path = work.file("m.safetensors", lambda path: save_model(net(), path))
    torch.manual_seed(5)
    module = Other()
    result = attempt(load_model, module, path, strict=strict)
    smaller = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    return [
        result,
        module,
        attempt(load_model, smaller, path, strict=strict),
        attempt(load_model, smaller, "no-such-file", strict=strict),
    ]


@case(served=True)
def model_with_tied_weights(work: Work) -> object:
    def make() -> torch.nn.Module:
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1024, 512)})
        module["head"] = torch.nn.Linear(512, 1024, bias=False)
        module["head"].weight = module["embed"].weight
        return module

    error = attempt(save_file, make().state_dict(), "refused.safetensors")
    torch.manual_seed(1)
    path = work.file("m.safetensors", lambda path: save_model(make(), path))
    module = make()
    result = load_model(module, path)
    return [error, result, module, module["head"].weight is module["embed"].weight]


@case(served=True)
def shards(work: Work) -> object:
    """Several files make one state dict."""
    parts = [{"a": bulk()}, {"b": bulk(5)}, {"c": counting(3)}]
    loaded: dict[str, Any] = {}
    for number, part in enumerate(parts):
        path = work.file(f"{number}.safetensors", lambda path, part=part: save_file(part, path))
        loaded |= load_file(path)
    return loaded


@case()
def missing_and_wrong_files(work: Work) -> object:
    return [
        attempt(load_file, "no-such-file"),
        attempt(load_file, "."),
        attempt(load_file, None),
        attempt(safetensors.numpy.load_file, "no-such-file"),
        attempt(safetensors.torch.load, b"short"),
    ]


class _OddPath:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __fspath__(self) -> Any:
        return self.value


@case()
def names_that_are_none(work: Work) -> object:
    """Of a file that is there, but for the last two."""
    path = str(_file(work))
    names: list[Any] = [path.encode(), _OddPath(path.encode()), _OddPath(3), path + "\0", "\ud800"]
    seen = [attempt(safetensors.numpy.load_file, name) for name in names]
    return [*seen, attempt(torch.UntypedStorage.from_file, path + "\0", False, 4096)]


@case()
def backends_of_load_file(work: Work) -> object:
    """Keyword arguments that newer versions know, and the public names."""
    import inspect

    path = _file(work)
    return [
        str(inspect.signature(load_file)),
        str(inspect.signature(load_model)),
        attempt(load_file, path, backend="mmap"),
        attempt(load_file, path, backend="no-such-backend"),
        attempt(load_file, path, no_such_argument=1),
        [name for name in dir(safetensors.torch) if not name.startswith("_")],
    ]
