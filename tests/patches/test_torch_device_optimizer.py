"""What programs are about to write becomes private first: training, initialisation, other writers.

The shared memory of the emulated devices is writable, so a write that slips through is found at the
end of each test, where a GPU would have ended the process.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import Devices, events, shared
from torch import nn

import trims_shim.client
from trims_shim import patches
from trims_shim.client import device_arenas
from trims_shim.patches import (
    points,
    torch_device,
    torch_initializers,
    torch_module,
    torch_repoint,
    torch_unshare,
)

SIDE = 256


@pytest.fixture(params=emulation.BOTH_WAYS)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Devices]:
    emulation.let_swap(monkeypatch, request.param)
    with emulation.emulated(monkeypatch, *emulation.OF_TRAINING) as devices:
        yield devices


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, SIDE)
        self.second = nn.Linear(SIDE, SIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    torch.save(Net().state_dict(), tmp_path / "model.pt")
    return str(tmp_path / "model.pt")


@pytest.fixture
def sharing(devices: Devices, path: str) -> Net:
    """A module on shared memory."""
    net = Net()
    net.load_state_dict(torch.load(path, map_location="cuda"))
    assert shared(net.first.weight)
    assert shared(net.second.weight)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, SIDE)).square().mean().backward()
        optimizer.step()


# --- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


@pytest.mark.parametrize("make", list(OPTIMIZERS.values())[:3], ids=list(OPTIMIZERS)[:3])
def test_training_is_what_it_is_without_the_shim(
    sharing: Net, path: str, make: Callable[..., Any]
) -> None:
    plain = Net()
    plain.load_state_dict(torch.load(path))
    identities = [id(each) for each in sharing.parameters()]
    train(plain, make(plain.parameters()))
    train(sharing, make(sharing.parameters()))
    for ours, theirs in zip(sharing.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not shared(ours)
    assert [id(each) for each in sharing.parameters()] == identities
    assert events("unshared:optimizer") == 2


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_takes_its_parameters_through_the_seam(
    sharing: Net, make: Callable[..., Any]
) -> None:
    make(sharing.parameters())
    assert not any(shared(each) for each in sharing.parameters())


def test_frozen_parameters_stay_shared(sharing: Net) -> None:
    sharing.first.requires_grad_(False)
    train(sharing, torch.optim.SGD(sharing.second.parameters(), lr=0.1))
    assert shared(sharing.first.weight)
    assert not shared(sharing.second.weight)


def test_groups_that_are_added_later(sharing: Net) -> None:
    optimizer = torch.optim.SGD([{"params": sharing.first.parameters()}], lr=0.1)
    assert shared(sharing.second.weight)
    optimizer.add_param_group({"params": sharing.second.weight, "lr": 0.2})
    assert not shared(sharing.second.weight)
    train(sharing, optimizer)


def test_an_optimizer_without_a_hash(sharing: Net) -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return type(other) is Equal

    optimizer = Equal(sharing.parameters(), lr=0.1)
    assert not shared(sharing.first.weight)
    assert torch_unshare.trained() == set(map(id, sharing.parameters()))
    del optimizer
    assert not torch_unshare.trained()


def test_errors_are_torchs(sharing: Net) -> None:
    with pytest.raises(ValueError, match="can't optimize a non-leaf"):
        torch.optim.SGD([sharing.first.weight * 2], lr=0.1)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        torch.optim.SGD([3], lr=0.1)  # type: ignore[list-item]
    assert shared(sharing.first.weight)


def test_aliases_and_ties_follow(sharing: Net) -> None:
    alias, view = sharing.first.weight.data, sharing.first.weight[3]
    tied = nn.Linear(SIDE, SIDE, bias=False)
    tied.weight = sharing.first.weight
    train(sharing, torch.optim.SGD(sharing.parameters(), lr=0.1))
    assert torch.equal(alias, sharing.first.weight)
    assert torch.equal(view, sharing.first.weight[3])
    assert torch.equal(tied.weight, sharing.first.weight)
    assert not shared(alias)


def _saved(net: Net) -> Any:
    """A transpose that only autograd has."""
    return net(torch.randn(2, SIDE)).sum()


def _storage(net: Net) -> Any:
    return net.first.weight.untyped_storage()


@pytest.mark.parametrize("keep", [_saved, _storage])
def test_what_cannot_follow_is_told(
    sharing: Net, keep: Callable[[Net], Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch_unshare._warn_of_aliases.cache_clear()
    kept = keep(sharing)
    expected = sharing.first.weight.detach().clone()
    torch.optim.SGD(sharing.parameters(), lr=0.1)
    assert not any(shared(each) for each in sharing.parameters())
    assert torch.equal(sharing.first.weight, expected)
    if torch_repoint.has_swap():
        assert events("alias_left:optimizer") == 0
    else:
        assert events("alias_left:optimizer") >= 1
        assert [each.levelname for each in caplog.records if "saved for" in each.message] == [
            "WARNING"
        ]
    if keep is _saved:
        kept.backward()
        assert sharing.second.weight.grad is not None
    if keep is _storage:
        assert bytes(kept) == expected.numpy().tobytes()


def test_a_write_after_what_was_saved_is_torchs_error(sharing: Net) -> None:
    loss = _saved(sharing)
    torch_unshare.unshare(sharing.parameters(), "test")
    with torch.no_grad():
        sharing.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_memory_is_let_go_of(devices: Devices, sharing: Net) -> None:
    optimizer = torch.optim.SGD(sharing.parameters(), lr=0.1)
    gc.collect()
    device_arenas.reap()
    assert len(devices.released) == 1
    assert not torch_device.is_any_shared()
    train(sharing, optimizer)


def test_an_optimizer_before_the_load(devices: Devices, path: str) -> None:
    """The usual way to resume: the load may not put what is trained on shared memory."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net.load_state_dict(torch.load(path, map_location="cuda"))
    assert not any(shared(each) for each in net.parameters())
    train(net, optimizer)


def test_the_state_of_an_optimizer(sharing: Net, tmp_path: Path) -> None:
    """Saved by itself and by hand, so that its file does not look like an optimizer's."""
    optimizer = torch.optim.Adam(sharing.parameters(), lr=0.1)
    train(sharing, optimizer)
    state = optimizer.state_dict()
    torch.save(state["state"], tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
    assert shared(loaded[0]["exp_avg"])
    optimizer.load_state_dict({**state, "state": loaded})
    assert not shared(optimizer.state[sharing.first.weight]["exp_avg"])
    train(sharing, optimizer)


def test_lists_of_tensors_in_the_state(sharing: Net, tmp_path: Path) -> None:
    """As SOAP and Shampoo have them, which write each in place."""
    optimizer = torch.optim.SGD(sharing.parameters(), lr=0.1)
    factors = [torch.ones(SIDE, SIDE)], (torch.ones(SIDE, SIDE),)
    state = {0: {"factors": factors, "by_name": {"a": torch.ones(SIDE, SIDE)}}}
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
    assert shared(loaded[0]["factors"][0][0])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})
    kept = optimizer.state[sharing.first.weight]
    for each in (*kept["factors"][0], *kept["factors"][1], kept["by_name"]["a"]):
        assert not shared(each)
        each.lerp_(torch.zeros(SIDE, SIDE), 0.5)


class Particular(torch.optim.Adam):
    """Keeps what it is given in the place of what torch made of it, as pytorch_optimizer's do."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["exp_avg"] = state_dict["state"][number]["exp_avg"]


def test_state_that_an_optimizer_puts_in_by_itself(sharing: Net, tmp_path: Path) -> None:
    optimizer = Particular(sharing.parameters(), lr=0.1)
    train(sharing, optimizer)
    state = optimizer.state_dict()
    torch.save({0: {"exp_avg": torch.ones(SIDE, SIDE).half()}}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
    assert shared(loaded[0]["exp_avg"])
    loaded = {number: {**each, **loaded.get(number, {})} for number, each in state["state"].items()}
    optimizer.load_state_dict({**state, "state": loaded})
    kept = optimizer.state[sharing.first.weight]["exp_avg"]
    assert kept.dtype is torch.half
    assert not shared(kept)


def test_the_state_is_looked_for_once(
    sharing: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.Adam(sharing.parameters(), lr=0.1)
    train(sharing, optimizer)
    state = optimizer.state_dict()
    torch.save(state["state"], tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
    views = [each["exp_avg"][1:] for each in loaded.values() if shared(each["exp_avg"])]
    assert len(views) == 2
    scans: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: scans.append(1) or get_objects())
    optimizer.load_state_dict({**state, "state": loaded})
    assert len(scans) == (0 if torch_repoint.has_swap() else 1)
    assert not any(shared(each) for each in views)


def test_optimizers_can_be_copied_and_saved(sharing: Net) -> None:
    optimizer = torch.optim.Adam(sharing.parameters(), lr=0.1)
    train(sharing, optimizer)
    duplicate = copy.deepcopy(optimizer)
    duplicate.load_state_dict(optimizer.state_dict())
    net = copy.deepcopy(sharing)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))


# --- other writers --------------------------------------------------------------------------------

INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda tensor: nn.init.uniform_(tensor),
    "normal_": lambda tensor: nn.init.normal_(tensor),
    "trunc_normal_": lambda tensor: nn.init.trunc_normal_(tensor),
    "constant_": lambda tensor: nn.init.constant_(tensor, 3.0),
    "ones_": lambda tensor: nn.init.ones_(tensor),
    "zeros_": lambda tensor: nn.init.zeros_(tensor),
    "xavier_uniform_": lambda tensor: nn.init.xavier_uniform_(tensor),
    "xavier_normal_": lambda tensor: nn.init.xavier_normal_(tensor),
    "kaiming_uniform_": lambda tensor: nn.init.kaiming_uniform_(tensor),
    "kaiming_normal_": lambda tensor: nn.init.kaiming_normal_(tensor=tensor),
    "a name that was imported before": nn.init.kaiming_uniform_,
    "orthogonal_": lambda tensor: nn.init.orthogonal_(tensor),
    "sparse_": lambda tensor: nn.init.sparse_(tensor, 0.5),
    "eye_": lambda tensor: nn.init.eye_(tensor),
    "dirac_": lambda tensor: nn.init.dirac_(tensor.view(SIDE, SIDE, 1)),
}


@pytest.mark.parametrize("fill", INITIALIZERS.values(), ids=INITIALIZERS)
@pytest.mark.parametrize("by", ["parameter", "data"])
def test_initialisation(sharing: Net, fill: Callable[[torch.Tensor], Any], by: str) -> None:
    plain = torch.empty(SIDE, SIDE)
    torch.manual_seed(1)
    fill(plain)
    torch.manual_seed(1)
    fill(sharing.first.weight if by == "parameter" else sharing.first.weight.data)
    assert torch.equal(sharing.first.weight, plain)
    assert not shared(sharing.first.weight)
    assert shared(sharing.second.weight)


@pytest.mark.parametrize("name", ["kaiming_uniform_", "kaiming_normal_"])
def test_warnings_name_the_line_that_torchs_name(devices: Devices, name: str) -> None:
    """The one that initialises, or before torch 2.7 or so the one that warns."""
    fill = getattr(nn.init, name)
    files = []
    for each in (fill, inspect.unwrap(fill)):
        with pytest.warns(UserWarning, match="zero-element") as caught:
            each(torch.empty(0, 3))
        files.append([each.filename for each in caught])
    assert files[0] == files[1]


def test_reset_parameters(sharing: Net) -> None:
    before = sharing.first.weight.clone()
    sharing.first.reset_parameters()
    assert not torch.equal(sharing.first.weight, before)


def test_averaging(sharing: Net) -> None:
    average = torch.optim.swa_utils.AveragedModel(sharing)
    average.update_parameters(sharing)
    average.update_parameters(sharing)
    assert not any(shared(each) for each in average.parameters())
    assert shared(sharing.first.weight)


def test_averaging_that_is_resumed(sharing: Net) -> None:
    average = torch.optim.swa_utils.AveragedModel(Net())
    average.module.load_state_dict(sharing.state_dict())
    assert shared(average.module.first.weight)
    average.n_averaged.fill_(1)
    average.update_parameters(sharing)
    assert not shared(average.module.first.weight)
    assert shared(sharing.first.weight)


def test_two_threads_make_the_same_tensor_private(
    sharing: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes second must neither fail, nor put a copy over what the first has written."""
    weight, failures = sharing.first.weight, []
    before = weight.detach().clone()
    copy_of = torch_device._copy_of

    def write() -> None:
        try:
            torch_unshare.unshare((weight,), "test")
            weight.data.add_(1)
        except Exception as error:
            failures.append(error)

    other = threading.Thread(target=write)

    def copy_and_be_overtaken(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copied = copy_of(storage)
        if other.ident is None:
            other.start()
            other.join(0.3)
        return copied

    monkeypatch.setattr(torch_device, "_copy_of", copy_and_be_overtaken)
    torch_unshare.unshare((weight,), "test")
    other.join()
    assert failures == []
    assert torch.equal(weight, before + 1)


def test_a_fork_while_a_tensor_is_made_private(
    sharing: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has nothing to make private, and must not wait for the thread that does."""
    copy_of = torch_device._copy_of
    children: list[int] = []

    def copy_and_fork(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        return copy_of(storage)

    def fork() -> None:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            torch_unshare.unshare(sharing.parameters(), "test")
            os._exit(0)
        children.append(os.waitpid(child, 0)[1])

    monkeypatch.setattr(torch_device, "_copy_of", copy_and_fork)
    torch_unshare.unshare((sharing.first.weight,), "test")
    assert children == [0]


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    distributed = torch.distributed
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_broadcasts(sharing: Net, group: Any) -> None:
    """As DeepSpeed gives all ranks the weights of one: by a view of each parameter."""
    torch.distributed.broadcast(sharing.first.weight.data.view(torch.uint8), src=0)
    assert not shared(sharing.first.weight)
    torch.distributed.distributed_c10d.broadcast(tensor=sharing.second.weight, src=0)
    assert not shared(sharing.second.weight)
    assert pickle.loads(pickle.dumps(torch.distributed.broadcast)) is torch.distributed.broadcast


def test_broadcasts_of_many(sharing: Net, group: Any) -> None:
    """As FSDP does with ``sync_module_states``."""
    from torch.distributed import utils

    utils._sync_module_states(sharing, group, 1 << 20, 0, ())
    assert not any(shared(each) for each in sharing.parameters())


def test_distributed_data_parallel(sharing: Net, group: Any) -> None:
    """Its constructor broadcasts into the module, and its warnings name its caller."""
    sharing.first._buffers["weight"] = sharing.first._parameters.pop("weight").detach()
    assert shared(sharing.first.weight)
    with pytest.warns(FutureWarning, match="check_reduction") as caught:
        torch.nn.parallel.DistributedDataParallel(sharing, check_reduction=True)
    assert [each.filename for each in caught] == [__file__]
    assert not any(shared(each) for each in (*sharing.parameters(), *sharing.buffers()))


def test_registered_buffers(sharing: Net, path: str) -> None:
    state = torch.load(path, map_location="cuda")
    before = state["first.weight"].clone()
    sharing.register_buffer("table", state["first.weight"])
    sharing.register_buffer("nothing", None)
    assert torch.equal(sharing.table, before)
    sharing.table.add_(1)
    assert shared(state["second.weight"])


def test_buffers_that_a_load_writes(sharing: Net, path: str) -> None:
    """Put in past the seams, as some libraries do."""
    sharing.register_buffer("table", torch.zeros(SIDE, SIDE))
    sharing._buffers["table"] = torch.load(path, map_location="cuda")["first.weight"]
    assert shared(sharing.table)
    state = {name: torch.ones_like(each) for name, each in sharing.state_dict().items()}
    sharing.load_state_dict(state)
    assert not shared(sharing.table)
    assert bool(sharing.table.eq(1).all())


@pytest.mark.filterwarnings("ignore:.torch.jit")  # deprecated, torch says
def test_a_buffer_of_a_script_becomes_private(sharing: Net, path: str) -> None:
    script = torch.jit.script(nn.BatchNorm1d(SIDE * SIDE))
    state = torch.load(path, map_location="cuda")
    script.register_buffer("running_mean", state["first.weight"].flatten())
    assert not shared(script.running_mean)
    assert torch.equal(script.running_mean, state["first.weight"].flatten())


def test_a_norm_that_is_limited_after_the_load(sharing: Net) -> None:
    embedding = nn.Embedding(SIDE, SIDE)
    embedding.weight = sharing.first.weight
    embedding.max_norm = 1.0
    plain = nn.Embedding(SIDE, SIDE, max_norm=1.0, _weight=sharing.first.weight.detach().clone())
    numbers = torch.tensor([[1, 2], [3, 1]])
    assert torch.equal(embedding(numbers), plain(numbers))
    table = sharing.second.weight.detach()
    bags = torch.nn.functional.embedding_bag(numbers, table, max_norm=1.0)
    assert float(bags.norm(dim=1).max()) <= 1.0 + 1e-5
    assert not any(shared(each) for each in sharing.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit")  # deprecated, and not for Python 3.14, torch says
@pytest.mark.parametrize(
    "translate", [torch.jit.script, lambda module: torch.compile(module, backend="eager")]
)
def test_an_embedding_can_be_translated(devices: Devices, translate: Any) -> None:
    translated = translate(nn.Embedding(4, 4, max_norm=1.0))
    assert translated(torch.tensor([1, 3])).shape == (2, 4)


def test_sending_to_another_process(sharing: Net) -> None:
    sent = []

    def original(storage: torch.UntypedStorage, *args: Any) -> str:
        sent.append(storage)
        return "handles"

    send = torch_unshare.POINTS[1].wrap(original)
    storage = sharing.first.weight.untyped_storage()
    assert send(storage) == "handles"
    assert not torch_device.lies_in_arena(sent[0])
    assert bytes(sent[0]) == bytes(storage)
    assert shared(sharing.first.weight), "what stays here stays shared"
    own = torch.ones(3).untyped_storage()
    send(own)
    assert sent[1] is own


class Graph:
    """A CUDA graph as far as the seams see it."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[Any] = []

    def capture_begin(self, pool: Any = None) -> str:
        self.seen += [pool, dict(device_arenas._process.captures)]
        if self.fails:
            raise RuntimeError("a capture is under way")
        return "begun"

    def capture_end(self) -> str:
        self.seen.append(dict(device_arenas._process.captures))
        if self.fails:
            raise RuntimeError("the capture failed")
        return "ended"


begin = torch_unshare.POINTS[2].wrap(Graph.capture_begin)
end = torch_unshare.POINTS[3].wrap(Graph.capture_end)


def test_nothing_is_unmapped_during_a_capture(devices: Devices, sharing: Net, path: str) -> None:
    graph = Graph()
    assert begin(graph, pool=3) == "begun"
    assert graph.seen[0] == 3
    assert list(graph.seen[1]) == [id(graph)]
    captures = device_arenas._process.captures
    assert list(captures) == [id(graph)]
    assert not device_arenas._synchronize(0)
    assert end(graph) == "ended"
    assert list(graph.seen[2]) == [id(graph)]
    assert not captures


def test_a_capture_that_fails_is_over(devices: Devices, sharing: Net) -> None:
    graph = Graph(fails=True)
    with pytest.raises(RuntimeError, match="under way"):
        begin(graph)
    assert graph.seen[1]
    assert not device_arenas._process.captures
    graph.fails = False
    begin(graph)
    graph.fails = True
    with pytest.raises(RuntimeError, match="the capture failed"):
        end(graph)
    assert not device_arenas._process.captures


def test_captures_of_programs_that_share_nothing(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also where what is imported anew at the end would stay.
    monkeypatch.setattr(trims_shim.client, "device_arenas", device_arenas)
    monkeypatch.delitem(sys.modules, "trims_shim.client.device_arenas")
    graph = Graph()
    assert (begin(graph), end(graph)) == ("begun", "ended")
    assert graph.seen == [None, {}, {}]
    assert "trims_shim.client.device_arenas" not in sys.modules


def test_both_ends_of_a_capture_are_seams() -> None:
    of_cuda = [f"torch.cuda.graphs:CUDAGraph.capture_{end}" for end in ("begin", "end")]
    of_any = [f"torch.accelerator.graphs:Graph.capture_{end}" for end in ("begin", "end")]
    assert [each.target for each in torch_unshare.POINTS[2:6]] == of_cuda + of_any
    for each in torch_unshare.POINTS[2 : 6 if "torch.accelerator.graphs" in sys.modules else 4]:
        assert callable(points.resolve(each.target).original)


def test_a_captured_graph_keeps_its_memory(
    devices: Devices, sharing: Net, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    graph = Graph()
    begin(graph, pool=3)
    end(graph)
    torch_unshare._warn_of_graphs.cache_clear()
    torch.optim.SGD(sharing.parameters(), lr=0.1)
    gc.collect()
    device_arenas.reap()
    assert devices.released == []
    assert [each.levelname for each in caplog.records if "CUDA graph" in each.message] == [
        "WARNING"
    ]
    net = Net()
    address = net.first.weight.data_ptr()
    net.load_state_dict(torch.load(path, map_location="cuda"))
    assert net.first.weight.data_ptr() == address


# --- the guards stay ------------------------------------------------------------------------------


def test_disabling_leaves_the_guards_while_they_are_needed(
    devices: Devices, sharing: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other_name = "torch_unshare", "torch_load"
    applied = points.apply(torch_unshare.POINTS[0])
    other = points.apply(torch_initializers.POINTS[0])
    with monkeypatch.context() as patched:
        patched.setattr(patches, "_applied", {name: [applied], other_name: [other]})
        patched.setattr(patches, "_requested", {name, other_name})
        patches.disable()
        assert applied.state is points.PatchState.APPLIED
        assert other.state is points.PatchState.UNDONE
        assert set(patches.applied()) == set(patches.requested()) == {name}
        patched.setattr(torch_device, "_holds", {})
        patches.disable()
        assert applied.state is points.PatchState.UNDONE
        assert set(patches.applied()) == set(patches.requested()) == set()


def test_load_state_dict_has_one_seam(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    (seam,) = (
        each for each in torch_module.POINTS if each.target.endswith(":Module.load_state_dict")
    )
    applied = points.AppliedPatch(seam, points.PatchState.APPLIED)
    probe = torch_unshare.POINTS[-1].probe
    with monkeypatch.context() as patched:
        patched.setattr(patches, "_applied", {"torch_module": [applied]})
        assert probe() == "torch_module does it"
        applied.state = points.PatchState.SKIPPED
        assert probe() is None
        patched.setattr(torch_device, "runtime", torch_device.CudaRuntime())
        patched.setattr(torch.version, "cuda", None)
        assert probe() == "this torch is built without CUDA"


def test_without_cuda_no_seam_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "runtime", torch_device.CudaRuntime())
    monkeypatch.setattr(torch.version, "cuda", None)
    for point in (*torch_unshare.POINTS, *torch_initializers.POINTS):
        assert point.probe() in ("this torch is built without CUDA", "torch_module does it")


def test_tensors_without_storage_are_passed_by(sharing: Net) -> None:
    odd = [torch.ones(2, 2).to_sparse(), torch.empty(3, device="meta"), None, 3, torch.empty(0)]
    torch_unshare.unshare(odd, "test")
    assert events("unshared:test") == 0
