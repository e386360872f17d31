"""Random programs over model files: the cases that nobody thought of.

A program writes some files, and then takes random steps: it loads, writes to what it loaded,
makes views, copies and modules of it, trains, converts, saves, replaces files, forks. All that it
holds is described after each step. Its seed decides everything, so a seed is a case.

Left out is what differs between two runs without the shim, or ends them: memory that nobody
initialised, files written in place while they are mapped, arrays over memory that torch has freed.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch._dynamo  # as the first optimizer of a program does, for two seconds
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from .forked import described_here, in_forked_child
from .observe import Described
from .payloads import saved, saved_bytes
from .registry import Work

__all__ = ["Program"]

Tensor = torch.Tensor

_STEPS = 30
_LARGE_BYTES = 64 << 10
"""From here on load_state_dict does not copy."""
_SHAPES = ((), (7,), (16, 8), (128, 128), (256, 160), (64, 3, 16, 16), (0,), (1024, 33))
_DTYPES = (
    *[torch.float32] * 4,
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_STORED = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
_KEPT = {"values": 10, "dicts": 4, "modules": 4, "optimizers": 2}
"""How many of each a program holds; the oldest go."""


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(200, 128), nn.Linear(128, 200, bias=False))
    net[1].weight = net[0].weight
    return net


def _with_buffers() -> nn.Module:
    net = nn.Sequential(nn.Linear(128, 160), nn.LayerNorm(160))
    net.register_buffer("table", torch.arange(20_000.0))
    net.register_buffer("not_saved", torch.ones(3), persistent=False)
    return net


_MODULES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(128, 160),
    lambda: nn.Sequential(nn.Linear(128, 160), nn.ReLU(), nn.Linear(160, 128, bias=False)),
    lambda: nn.Sequential(nn.Conv2d(16, 64, 5), nn.BatchNorm2d(64)),
    lambda: nn.LSTM(64, 96),
    lambda: nn.TransformerEncoderLayer(64, 4, 256, batch_first=True),
    lambda: parametrizations.weight_norm(nn.Linear(128, 160)),
    lambda: nn.ModuleDict(
        {"layer": nn.Linear(128, 160), "list": nn.ParameterList([torch.ones(160, 130)])}
    ),
    _tied,
    _with_buffers,
)

_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, fused=True),
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)

Operation = Callable[["Program", Tensor], object]


def _swap(program: Program, tensor: Tensor) -> None:
    other = tensor.clone()
    torch.utils.swap_tensors(tensor, other)
    program.values.append(other)


_WRITES: dict[str, Operation] = {
    "add": lambda _, tensor: tensor.add_(1),
    "multiply": lambda _, tensor: tensor.mul_(2),
    "zero": lambda _, tensor: tensor.zero_(),
    "clamp": lambda _, tensor: tensor.clamp_(0, 5),
    "copy": lambda program, tensor: tensor.copy_(program.tensor()),
    "item": lambda _, tensor: tensor.__setitem__(0, 1),
    "mask": lambda _, tensor: tensor.__setitem__(tensor > 3, 0),
    "data": lambda _, tensor: tensor.data.add_(1),
    "gradient": lambda _, tensor: setattr(tensor, "grad", torch.ones_like(tensor)),
    "view": lambda _, tensor: tensor.view(-1)[1:].add_(1),
    "storage": lambda _, tensor: tensor.dtype is torch.bool or tensor.untyped_storage().fill_(1),
    "array": lambda _, tensor: tensor.detach().numpy().fill(2),
    "out": lambda _, tensor: torch.mul(tensor, 2, out=tensor),
    "foreach": lambda program, tensor: torch._foreach_add_([tensor, program.tensor()], 1),
    "multiply_add": lambda _, tensor: tensor.addcmul_(tensor, tensor),
    "swap": _swap,
}

_CHANGES: dict[str, Operation] = {
    "t_": lambda _, tensor: tensor.t_(),
    "resize_": lambda _, tensor: tensor.resize_(tensor.numel() // 2),
    "set_": lambda program, tensor: tensor.set_(program.tensor()),
    "set_storage": lambda _, tensor: tensor.set_(
        tensor.untyped_storage(), 0, (min(3, tensor.numel()),)
    ),
    "unsqueeze_": lambda _, tensor: tensor.unsqueeze_(0),
    "squeeze_": lambda _, tensor: tensor.squeeze_(),
    "transpose_": lambda _, tensor: tensor.transpose_(0, -1),
    "as_strided_": lambda _, tensor: tensor.as_strided_((min(2, tensor.numel()),), (1,)),
    "detach_": lambda _, tensor: tensor.detach_(),
    "requires_grad_": lambda _, tensor: tensor.requires_grad_(not tensor.requires_grad),
    "share_memory_": lambda program, tensor: (program.forget_arrays(), tensor.share_memory_()),
    "data": lambda program, tensor: setattr(tensor, "data", program.tensor()),
    "convert": lambda _, tensor: setattr(tensor, "data", tensor.data.to(torch.float64)),
}

_DERIVED: dict[str, Operation] = {
    "clone": lambda _, tensor: tensor.clone(),
    "detach": lambda _, tensor: tensor.detach(),
    "data": lambda _, tensor: tensor.data,
    "view": lambda _, tensor: tensor.view(-1),
    "other_type": lambda _, tensor: tensor.view(torch.uint8),
    "part": lambda _, tensor: tensor[1:],
    "transposed": lambda _, tensor: tensor.mT,
    "expanded": lambda _, tensor: tensor.expand(2, *tensor.shape),
    "half": lambda _, tensor: tensor.half(),
    "channels_last": lambda _, tensor: tensor.to(memory_format=torch.channels_last),
    "contiguous": lambda _, tensor: tensor.contiguous(),
    "moved": lambda _, tensor: tensor.to("cpu"),
    "moved_copy": lambda _, tensor: tensor.to("cpu", copy=True),
    "array": lambda _, tensor: tensor.detach().numpy(),
    "from_array": lambda _, tensor: torch.from_numpy(tensor.detach().numpy()),
    "dlpack": lambda _, tensor: torch.from_dlpack(tensor.detach()),
    "deepcopy": lambda _, tensor: copy.deepcopy(tensor),
    "copy": lambda _, tensor: copy.copy(tensor),
    "pickle": lambda _, tensor: pickle.loads(pickle.dumps(tensor)),
    "conjugate": lambda _, tensor: tensor.conj(),
    "real": lambda _, tensor: torch.view_as_real(tensor),
    "sum": lambda _, tensor: tensor.sum(),
    "difference": lambda _, tensor: tensor - 1,
    "chunks": lambda _, tensor: list(tensor.chunk(2)),
    "selected": lambda _, tensor: tensor[tensor != 0],
    "parameter": lambda _, tensor: nn.Parameter(tensor, tensor.is_floating_point()),
    "storage": lambda _, tensor: tensor.untyped_storage().clone(),
    "buffer": lambda program, tensor: program.through_buffer(tensor),
}

ModuleOperation = Callable[["Program", Any], object]


def _first(net: nn.Module, kind: type[nn.Module]) -> Any:
    return next(each for each in net.modules() if isinstance(each, kind))


def _emptied(net: nn.Module) -> None:
    net.to_empty(device="cpu")
    for each in [*net.parameters(), *net.buffers()]:
        each.detach().zero_()
        each.grad = None


def _in_vector(net: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(vector + 1, net.parameters())


def _initialised(net: nn.Module) -> None:
    torch.manual_seed(5)
    for each in net.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


def _averaged(program: Program, net: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(net)
    for _ in range(2):
        average.update_parameters(net)
    program.modules.append(average.module)


def _keep_dict(**options: Any) -> ModuleOperation:
    return lambda program, net: program.dicts.append(net.state_dict(**options))


def _keep(function: Callable[[Any], Any]) -> ModuleOperation:
    return lambda program, net: program.modules.append(function(net))


def _change_incoming(net: nn.Module) -> None:
    def hook(module: nn.Module, incoming: dict[str, Any], *_: object) -> None:
        for each in list(incoming.values())[:1]:
            if each.is_floating_point():
                each.add_(1)

    net.register_load_state_dict_pre_hook(hook)


_TO_MODULES: dict[str, ModuleOperation] = {
    "half": lambda _, net: net.half(),
    "float": lambda _, net: net.float(),
    "double": lambda _, net: net.double(),
    "bfloat16": lambda _, net: net.bfloat16(),
    "cpu": lambda _, net: net.to("cpu"),
    "meta": lambda _, net: net.to("meta"),
    "to_empty": lambda _, net: _emptied(net),
    "state_dict": _keep_dict(),
    "state_dict_of_parameters": _keep_dict(keep_vars=True),
    "deepcopy": _keep(copy.deepcopy),
    "copy": _keep(copy.copy),
    "pickle": _keep(lambda net: pickle.loads(pickle.dumps(net))),
    "save": lambda program, net: program.modules.append(program.through_file(net)),
    "share_memory": lambda program, net: (program.forget_arrays(), net.share_memory()),
    "eval": lambda _, net: net.eval(),
    "train": lambda _, net: net.train(),
    "freeze": lambda _, net: net.requires_grad_(False),
    "thaw": lambda _, net: net.requires_grad_(True),
    "zero_grad": lambda _, net: net.zero_grad(),
    "clip": lambda _, net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "apply": lambda _, net: net.apply(
        lambda each: [parameter.data.mul_(0.5) for parameter in each.parameters(recurse=False)]
    ),
    "vector": lambda _, net: _in_vector(net),
    "initialise": lambda _, net: _initialised(net),
    "tie": lambda _, net: setattr(
        next(iter(net.parameters())), "data", list(net.parameters())[-1].data
    ),
    "functional": lambda program, net: program.values.append(
        torch.func.functional_call(
            net, {name: each.detach() * 2 for name, each in net.named_parameters()}, _input(net)
        )
    ),
    "unparametrize": lambda _, net: parametrize.remove_parametrizations(net, "weight"),
    "prune": lambda _, net: prune.l1_unstructured(_first(net, nn.Linear), "weight", amount=0.3),
    "hook": lambda _, net: _change_incoming(net),
    "replace": lambda _, net: setattr(
        _first(net, nn.Linear), "weight", nn.Parameter(_first(net, nn.Linear).weight.detach())
    ),
    "buffer": lambda program, net: net.register_buffer("loaded", program.tensor().detach()),
    "average": _averaged,
}


def _input(net: Any) -> Tensor:
    """What a module of these can take, in the type of its parameters."""
    dtype = next(net.parameters()).dtype
    first = net[0] if isinstance(net, nn.Sequential) else net
    if isinstance(first, nn.Embedding):
        return torch.arange(4).reshape(1, 4)
    if isinstance(first, nn.Conv2d):
        return torch.ones(1, 16, 8, 8, dtype=dtype)
    if isinstance(first, (nn.LSTM, nn.TransformerEncoderLayer)):
        return torch.ones(2, 3, 64, dtype=dtype)
    return torch.ones(2, 128, dtype=dtype)


class Program:
    """One program, in the directory of ``work``."""

    def __init__(self, seed: int, work: Work) -> None:
        self.random = random.Random(seed)
        self.values: list[Any] = []
        self.dicts: list[dict[str, Any]] = []
        self.modules: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._directory = work.directory
        self._originals: list[nn.Module] = []
        """Module ``i`` is what ``i.pt`` was saved from."""
        self._notes: list[Any] = []
        self._steps = [
            getattr(self, f"_{name}") for name, weight in _WEIGHTS.items() for _ in range(weight)
        ]

    def run(self) -> list[Any]:
        """What each step noted or raised, and what the program held after it."""
        torch.manual_seed(0)
        for path in self._directory.iterdir():
            path.unlink()
        self._write_files()
        return [Described(self._taken(self.random.choice(self._steps))) for _ in range(_STEPS)]

    def _taken(self, step: Callable[[], object]) -> list[Any]:
        self._notes = [step.__name__]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step()
            except Exception as error:
                self._notes.append(error)
        for name, most in _KEPT.items():
            del getattr(self, name)[:-most]
        warned = sorted({f"{each.category.__name__}: {each.message}" for each in caught})
        return [described_here(self._notes), warned, self._holds()]

    def _holds(self) -> Any:
        states = [[each.param_groups, list(each.state.values())] for each in self.optimizers]
        try:
            return described_here([self.values, self.dicts, self.modules, states])
        except RuntimeError as error:  # torch forbids even to ask some views
            return str(error)

    # --- files ------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for number in range(2):
            torch.manual_seed(self.random.randrange(1000))
            net = self.random.choice(_MODULES)()
            self._originals.append(net)
            stored = copy.deepcopy(net).to(self.random.choice(_STORED))
            self._write(f"{number}.pt", saved(stored.state_dict()))
            self._write(
                f"{number}.safetensors",
                lambda path, net=stored: safetensors.torch.save_model(net, str(path)),
            )
        optimizer = torch.optim.Adam(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with suppress(RuntimeError):  # parametrized modules
            self._write("whole.pt", saved(net))
        states = {"optimizer": optimizer.state_dict(), "model": net.state_dict()}
        self._write("checkpoint.pt", saved(states))
        value = self._structure()
        self._write("structure.pt", saved(value))
        self._write_tensors([self._made() for _ in range(4)])

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """A new file replaces the old one: one that is mapped must not change."""
        path = self._directory / "new"
        write(path)
        os.replace(path, self._directory / name)

    def _write_tensors(self, tensors: list[Tensor]) -> None:
        # The order in which safetensors lists those without bytes is random.
        found = {f"t{i}": each.contiguous() for i, each in enumerate(tensors) if each.numel()}
        self._write("tensors.safetensors", lambda path: safetensors.torch.save_file(found, path))

    def _file(self, suffix: str) -> Path:
        return self.random.choice(sorted(self._directory.glob(f"*{suffix}")))

    def through_file(self, value: Any) -> Any:
        """Saved and loaded."""
        self._write("value.pt", saved(value))
        return torch.load(self._directory / "value.pt", weights_only=False)

    def through_buffer(self, value: Any) -> Any:
        """Saved and loaded, without a file."""
        return torch.load(io.BytesIO(saved_bytes(value)), weights_only=False)

    # --- values -----------------------------------------------------------------------------------

    def _made(self) -> Tensor:
        shape = self.random.choice(_SHAPES)
        size = torch.Size(shape).numel()
        values = torch.arange(size, dtype=torch.float64).add(self.random.randrange(100)) % 113 / 8
        return values.to(self.random.choice(_DTYPES)).reshape(shape)

    def _structure(self, depth: int = 0) -> Any:
        tensor = self._made()
        kind = self.random.randrange(6) if depth < 3 else 0
        if kind == 1:
            return [tensor, tensor, tensor.reshape(-1)[1:], tensor.mT if tensor.dim() > 1 else None]
        if kind == 2:
            return {name: self._structure(depth + 1) for name in "abc"}
        if kind == 3:
            return (self._structure(depth + 1), "text", 3, None, 2.5)
        if kind == 4:
            return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        return tensor

    def _tensors(self) -> Iterator[Tensor]:
        pending: list[Any] = [self.values, self.dicts, [each.state for each in self.optimizers]]
        pending += [[*net.parameters(), *net.buffers()] for net in self.modules]
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor):
                yield value
                if value.is_leaf and value.grad is not None:
                    yield value.grad
            elif isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, (list, tuple)):
                pending += value

    def tensor(self) -> Tensor:
        """One of those that it holds, mostly a large one."""
        found = list({id(each): each for each in self._tensors()}.values())
        large = [each for each in found if each.nbytes >= _LARGE_BYTES]
        if large and self.random.random() < 0.6:
            return self.random.choice(large)
        return self.random.choice(found) if found else self._made()

    def forget_arrays(self) -> None:
        """torch frees memory that it moves, also below an array."""
        self.values.clear()

    def _one_of(self, kept: list[Any], make: Callable[[], object]) -> Any:
        if not kept:
            make()
        return self.random.choice(kept)

    def _chosen(self, operations: dict[str, Any]) -> Any:
        name = self.random.choice(list(operations))
        self._notes.append(name)
        return operations[name]

    # --- steps ------------------------------------------------------------------------------------

    def _load(self) -> None:
        path = self._file(".pt")
        options: dict[str, Any] = {}
        if self.random.random() < 0.4:
            places = ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, _: storage]
            options["map_location"] = self.random.choice(places)
        if self.random.random() < 0.6:
            options["weights_only"] = self.random.random() < 0.3
        how = self.random.choice(["path", "path", "path", "mmap", "file", "unbuffered", "bytes"])
        self._notes += [path.name, how, sorted(options)]
        if how == "mmap":
            value = torch.load(path, mmap=True, **options)
        elif how == "bytes":
            value = torch.load(io.BytesIO(path.read_bytes()), **options)
        elif how == "path":
            value = torch.load(self.random.choice([path, str(path)]), **options)
        else:
            with path.open("rb", buffering=0 if how == "unbuffered" else -1) as file:
                value = torch.load(file, **options)
                self._notes.append(file.tell())
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif path.stem.isdigit():
            self.dicts.append(value)
        else:
            self.values.append(value)

    def _load_safetensors(self) -> None:
        path = self._file(".safetensors")
        self._notes.append(path.name)
        self.dicts.append(safetensors.torch.load_file(self.random.choice([path, str(path)])))

    def _open_safetensors(self) -> None:
        path, framework = self._file(".safetensors"), self.random.choice(["pt", "pt", "np"])
        with safetensors.safe_open(path, framework=framework) as file:
            name = self.random.choice(sorted(file.keys()))
            part = file.get_slice(name)
            self._notes += [path.name, file.metadata(), part.get_shape(), part.get_dtype()]
            whole = self.random.random() < 0.5 or not part.get_shape()
            self.values.append(file.get_tensor(name) if whole else part[1:])

    def _load_model(self) -> None:
        net, path = self._one_of(self.modules, self._new_module), self._file(".safetensors")
        is_strict = self.random.random() < 0.5
        self._notes += [path.name, safetensors.torch.load_model(net, path, strict=is_strict)]

    def _new_module(self) -> None:
        self.modules.append(copy.deepcopy(self.random.choice(self._originals)))

    def _load_state_dict(self) -> None:
        net = self._one_of(self.modules, self._new_module)
        state = self._one_of(self.dicts, self._load_safetensors)
        options = self.random.choice([{}, {}, {"strict": False}, {"assign": True}])
        self._notes.append(options)
        self._notes.append(str(net.load_state_dict(state, **options)))

    def _load_own_state(self) -> None:
        number = self.random.randrange(len(self._originals))
        net = copy.deepcopy(self._originals[number])
        is_meta = self.random.random() < 0.25
        state = torch.load(self._directory / f"{number}.pt")
        net = net.to("meta") if is_meta else net
        self._notes += [number, str(net.load_state_dict(state, assign=is_meta))]
        self.modules.append(net)
        if self.random.random() < 0.5:
            self.dicts.append(state)

    def _applied(self, operations: dict[str, Operation]) -> object:
        tensor, operation = self.tensor(), self._chosen(operations)
        with torch.set_grad_enabled(self.random.random() < 0.2):
            return operation(self, tensor)

    def _write_to(self) -> None:
        self._applied(_WRITES)

    def _change(self) -> None:
        self._applied(_CHANGES)

    def _derive(self) -> None:
        self.values.append(self._applied(_DERIVED))

    def _to_module(self) -> None:
        net = self._one_of(self.modules, self._new_module)
        self._chosen(_TO_MODULES)(self, net)

    def _to_dict(self) -> None:
        state = self._one_of(self.dicts, self._load_safetensors)
        operation = self.random.choice(["rename", "delete", "convert", "add", "take"])
        name = self.random.choice(list(state))
        self._notes += [operation, name]
        if operation == "rename":
            state[f"module.{name}"] = state.pop(name)
        elif operation == "delete":
            del state[name]
        elif operation == "convert":
            state[name] = state[name].half()
        elif operation == "add":
            state["more"] = self.tensor()
        else:
            self.values.append(state[name])

    def _compute(self) -> None:
        net = self._one_of(self.modules, self._new_module)
        if isinstance(net, nn.LSTM) and any(each.dim() != 2 for each in net.all_weights[0][:2]):
            return  # torch reads beyond the end of weights that have got another shape
        with torch.inference_mode(self.random.random() < 0.3):
            answer = net(_input(net))
        answer = answer[0] if isinstance(answer, tuple) else answer
        if answer.requires_grad and self.random.random() < 0.7:
            answer.float().sum().backward()
        else:
            self.values.append(answer)

    def _new_optimizer(self) -> None:
        net = self._one_of(self.modules, self._new_module)
        self.optimizers.append(self.random.choice(_OPTIMIZERS)(list(net.parameters())))

    def _optimize(self) -> None:
        optimizer = self._one_of(self.optimizers, self._new_optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and self.random.random() < 0.9:
                    parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()

    def _to_optimizer(self) -> None:
        optimizer = self._one_of(self.optimizers, self._new_optimizer)
        operation = self.random.choice(["load", "file", "keep", "add"])
        self._notes.append(operation)
        if operation == "load":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif operation == "file":
            optimizer.load_state_dict(torch.load(self._directory / "checkpoint.pt")["optimizer"])
        elif operation == "keep":
            self.values.append(optimizer.state_dict()["state"])
        else:
            optimizer.add_param_group({"params": [nn.Parameter(self.tensor().detach())]})

    def _save(self) -> None:
        operation = self.random.choice(["value", "module", "tensors", "checkpoint"])
        self._notes.append(operation)
        if operation == "value":
            self._write("structure.pt", saved(self.values[-3:]))
        elif operation == "tensors":
            self._write_tensors([self.tensor() for _ in range(3)])
        elif operation == "module":
            net = self._one_of(self.modules, self._new_module)
            self._write("whole.pt", saved(net))
        else:
            path = self._file(".pt")
            value = torch.load(path, weights_only=False)
            self._write(path.name, saved(value))

    def _replace_file(self) -> None:
        path = self._file(self.random.choice([".pt", ".safetensors"]))
        kept = path.read_bytes()
        content = bytearray(kept)
        operation = self.random.choice(["same", "damage", "shorten", "lengthen", "touch"])
        self._notes += [path.name, operation]
        middle = len(content) // 2
        if operation == "touch":
            os.utime(path)
            return
        if operation == "damage":
            content[middle : middle + 64] = content[middle : middle + 64][::-1]
        elif operation == "shorten":
            del content[middle:]
        elif operation == "lengthen":
            content += bytes(10)
        self._write(path.name, lambda new: new.write_bytes(content))
        try:
            if path.suffix == ".pt":
                self.values.append(torch.load(path, weights_only=False))
            else:
                self.values.append(safetensors.torch.load_file(path))
        finally:
            self._write(path.name, lambda new: new.write_bytes(kept))

    def _drop(self) -> None:
        kept = getattr(self, self.random.choice(list(_KEPT)))
        if kept:
            kept.pop(self.random.randrange(len(kept)))
        if self.random.random() < 0.3:
            gc.collect()

    def _any_step(self) -> Callable[[], object]:
        forking = (self._in_thread, self._in_fork)
        step = self.random.choice([each for each in self._steps if each not in forking])
        self._notes.append(step.__name__)
        return step

    def _in_thread(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._any_step()).result()

    def _in_fork(self) -> None:
        """The step changes nothing here."""
        step = self._any_step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fork beside threads, from Python 3.12 on
            answer = in_forked_child(lambda: Described(self._taken(step)))
        self._notes.append(Described(answer))


_WEIGHTS = {
    "load": 10,
    "load_safetensors": 4,
    "open_safetensors": 3,
    "load_model": 2,
    "new_module": 3,
    "load_state_dict": 8,
    "load_own_state": 8,
    "write_to": 10,
    "change": 4,
    "derive": 8,
    "to_module": 10,
    "to_dict": 3,
    "compute": 5,
    "new_optimizer": 2,
    "optimize": 4,
    "to_optimizer": 3,
    "save": 4,
    "replace_file": 3,
    "drop": 5,
    "in_thread": 2,
    "in_fork": 2,
}
"""How often each step is taken."""
