"""nn.Module.load_state_dict: results, messages, hooks and kinds of modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

from .payloads import Net, bulk, counting, net, saved
from .registry import Work, attempt, case, cases


def _source(work: Work, module: torch.nn.Module | None = None, **options: Any) -> Any:
    path = work.file("model.pt", saved((module or net()).state_dict()))
    return torch.load(path, **options)


@cases({"plain": {}, "mmap": {"mmap": True}, "unsafe": {"weights_only": False}}, served=True)
def into_fresh_module(work: Work, options: dict[str, Any]) -> object:
    module = net(2)
    result = module.load_state_dict(_source(work, **options))
    return [result, repr(result), module, module.eval()(torch.ones(2, 256))]


@case(served=True, elided=True)
def copies_are_elided(work: Work) -> object:
    module = net(2)
    source = _source(work)
    module.load_state_dict(source)
    return [module, source]


@case(served=True)
def into_the_same_module_twice(work: Work) -> object:
    module = net(2)
    first = module.load_state_dict(_source(work))
    module.large.weight.data.zero_()
    return [first, module.load_state_dict(_source(work)), module]


@case(served=True)
def one_state_dict_into_two_modules(work: Work) -> object:
    first, second = net(2), net(3)
    source = _source(work)
    first.load_state_dict(source)
    second.load_state_dict(source)
    with torch.no_grad():
        first.large.weight.add_(1)
        second.large.weight[0] = 3
    return [first, second, source]


@case(served=True)
def module_state_is_not_touched(work: Work) -> object:
    """Identity of parameters, gradients, flags and modes are the module's own."""
    module = net(2)
    before = dict(module.named_parameters())
    module.large.weight.grad = torch.ones(256, 256)
    module.large.bias.requires_grad_(False)
    module.eval()
    module.load_state_dict(_source(work))
    same = [parameter is before[name] for name, parameter in module.named_parameters()]
    return [same, module, module.large.weight.grad]


@cases({"strict": True, "lenient": False}, served=True)
def missing_and_unexpected(work: Work, strict: bool) -> object:
    source = _source(work)
    del source["large.bias"], source["norm.running_mean"]
    source["extra.weight"] = torch.ones(2)
    module = net(2)
    result = attempt(module.load_state_dict, source, strict)
    return [result, repr(result), module]


@cases({"strict": True, "lenient": False}, served=True)
def wrong_shapes(work: Work, strict: bool) -> object:
    source = _source(work)
    source["large.weight"] = torch.ones(3, 3)
    source["table"] = torch.ones(())
    source["head.1.bias"] = "no tensor"
    module = net(2)
    return [attempt(module.load_state_dict, source, strict=strict), module]


@cases({"no_dict": [1], "none": None, "text": "x", "empty": {}, "integer_keys": {1: 2}})
def no_state_dict(work: Work, value: Any) -> object:
    _source(work)
    return [attempt(net(2).load_state_dict, value), attempt(net(2).load_state_dict, value, False)]


@cases({"assign": True, "copy": False}, served=True)
def assign(work: Work, value: bool) -> object:
    module = net(2)
    before = dict(module.named_parameters())
    source = _source(work)
    result = module.load_state_dict(source, assign=value)
    same = [parameter is before[name] for name, parameter in module.named_parameters()]
    with torch.no_grad():
        source["large.weight"].zero_()
        module.table.fill_(8)
    return [result, same, module, source]


@case(served=True)
def assign_to_meta_module(work: Work) -> object:
    with torch.device("meta"):
        module, other = Net.__new__(Net), Net.__new__(Net)
        module.__init__()
        other.__init__()
    source = _source(work)
    result = module.load_state_dict(source, assign=True)
    return [result, module, attempt(other.load_state_dict, source), other.large.weight.device.type]


@case(served=True)
def to_empty_module(work: Work) -> object:
    with torch.device("meta"):
        module = Net()
    module.to_empty(device="cpu")
    module.load_state_dict(_source(work))
    return module


@cases({"swap": True, "set_data": False}, served=True)
def conversion_setting(work: Work, swap: bool) -> object:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    module = net(2)
    module.load_state_dict(_source(work))
    return [
        module,
        module.double().large.weight,
        torch.__future__.get_swap_module_params_on_conversion(),
    ]


@case(served=True)
def other_dtypes_and_layouts(work: Work) -> object:
    source = _source(work)
    half, double, last = net(2).half(), net(2).double(), torch.nn.Conv2d(4, 256, 8)
    half.load_state_dict(source)
    double.load_state_dict(source)
    last = last.to(memory_format=torch.channels_last)
    weights = {"weight": source["large.weight"].view(256, 4, 8, 8), "bias": torch.zeros(256)}
    last.load_state_dict(weights)
    return [half, double, last]


@case(served=True)
def hooks_see_the_same(work: Work) -> object:
    seen: list[object] = []
    module = net(2)

    def before(*arguments: Any) -> None:
        seen.append(["before", arguments[2], sorted(map(str, arguments[1]))])
        arguments[1]["large.bias"] = torch.full((256,), 5.0)

    def after(owner: Any, incompatible: Any) -> None:
        seen.append(["after", owner.large.weight.detach().clone(), incompatible])
        incompatible.missing_keys.append("invented")

    module.register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(after)
    module.head.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())
    return [attempt(module.load_state_dict, _source(work)), seen, module]


class Own(torch.nn.Linear):
    """A module with an own way to load."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def get_extra_state(self) -> Any:
        return {"note": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@case(served=True)
def own_loading_and_extra_state(work: Work) -> object:
    torch.manual_seed(3)
    module = torch.nn.Sequential(Own(256, 256))
    source = _source(work, torch.nn.Sequential(Own(256, 256)), weights_only=False)
    return [module.load_state_dict(source), module, module[0].note, source]


class Overridden(Net):
    """A class that overrides the method itself."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return ["mine", super().load_state_dict(state_dict, strict=strict, assign=assign)]


@case(served=True)
def overridden_method(work: Work) -> object:
    torch.manual_seed(2)
    module = Overridden()
    return [module.load_state_dict(_source(work)), module]


@case(served=True)
def tied_parameters(work: Work) -> object:
    def make() -> torch.nn.ModuleDict:
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1024, 512)})
        module["head"] = torch.nn.Linear(512, 1024, bias=False)
        module["head"].weight = module["embed"].weight
        return module

    torch.manual_seed(1)
    source = _source(work, make())
    module = make()
    module.load_state_dict(source)
    untied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(1024, 512)})
    untied["head"] = torch.nn.Linear(512, 1024, bias=False)
    untied.load_state_dict(source)
    with torch.no_grad():
        untied["head"].weight.zero_()
    return [module, module["head"].weight is module["embed"].weight, untied, source]


@case(served=True)
def aliased_parameters_and_buffers(work: Work) -> object:
    """Two parameters over one storage, and a buffer that is a view of a parameter."""
    module = torch.nn.Module()
    storage = torch.zeros(2048, 80)
    module.a, module.b = torch.nn.Parameter(storage[:1024]), torch.nn.Parameter(storage[1024:])
    module.register_buffer("c", storage[5:10])
    source = work.file("model.pt", saved({"a": bulk(), "b": bulk(7), "c": torch.ones(5, 80)}))
    module.load_state_dict(torch.load(source))
    return [module, storage]


@case(served=True)
def held_by_others(work: Work) -> object:
    """Views and references taken before the load see the new values."""
    module = net(2)
    held = [module.large.weight.data, module.large.weight.detach()[3], module.table]
    array = module.large.weight.detach().numpy()
    pointer = module.large.weight.data_ptr()
    module.load_state_dict(_source(work))
    return [held, array, module, pointer == module.large.weight.data_ptr()]


@case(served=True)
def held_by_an_optimizer(work: Work) -> object:
    module = net(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    module.load_state_dict(_source(work))
    optimizer.step()
    return [module, optimizer.state_dict()]


LAYERS: dict[str, Any] = {
    "lstm": lambda: torch.nn.LSTM(128, 256, 2),
    "embedding": lambda: torch.nn.Embedding(1024, 300, padding_idx=0),
    "convolution": lambda: torch.nn.Conv2d(64, 128, 8),
    "attention": lambda: torch.nn.MultiheadAttention(512, 8),
    "encoder": lambda: torch.nn.TransformerEncoderLayer(256, 4, 512),
    "buffers": lambda: torch.nn.BatchNorm1d(1 << 18),
    "weight_norm": lambda: parametrizations.weight_norm(torch.nn.Linear(512, 512)),
    "spectral": lambda: parametrizations.spectral_norm(torch.nn.Linear(512, 512)),
    "lists": lambda: torch.nn.ParameterList([torch.ones(512, 512), torch.zeros(512, 512)]),
    "frozen": lambda: torch.nn.Linear(1024, 512).requires_grad_(False),
    "complex": lambda: torch.nn.Linear(512, 256, dtype=torch.complex64),
    "bfloat16": lambda: torch.nn.Linear(1024, 512, dtype=torch.bfloat16),
}


@cases(LAYERS, served=True)
def layer(work: Work, make: Any) -> object:
    torch.manual_seed(1)
    source = _source(work, make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        module = make()
        result = module.load_state_dict(source)
    return [result, module, source]


@case(served=True)
def lstm_computes_after_load(work: Work) -> object:
    source = _source(work, torch.nn.LSTM(128, 256, 2))
    module = torch.nn.LSTM(128, 256, 2)
    module.load_state_dict(source)
    module.flatten_parameters()
    return [module(torch.ones(3, 1, 128))[0], module._flat_weights[0] is module.weight_ih_l0]


@case(served=True)
def lazy_modules(work: Work) -> object:
    source = _source(work, torch.nn.Sequential(torch.nn.Linear(1024, 512)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.nn.Sequential(torch.nn.LazyLinear(512))
    result = module.load_state_dict(source)
    return [result, module, module(torch.ones(1, 1024))]


@case(served=True)
def parametrized_in_between(work: Work) -> object:
    class Doubled(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2

    torch.manual_seed(1)
    module = torch.nn.Linear(1024, 512)
    parametrize.register_parametrization(module, "weight", Doubled())
    source = _source(work, module)
    result = module.load_state_dict(source)
    plain = attempt(torch.nn.Linear(1024, 512).load_state_dict, source)
    return [result, plain, module.weight, copy.deepcopy(module).parametrizations.weight.original]


@case(served=True)
def subclass_parameters(work: Work) -> object:
    from .cases_tensor_types import Plain

    torch.manual_seed(1)
    module = torch.nn.Linear(256, 256)
    source = _source(work, module)
    other = torch.nn.Linear(256, 256)
    other.weight = torch.nn.Parameter(counting(256, 256).as_subclass(Plain))
    first = other.load_state_dict(source)
    third = torch.nn.Linear(256, 256)
    third.load_state_dict({name: tensor.as_subclass(Plain) for name, tensor in source.items()})
    return [first, other, third]


@cases({"tensors": torch.Tensor, "parameters": torch.nn.Parameter}, served=True)
def copying_is_replaced(work: Work, kind: Any) -> object:
    """A program's own ``copy_`` is called for every parameter and buffer it is for."""
    module, source = net(2), _source(work)
    shapes: list[tuple[int, ...]] = []

    def copy_(self: Any, other: Any, *arguments: Any) -> Any:
        shapes.append(tuple(self.shape))
        return torch._C.TensorBase.copy_(self, other, *arguments)

    kind.copy_ = copy_
    return [module.load_state_dict(source), shapes, module]
