"""What a program does with loaded tensors: write, save again, copy, export, compute."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import torch

from .payloads import bulk, counting, fixed_length_keys, net, pickled_bytes, saved, state
from .registry import Work, attempt, case, cases

LOADS = {"plain": {}, "mmap": {"mmap": True}, "unsafe": {"weights_only": False}}


def _add(tensor: torch.Tensor) -> object:
    return tensor.add_(1)


def _item(tensor: torch.Tensor) -> object:
    tensor[0, 0] = 77
    return tensor


def _data(tensor: torch.Tensor) -> object:
    tensor.data[1] = 5
    return tensor


def _numpy(tensor: torch.Tensor) -> object:
    array = tensor.numpy()
    array[2] = 9
    return [array.flags.writeable, array.flags.owndata, tensor]


def _storage(tensor: torch.Tensor) -> object:
    tensor.untyped_storage()[0] = 255
    tensor.untyped_storage()[8:16].fill_(1)
    return tensor


def _fill_storage(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage().fill_(1)


def _copy_into(tensor: torch.Tensor) -> object:
    return tensor.copy_(torch.ones(1024, 80))


def _view(tensor: torch.Tensor) -> object:
    tensor.view(-1)[5:9].zero_()
    return [tensor, tensor.t().storage_offset()]


def _out(tensor: torch.Tensor) -> object:
    return torch.add(torch.ones(1024, 80), 1, out=tensor)


def _foreach(tensor: torch.Tensor) -> object:
    torch._foreach_add_([tensor], 2)
    return tensor


def _dlpack(tensor: torch.Tensor) -> object:
    other = torch.from_dlpack(tensor)
    other[0] = 3
    array = np.from_dlpack(tensor)
    return [tensor, other.data_ptr() == tensor.data_ptr(), array.flags.writeable, array]


def _buffer(tensor: torch.Tensor) -> object:
    memory = memoryview(tensor.numpy())
    other = torch.frombuffer(memory.cast("B"), dtype=torch.float32)
    other[0] = 8
    return [memory.readonly, memory.nbytes, tensor]


def _swap(tensor: torch.Tensor) -> object:
    torch.utils.swap_tensors(tensor, other := torch.ones(2))
    return [tensor, other]


def _set(tensor: torch.Tensor) -> object:
    return tensor.set_(torch.ones(3))


def _resize_same(tensor: torch.Tensor) -> object:
    return tensor.resize_(1024, 80)


def _resize_smaller(tensor: torch.Tensor) -> object:
    return tensor.resize_(4)


def _resize_storage(tensor: torch.Tensor) -> object:
    tensor.untyped_storage().resize_(0)
    return tensor.untyped_storage().nbytes()


def _byte_swap(tensor: torch.Tensor) -> object:
    tensor.untyped_storage().byteswap(torch.float32)
    return tensor


WRITES = {
    function.__name__.strip("_"): function
    for function in (
        *(_add, _item, _data, _numpy, _storage, _fill_storage, _copy_into, _view, _out, _foreach),
        *(_dlpack, _buffer, _swap, _set, _resize_same, _resize_smaller),
        *(_resize_storage, _byte_swap),
    )
}


@cases(WRITES, served=True)
def write(work: Work, change: Any) -> object:
    """A write is seen by this load only: not by others, not by the file, not by later loads."""
    path = work.file("model.pt", saved(state()))
    other = torch.load(path)
    seen: list[object] = []
    for options in LOADS.values():
        loaded = torch.load(path, **options)
        seen += [attempt(change, loaded["bulk"]), loaded]
    return [*seen, other, torch.load(path), path.read_bytes()]


@cases(LOADS, served=True)
def resize_beyond_the_storage(work: Work, options: dict[str, Any]) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())), **options)
    tensor = loaded["bulk"]
    # torch sets the new shape before it finds that the storage cannot grow: never read after it.
    error = attempt(tensor.resize_, 1024, 81)
    seen = error if isinstance(error, Exception) else "resized"
    return [seen, list(tensor.shape), tensor.untyped_storage().nbytes(), loaded["weight"]]


@cases(LOADS, served=True)
def small_tensors_are_written(work: Work, options: dict[str, Any]) -> object:
    path = work.file("model.pt", saved(state()))
    first, second = torch.load(path, **options), torch.load(path, **options)
    for tensor in first.values():
        tensor.zero_()
    return [first, second, torch.load(path, **options)]


@cases(LOADS, served=True)
def saved_again(work: Work, options: dict[str, Any]) -> object:
    """A slice of a large mapping must not be saved whole."""
    loaded = torch.load(work.file("model.pt", saved(state())), **options)
    torch.save(loaded, "all.pt")
    torch.save(loaded["weight"], "weight.pt")
    torch.save({"a": loaded["bulk"][3:5], "b": loaded["bulk"][0]}, "views.pt")
    torch.save(loaded, "legacy.pt", _use_new_zipfile_serialization=False)
    names = ("all.pt", "weight.pt", "views.pt")
    contents = [(work.directory / name).read_bytes() for name in names]
    legacy = len(fixed_length_keys((work.directory / "legacy.pt").read_bytes()))
    return [contents, legacy, *(torch.load(name) for name in names)]


@cases(LOADS, served=True)
def saved_over_itself(work: Work, options: dict[str, Any]) -> object:
    path = work.fresh("model.pt", saved(state()))
    if "mmap" in options:
        # Saving over a file that is mapped is an error of the program: it saves beside and renames.
        loaded = torch.load(path, **options)
        torch.save(loaded, "next.pt")
        (work.directory / "next.pt").replace(path)
    else:
        loaded = torch.load(path, **options)
        loaded["weight"].add_(1)
        torch.save(loaded, path)
    return [loaded, torch.load(path, **options)]


@cases(LOADS, served=True)
def pickled(work: Work, options: dict[str, Any]) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())), **options)
    buffer = io.BytesIO()
    torch.save(loaded["weight"], buffer)
    sizes = [pickled_bytes(loaded[name]) for name in ("weight", "bias", "bulk")]
    return [sizes, len(buffer.getvalue()), pickle.loads(pickle.dumps(loaded))]


@cases(LOADS, served=True)
def copied(work: Work, options: dict[str, Any]) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())), **options)
    deep, shallow = copy.deepcopy(loaded), copy.copy(loaded)
    clone = {name: tensor.clone() for name, tensor in loaded.items()}
    deep["bulk"].zero_()
    loaded["weight"].add_(5)
    storage = copy.deepcopy(loaded["weight"].untyped_storage())
    return [loaded, deep, shallow, clone, storage, copy.copy(loaded["bias"].untyped_storage())]


@case(served=True)
def converted(work: Work) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())))
    tensor = loaded["bulk"]
    same = [
        tensor.to("cpu") is tensor,
        tensor.contiguous() is tensor,
        tensor.float() is tensor,
        tensor.to(torch.float32, copy=True) is tensor,
        tensor.cpu() is tensor,
    ]
    return [same, tensor.half(), tensor.to("meta"), tensor.double()[:3]]


@case(served=True)
def computed_and_differentiated(work: Work) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())))
    leaf = loaded["bulk"].requires_grad_()
    (leaf[:4] * 2).sum().backward()
    error = attempt(leaf.add_, 1)
    with torch.no_grad():
        leaf.sub_(leaf.grad)
    return [leaf, leaf.grad, error, torch.nn.Parameter(loaded["weight"])]


@case(served=True)
def saved_for_backward_and_written(work: Work) -> object:
    """The version counter notices a write between forward and backward."""
    loaded = torch.load(work.file("model.pt", saved(state())))
    leaf = torch.ones(80, requires_grad=True)
    result = (leaf * loaded["bulk"][0]).sum()
    loaded["bulk"].mul_(2)
    return [attempt(result.backward), loaded["bulk"]._version]


@case(served=True)
def weak_references_and_collection(work: Work) -> object:
    gc.freeze()  # the libraries: to look through them takes longer than all else here
    path = work.file("model.pt", saved(state()))
    loaded = torch.load(path)
    row = loaded["bulk"][3]
    references = [weakref.ref(tensor) for tensor in loaded.values()]
    del loaded
    gc.collect()
    return [[reference() is None for reference in references], row, torch.load(path)]


@case(served=True)
def one_small_tensor_outlives_the_rest(work: Work) -> object:
    gc.freeze()  # the libraries: to look through them takes longer than all else here
    path = work.file("model.pt", saved(state()))
    kept = [torch.load(path)["weight"] for _ in range(20)]
    gc.collect()
    kept[3].zero_()
    return [kept[0], kept[3], kept[19]]


@case(served=True)
def loaded_many_times(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    sums = []
    for number in range(60):
        loaded = torch.load(path)
        loaded["bulk"][0].add_(number)
        sums.append(loaded["bulk"][0, 0].item())
    return [sums, torch.load(path)]


@case(served=True)
def numpy_array_outlives_the_tensor(work: Work) -> object:
    gc.freeze()  # the libraries: to look through them takes longer than all else here
    array = torch.load(work.file("model.pt", saved(state())))["weight"].numpy()
    gc.collect()
    array += 1
    return array


@case(served=True)
def compiled_and_traced(work: Work) -> object:
    path = work.file("model.pt", saved(net().eval()))
    module = torch.load(path, weights_only=False)
    batch = torch.ones(2, 256)
    traced = torch.jit.trace(module, batch)
    functional = torch.func.functional_call(module, dict(module.named_parameters()), (batch,))
    return [module(batch), traced(batch), functional]


@case(served=True)
def storage_arithmetic(work: Work) -> object:
    value = {"typed": counting(9).storage(), "untyped": bulk().untyped_storage()}
    loaded = torch.load(work.file("model.pt", saved(value)))
    typed, untyped = loaded["typed"], loaded["untyped"].untyped()
    return [
        typed.tolist(),
        len(untyped),
        untyped[4:12],
        untyped.clone()[:4],
        typed.double(),
        attempt(untyped.__getitem__, 1 << 40),
        attempt(untyped.__setitem__, 0, 5),
        typed.size(),
    ]
