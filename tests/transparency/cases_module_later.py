"""After load_state_dict: module, state dict and file are independent, in every direction."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import torch

from .payloads import Net, net, saved
from .registry import Work, attempt, case, cases


def _loaded(work: Work, **options: Any) -> tuple[Net, Any]:
    source = torch.load(work.file("model.pt", saved(net().state_dict())), **options)
    module = net(2)
    module.load_state_dict(source)
    return module, source


def _write_module(module: Net, source: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
        module.table.zero_()


def _write_source(module: Net, source: Any) -> None:
    for tensor in source.values():
        tensor.zero_()


def _write_both(module: Net, source: Any) -> None:
    with torch.no_grad():
        module.large.weight[3] = 5
    source["large.weight"][3] = 6
    source["large.weight"][200] = 7


def _write_by_numpy(module: Net, source: Any) -> None:
    module.large.weight.detach().numpy()[0] = 1
    source["large.weight"].numpy()[1] = 2


def _drop_source(module: Net, source: Any) -> None:
    source.clear()
    gc.collect()


def _train(module: Net, source: Any) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(4, 256)).pow(2).sum().backward()
        optimizer.step()


def _convert(module: Net, source: Any) -> None:
    module.half().float()


def _initialise(module: Net, source: Any) -> None:
    module.large.reset_parameters()
    module.norm.reset_running_stats()


def _replace_data(module: Net, source: Any) -> None:
    module.large.weight.data = source["large.weight"]
    source["large.weight"][0] = 3


CHANGES = {
    function.__name__.strip("_"): function
    for function in (
        *(_write_module, _write_source, _write_both, _write_by_numpy, _drop_source, _train),
        *(_convert, _initialise, _replace_data),
    )
}


@cases(CHANGES, served=True, elided=True)
def changed(work: Work, change: Any) -> object:
    module, source = _loaded(work)
    other, other_source = _loaded(work)
    change(module, source)
    return [module, source, other, other_source, _loaded(work)[0]]


@cases({"whole": "bulk", "one_element": "element"}, served=True)
def source_written_before_load(work: Work, how: str) -> object:
    """A source that the program changed is copied as it is now, not as the file has it."""
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    if how == "bulk":
        source["large.weight"].mul_(2)
    else:
        source["large.weight"][255, 255] = 55
    source["table"].numpy()[5, 5] = 66
    module = net(2)
    module.load_state_dict(source)
    return [module, source]


@case(served=True)
def views_of_the_source(work: Work) -> object:
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    weight = source["large.weight"]
    modules = []
    for view in (weight.t(), weight.clone(), weight.view(-1).view(256, 256), weight.flip(0)):
        module = torch.nn.Linear(256, 256, bias=False)
        module.load_state_dict({"weight": view})
        modules.append(module)
    halves = torch.nn.ModuleList([torch.nn.Linear(256, 128, bias=False) for _ in range(2)])
    halves.load_state_dict({"0.weight": weight[:128], "1.weight": weight[128:]})
    with torch.no_grad():
        halves[0].weight.zero_()
    return [modules, halves, weight]


@case(served=True)
def same_source_tensor_for_two_parameters(work: Work) -> object:
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    twins = torch.nn.ModuleList([torch.nn.Linear(256, 256, bias=False) for _ in range(2)])
    twins.load_state_dict({"0.weight": source["large.weight"], "1.weight": source["large.weight"]})
    with torch.no_grad():
        twins[0].weight.fill_(1)
    return [twins, source["large.weight"]]


@case(served=True)
def saved_again(work: Work) -> object:
    module, _ = _loaded(work)
    torch.save(module.state_dict(), "again.pt")
    torch.save(module.large.bias.detach(), "bias.pt")
    torch.save(module, "module.pt")
    sizes = [(work.directory / name).stat().st_size for name in ("again.pt", "bias.pt")]
    return [sizes, torch.load("again.pt"), torch.load("module.pt", weights_only=False)]


@case(served=True)
def copied_and_pickled(work: Work) -> object:
    module, _ = _loaded(work)
    deep = copy.deepcopy(module)
    with torch.no_grad():
        deep.large.weight.zero_()
    revived = pickle.loads(pickle.dumps(module))
    return [module, deep, revived, copy.copy(module)]


@case(served=True)
def storages_of_parameters(work: Work) -> object:
    module, source = _loaded(work)
    return [
        [
            name,
            tensor.untyped_storage().nbytes(),
            tensor.untyped_storage().resizable(),
            tensor.is_shared(),
            tensor.storage_offset(),
            tensor._version,
            tensor.untyped_storage().data_ptr() % 64,
            tensor.data_ptr() == source[name].data_ptr(),
            attempt(lambda tensor=tensor: tensor.detach().numpy().flags.writeable),
        ]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    ]


@case(served=True)
def parameter_storages_can_grow(work: Work) -> object:
    """A parameter's own memory can be resized; it must still be possible afterwards."""
    module, _ = _loaded(work)
    storage = module.large.weight.untyped_storage()
    first = attempt(storage.resize_, storage.nbytes() * 2)
    seen = [type(first), storage.nbytes(), module.large.weight[3].detach().clone()]
    attempt(storage.resize_, 0)
    return [seen, storage.nbytes()]


@case(served=True)
def parameter_storages_are_freed_and_filled_again(work: Work) -> object:
    """What FSDP does with weights that it does not need for a while."""
    module, source = _loaded(work)
    weight = module.large.weight
    view = weight.detach()[3]
    size_bytes = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    freed = [weight.untyped_storage().nbytes(), view.untyped_storage().nbytes()]
    weight.detach()._typed_storage()._resize_(size_bytes // weight.element_size())
    with torch.no_grad():
        weight.fill_(2)
    module.load_state_dict(source)
    return [freed, view.clone(), weight.untyped_storage().nbytes(), weight._version]


@case(served=True)
def version_counters_and_backward(work: Work) -> object:
    """A load between forward and backward is noticed as a write."""
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    module = net(2)
    result = module(torch.ones(2, 256, requires_grad=True)).sum()
    module.load_state_dict(source)
    return [attempt(result.backward), [p._version for p in module.parameters()]]


@cases({"allocated": torch.zeros, "cached": None}, served=True)
def parameters_are_views_of_one_vector(work: Work, allocate: Any) -> object:
    """Flat parameters: what is loaded is seen in the vector, and what is written there in them."""
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    module = net(2)
    size = sum(parameter.numel() for parameter in module.parameters())
    path = work.file("flat.pt", saved(torch.arange(size, dtype=torch.float32)))
    vector = torch.load(path) if allocate is None else allocate(size)
    torch.nn.utils.vector_to_parameters(vector, module.parameters())
    module.load_state_dict(source)
    seen = vector.clone()
    vector[:2048].zero_()
    return [seen, module, source, torch.load(path)[:2048]]


@case(served=True, elided=True)
def hooks_of_parameters_in_a_wrapper(work: Work) -> object:
    """Hooks registered before a load run after it; a module inside a wrapper is loaded as it is."""
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    module = net(2)
    wrapped = torch.nn.ModuleDict({"inner": module})
    seen: list[object] = []
    module.large.weight.register_hook(lambda gradient: seen.append(gradient[:2].clone()))
    module.large.weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter[:2].detach().clone())
    )
    result = wrapped.load_state_dict({f"inner.{name}": value for name, value in source.items()})
    module(torch.ones(2, 256)).sum().backward()
    return [result, seen, module.large.weight.grad[:2], wrapped]


@case(served=True)
def load_under_modes(work: Work) -> object:
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    first, second, third = net(2), net(3), net(4)
    with torch.inference_mode():
        first.load_state_dict(source)
    with torch.no_grad():
        second.load_state_dict(source)
    with torch.device("meta"):
        third.load_state_dict(source)
    return [first, second, third]


@case(served=True)
def function_mode_sees_the_copies(work: Work) -> object:
    from torch.overrides import TorchFunctionMode

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    module = net(2)
    with Noting():
        module.load_state_dict(source)
    return [seen, module]


@case(served=True)
def shared_module_is_written_for_all(work: Work) -> object:
    """A module in shared memory stays there: a forked child sees what is loaded later."""
    import os

    module = net(2).share_memory()
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    pid = os.fork()
    if pid == 0:
        module.load_state_dict(source)
        os._exit(0)
    os.waitpid(pid, 0)
    return [module, module.large.weight.is_shared()]


@case(served=True)
def many_loads_in_a_loop(work: Work) -> object:
    path = work.file("model.pt", saved(net().state_dict()))
    module = net(2)
    for number in range(20):
        module.load_state_dict(torch.load(path))
        with torch.no_grad():
            module.large.weight[number].fill_(number)
    return module


@case(served=True)
def swa_and_ema_models(work: Work) -> object:
    module, _ = _loaded(work)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    with torch.no_grad():
        module.large.weight.add_(1)
    averaged.update_parameters(module)
    return [module, averaged]
