"""torch.load: containers, aliases, ties, views and whole objects."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from typing import Any

import torch

from .payloads import Net, bulk, counting, net, saved, state, with_bulk
from .registry import Work, attempt, case, cases


def _loaded_in_both_ways(work: Work, value: Any) -> object:
    path = work.file("model.pt", saved(value))
    return [attempt(torch.load, path), attempt(torch.load, path, weights_only=False)]


@dataclasses.dataclass
class Configuration:
    """A user's own class."""

    width: int
    weight: Any


class Named(collections.namedtuple("Named", "left right")):
    """A named tuple."""


PLAIN = {
    "numbers": [1, -5, 2**70, 1.5, float("inf"), True, None, 3 + 4j],
    "text": ["a", "grün", "", "a" * 300, b"bytes", bytearray(b"array")],
    "nested": {"a": [1, (2, {"b": [torch.ones(2), None]})], 3: {}, None: (), (1, 2): []},
    "ordered": collections.OrderedDict([("z", torch.ones(2)), ("a", torch.zeros(2))]),
    "default_dict": collections.defaultdict(list, a=[torch.ones(1)]),
    "counter": collections.Counter("aabc"),
    "set": {3},
    "namespace": argparse.Namespace(rate=0.1, weight=torch.ones(3)),
    "empty_dict": {},
    "size": torch.Size([2, 3]),
}


@cases(PLAIN)
def container(work: Work, value: Any) -> object:
    return _loaded_in_both_ways(work, with_bulk(value))


@cases({"dataclass": lambda: Configuration(3, counting(9)), "named": lambda: Named(1, counting(3))})
def own_class(work: Work, make: Any) -> object:
    return _loaded_in_both_ways(work, with_bulk(make()))


@cases({"tensor": bulk, "list": lambda: [bulk(), bulk(3)], "tuple": lambda: (bulk(), 1)})
def top_level(work: Work, make: Any) -> object:
    return _loaded_in_both_ways(work, make())


@case(served=True)
def state_dict_with_metadata(work: Work) -> object:
    loaded = torch.load(work.file("model.pt", saved(net().state_dict())))
    return [loaded, loaded._metadata]


@case(served=True)
def state_dict_with_attributes(work: Work) -> object:
    values = collections.OrderedDict(state())
    values.note = ["attribute"]  # type: ignore[attr-defined]
    return _loaded_in_both_ways(work, values)


@case(served=True)
def same_object_twice(work: Work) -> object:
    tensor = bulk()
    loaded = torch.load(work.file("m.pt", saved({"a": tensor, "b": tensor, "c": [tensor]})))
    loaded["a"][0, 0] = 99
    return [loaded, loaded["a"] is loaded["b"], loaded["b"][0, 0].item()]


@case(served=True)
def two_views_of_one_storage(work: Work) -> object:
    tensor = bulk()
    parts = {"all": tensor, "rows": tensor[3:5], "column": tensor[:, 7], "flat": tensor.view(-1)}
    loaded = torch.load(work.file("model.pt", saved(parts)))
    loaded["all"][4, 7] = -1
    return loaded


@case(served=True)
def view_only(work: Work) -> object:
    """A small view of a large storage saves the whole storage."""
    return torch.load(work.file("model.pt", saved({"row": bulk()[5], "element": bulk()[1, 1]})))


VIEWS = {
    "transposed": lambda: bulk().t(),
    "strided": lambda: bulk()[::3, ::2],
    "expanded": lambda: counting(1, 1024, 1).expand(300, 1024, 5),
    "permuted": lambda: counting(64, 128, 128).permute(2, 0, 1),
    "channels_last": lambda: counting(4, 64, 64, 64).to(memory_format=torch.channels_last),
    "offset": lambda: counting((1 << 20) + 13)[13:],
    "odd_offset": lambda: torch.arange(4 << 20).to(torch.uint8)[1:],
    "reinterpreted": lambda: bulk().view(torch.int16),
    "overlapping": lambda: counting(1 << 20).as_strided((1000, 16), (8, 1), 3),
    "conjugate": lambda: torch.complex(bulk(), bulk(1)).conj(),
    "imaginary": lambda: torch.complex(bulk(), bulk(1)).imag,
    "negative": lambda: torch.complex(bulk(), bulk(1)).conj().imag,
    "real_view": lambda: torch.view_as_real(torch.complex(bulk(), bulk(1))),
    "diagonal": lambda: bulk().diagonal(),
    "zero_stride_scalar": lambda: torch.ones(()).expand(7),
    "quasi_empty": lambda: bulk()[:0, 3:],
}


@cases(VIEWS)
def view(work: Work, make: Any) -> object:
    return _loaded_in_both_ways(work, {"view": make(), "bulk": bulk()})


@case(served=True)
def view_and_base_of_different_types(work: Work) -> object:
    base = bulk()
    error = attempt(torch.save, {"a": base, "b": base.view(torch.int32)}, "refused.pt")
    return [error, torch.load(work.file("model.pt", saved({"a": base, "b": base[1:]})))]


@cases({"vector": (0,), "matrix": (0, 5), "inner": (3, 0, 2)})
def zero_elements(work: Work, shape: tuple[int, ...]) -> object:
    return _loaded_in_both_ways(work, with_bulk([torch.empty(shape), torch.empty(shape)]))


@cases({"dtype": torch.float32, "dtypes": torch.int32}, served=True)
def zero_elements_shared(work: Work, dtype: torch.dtype) -> object:
    """Such tensors share a storage from torch 2.15 on, and have each their own before."""
    empty = torch.empty(0)
    path = work.file("model.pt", saved(with_bulk([empty, empty.view(dtype)])))
    tensors = torch.load(path)["value"]
    return [tensors, len({tensor.untyped_storage()._cdata for tensor in tensors})]


@case(served=True)
def many_small_tensors(work: Work) -> object:
    values = {f"layer.{number}": counting(7, start=number) for number in range(300)}
    return torch.load(work.file("model.pt", saved({**values, "bulk": bulk()})))


@case(served=True)
def storages_saved_directly(work: Work) -> object:
    value = {"untyped": bulk().untyped_storage(), "typed": counting(9).storage(), "bulk": bulk()}
    return _loaded_in_both_ways(work, value)


@case(served=True)
def gradients_and_flags(work: Work) -> object:
    leaf = counting(1024, 256).requires_grad_()
    leaf.grad = torch.ones(1024, 256)
    return _loaded_in_both_ways(work, {"leaf": leaf, "parameter": torch.nn.Parameter(bulk())})


@case(served=True)
def parameters_of_every_kind(work: Work) -> object:
    value = {
        "frozen": torch.nn.Parameter(bulk(), requires_grad=False),
        "buffer": torch.nn.Buffer(counting(8)),
        "transient": torch.nn.Buffer(counting(8), persistent=False),
        "list": torch.nn.ParameterList([torch.ones(2), torch.zeros(2)]),
        "dict": torch.nn.ParameterDict({"a": torch.ones(2)}),
    }
    return _loaded_in_both_ways(work, value)


@case(served=True)
def parameter_with_attributes(work: Work) -> object:
    parameter = torch.nn.Parameter(bulk())
    parameter.tag = ["mine", 3]  # type: ignore[attr-defined]
    tensor = counting(6)
    tensor.note = "kept?"  # type: ignore[attr-defined]
    return _loaded_in_both_ways(work, {"parameter": parameter, "tensor": tensor})


@case(served=True)
def tensor_with_hooks(work: Work) -> object:
    tensor = bulk().requires_grad_()
    tensor.register_hook(_double)
    return _loaded_in_both_ways(work, {"tensor": tensor})


def _double(gradient: Any) -> Any:
    return gradient * 2


@case(served=True)
def module_with_tied_weights(work: Work) -> object:
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1024, 256)})
    module["head"] = torch.nn.Linear(256, 1024, bias=False)
    module["head"].weight = module["embed"].weight
    loaded = torch.load(work.file("model.pt", saved(module)), weights_only=False)
    same = loaded["head"].weight is loaded["embed"].weight
    return [same, loaded, torch.load(work.file("state.pt", saved(module.state_dict())))]


@case(served=True)
def module_with_hooks_and_buffers(work: Work) -> object:
    module = net()
    module.register_forward_hook(_forward_hook)
    module.eval()
    loaded = torch.load(work.file("model.pt", saved(module)), weights_only=False)
    return [
        loaded,
        len(loaded._forward_hooks),
        loaded(torch.ones(1, 256)),
        isinstance(loaded, Net),
    ]


def _forward_hook(module: Any, arguments: Any, output: Any) -> Any:
    return output + 1


@case(served=True)
def checkpoint_of_a_training_run(work: Work) -> object:
    def write(path: Any) -> None:
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        checkpoint = {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "random": torch.get_rng_state(),
        }
        torch.save(checkpoint, path)

    return torch.load(work.file("model.pt", write))
