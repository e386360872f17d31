"""What unmodified programs do with weights on a device: ``python -m tests.gpu.cases serve {} FD``.

Each case is a function of a directory of model files; it loads weights, uses them, and returns what
a program would see, as JSON. The same function runs with the shim and without, each time in a
process of its own (:mod:`benchmarks.forking`); the answers have to be equal. ``_shared`` adds what
only concerns the run with the shim: the share of the weights that torch's allocator does not hold.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.forking import serve

__all__ = ["CASES", "make_files"]

Result = dict[str, Any]
CASES: dict[str, Callable[[str], Result]] = {}
WIDTH = 1024
LOADS_OF_CONVERTED = 4
"""The first two convert, the second has the image made, and the third may wait for that."""


def case(function: Callable[[str], Result]) -> Callable[[str], Result]:
    """One program; the test finds it by this decorator, without importing torch."""
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    """Convolutions, normalisation with buffers, and matrices: 28 MB.

    The first convolution is smaller than what is shared, the second one is larger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.wide = nn.Conv2d(64, 256, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, h, w]`` -> ``[batch, 100]``."""
        x = self.pool(self.wide(self.norm(self.conv(x)).relu())).flatten(1)
        out: torch.Tensor = self.head(self.layers(x))
        return out


def make_files(directory: str) -> None:
    """All files that cases load; runs without the shim."""
    import torch.distributed.checkpoint as checkpoints
    from safetensors.torch import save_file

    torch.manual_seed(0)
    net = Net()
    net(torch.randn(4, 3, 32, 32))
    state = net.state_dict()
    torch.save(state, _path(directory, "state.pt"))
    save_file(state, _path(directory, "state.safetensors"))
    torch.save({k: v.cuda() for k, v in state.items()}, _path(directory, "from_cuda.pt"))
    torch.save({k: v.bfloat16() for k, v in state.items()}, _path(directory, "bfloat16.pt"))
    tied = torch.randn(WIDTH, WIDTH)
    aliases = {"a": tied, "b": tied, "row": tied[3], "transposed": tied.t()}
    torch.save(aliases, _path(directory, "aliases.pt"))
    torch.save(_recurrent().state_dict(), _path(directory, "recurrent.pt"))
    training = {"model": state, "optimizer": torch.optim.SGD(net.parameters()).state_dict()}
    torch.save(training, _path(directory, "training.pt"))
    torch.save({0: {"factors": [tied, tied + 1]}}, _path(directory, "factors.pt"))
    parts = {name: each + 1 for name, each in state.items()}
    checkpoints.save(parts, checkpoint_id=_path(directory, "checkpoint"))


def _recurrent(**where: Any) -> nn.LSTM:
    """Of 14 MB."""
    return nn.LSTM(256, 512, num_layers=2, **where)


def _path(directory: str, name: str) -> str:
    return os.path.join(directory, name)


def _sample() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32).cuda()


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def _seen(state: dict[str, torch.Tensor]) -> Result:
    """Everything about tensors that a program can observe, but where they are."""
    return {
        name: [
            _digest(t),
            str(t.dtype),
            list(t.shape),
            list(t.stride()),
            str(t.device),
            t.requires_grad,
            type(t).__name__,
        ]
        for name, t in state.items()
    }


def _share(tensors: Iterable[torch.Tensor]) -> float:
    ranges = [(t.data_ptr(), t.nbytes) for t in tensors if t.is_cuda]
    owned = [(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot()]
    private = sum(n for p, n in ranges if any(low <= p < low + size for low, size in owned))
    return 1 - private / max(1, sum(n for _, n in ranges))


def _loaded(state: dict[str, torch.Tensor]) -> Result:
    return {"seen": _seen(state), "_shared": _share(state.values())}


def _net(state: dict[str, torch.Tensor]) -> Net:
    net = Net().cuda().eval()
    net.load_state_dict(state)
    return net


# --- loads ----------------------------------------------------------------------------------------


@case
def load_with_a_string(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "state.pt"), map_location="cuda"))


@case
def load_with_an_index(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "state.pt"), map_location="cuda:0"))


@case
def load_with_a_device(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "state.pt"), map_location=torch.device("cuda")))


@case
def load_with_a_mapping(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "state.pt"), map_location={"cpu": "cuda:0"}))


@case
def load_with_a_function(directory: str) -> Result:
    path = _path(directory, "state.pt")
    return _loaded(torch.load(path, map_location=lambda storage, _: storage.cuda()))


@case
def load_what_was_saved_on_cuda(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "from_cuda.pt")))


@case
def load_what_was_saved_on_cuda_to_the_cpu(directory: str) -> Result:
    state = torch.load(_path(directory, "from_cuda.pt"), map_location="cpu")
    return {"seen": _seen(state)}


@case
def load_with_a_default_device(directory: str) -> Result:
    torch.set_default_device("cuda")
    state = torch.load(_path(directory, "state.pt"))
    return {"seen": _seen(state)}


@case
def load_mapped(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "state.pt"), map_location="cuda", mmap=True))


@case
def load_bfloat16(directory: str) -> Result:
    return _loaded(torch.load(_path(directory, "bfloat16.pt"), map_location="cuda"))


@case
def load_aliases(directory: str) -> Result:
    state = torch.load(_path(directory, "aliases.pt"), map_location="cuda")
    pointers = {name: t.untyped_storage().data_ptr() for name, t in state.items()}
    return _loaded(state) | {"aliases": len(set(pointers.values()))}


@case
def load_safetensors(directory: str) -> Result:
    from safetensors.torch import load_file

    return _loaded(load_file(_path(directory, "state.safetensors"), device="cuda"))


@case
def load_safetensors_by_index(directory: str) -> Result:
    from safetensors import safe_open

    with safe_open(_path(directory, "state.safetensors"), "pt", device=0) as file:
        return _loaded({name: file.get_tensor(name) for name in sorted(file.keys())})


@case
def load_on_another_stream(directory: str) -> Result:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state = torch.load(_path(directory, "state.pt"), map_location="cuda")
        product = state["layers.0.weight"] @ state["layers.1.weight"]
    stream.synchronize()
    return _loaded(state) | {"product": _digest(product)}


# --- modules --------------------------------------------------------------------------------------


@case
def load_into_a_module(directory: str) -> Result:
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    output = net(_sample())
    shared = _share(net.parameters())
    return {"seen": _seen(net.state_dict()), "output": _digest(output), "_shared": shared}


@case
def move_a_module(directory: str) -> Result:
    net = Net().eval()
    net.load_state_dict(torch.load(_path(directory, "state.pt")))
    net = net.to("cuda")
    output = net(_sample())
    shared = _share(net.parameters())
    return {"seen": _seen(net.state_dict()), "output": _digest(output), "_shared": shared}


@case
def move_an_assigned_module(directory: str) -> Result:
    with torch.device("meta"):
        net = Net().eval()
    net.load_state_dict(torch.load(_path(directory, "state.pt"), mmap=True), assign=True)
    net.cuda()
    shared = _share(net.parameters())
    return {"seen": _seen(net.state_dict()), "output": _digest(net(_sample())), "_shared": shared}


@case
def move_and_convert_a_module(directory: str) -> Result:
    net = Net().eval()
    net.load_state_dict(torch.load(_path(directory, "state.pt")))
    net.to("cuda", torch.float16)
    return {"seen": _seen(net.state_dict()), "output": _digest(net(_sample().half()))}


def _converted(directory: str, convert: Callable[[Net], Net]) -> Result:
    """Of the load that finds the numbers converted: the first two convert them."""
    from safetensors.torch import load_file

    for _ in range(LOADS_OF_CONVERTED):
        net = Net().eval()
        net.load_state_dict(load_file(_path(directory, "state.safetensors")), assign=True)
        net = convert(net)
        output = net(_sample().to(net.head.weight.dtype))
    shared = _share(net.parameters())
    return {"seen": _seen(net.state_dict()), "output": _digest(output), "_shared": shared}


@case
def convert_then_move(directory: str) -> Result:
    return _converted(directory, lambda net: net.half().cuda())


@case
def convert_and_move_at_once(directory: str) -> Result:
    return _converted(directory, lambda net: net.to("cuda", torch.bfloat16))


@case
def buffers_are_private(directory: str) -> Result:
    """A module in training mode writes its running statistics and counters."""
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda")).train()
    with torch.no_grad():
        outputs = [_digest(net(_sample())) for _ in range(3)]
    return {"outputs": outputs, "buffers": _seen(dict(net.named_buffers()))}


@case
def training_writes_privately(directory: str) -> Result:
    """An optimizer takes the parameters; the file and the shared memory stay as they were."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        net(_sample()).square().mean().backward()
        optimizer.step()
    again = torch.load(_path(directory, "state.pt"), map_location="cuda")
    largest = max(float((p.detach() - again[n]).abs().max()) for n, p in net.named_parameters())
    return {"has_moved": largest > 1e-3, "again": _seen(again)}


@case
def embeddings_write_privately(directory: str) -> Result:
    """Their norm is limited after the load; a module gets a loaded tensor as its buffer."""
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    embedding = nn.Embedding.from_pretrained(state["layers.0.weight"])
    embedding.max_norm = 0.5
    rows = embedding(torch.arange(8, device="cuda"))
    embedding.register_buffer("table", state["layers.1.weight"])
    embedding.table.mul_(2)
    again = torch.load(_path(directory, "state.pt"), map_location="cuda")
    return {"rows": _digest(rows), "table": _digest(embedding.table), "again": _seen(again)}


@case
def others_write_privately(directory: str) -> Result:
    """Initialisers, averaged models and DistributedDataParallel write parameters in place."""
    import torch.distributed as distributed
    from torch.optim.swa_utils import AveragedModel

    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    net = _net(state)
    nn.init.constant_(net.layers[0].weight, 0.5)
    averaged = AveragedModel(net)
    averaged.module.load_state_dict(state)
    for _ in range(2):
        averaged.update_parameters(net)
    store, alone = distributed.HashStore(), {"rank": 0, "world_size": 1}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", store=store, **alone)
    parallel = nn.parallel.DistributedDataParallel(_net(state))
    output = parallel(_sample())
    distributed.destroy_process_group()
    again = torch.load(_path(directory, "state.pt"), map_location="cuda")
    return {
        "initialised": _digest(net.layers[0].weight),
        "averaged": _seen(averaged.module.state_dict()),
        "parallel": _digest(output),
        "again": _seen(again),
        "_shared": _share([net.layers[1].weight]),
    }


@case
def what_is_resumed_is_private(directory: str) -> Result:
    """A model that a checkpoint is read into, a teacher, and lists in an optimizer's state."""
    import torch.distributed.checkpoint as checkpoints

    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    checkpoints.load(net.state_dict(), checkpoint_id=_path(directory, "checkpoint"))
    teacher = _net(torch.load(_path(directory, "training.pt"), map_location="cpu")["model"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    factors = torch.load(_path(directory, "factors.pt"), map_location="cuda")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": factors})
    kept = optimizer.state[net.conv.weight]["factors"]
    with torch.no_grad():
        for each in (*teacher.parameters(), *kept):
            each.mul_(0.5)
    return {
        "net": _seen(net.state_dict()),
        "teacher": _seen(teacher.state_dict()),
        "factors": [_digest(each) for each in kept],
    }


@case
def merge_adapters_layer_by_layer(directory: str) -> Result:
    """As diffusers does."""
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(0)
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    config = peft.LoraConfig(target_modules=["layers.0", "layers.1"])
    model = peft.get_peft_model(net, config)
    weights = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    with torch.no_grad():
        for each in weights:
            each.lora_B["default"].weight.add_(0.125)
            each.merge()
            each.unmerge()
            each.merge()
    return {
        "merged": len(weights),
        "output": _digest(model(_sample())),
        "_shared": _share([net.head.weight]),
    }


@case
def copies_may_be_written(directory: str) -> Result:
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    weight = state["layers.0.weight"]
    clone = weight.clone().add_(1)
    half = weight.half().mul_(2)
    return {"clone": _digest(clone), "half": _digest(half), "weight": _digest(weight)}


# --- what programs do with loaded tensors ---------------------------------------------------------


@case
def save_again(directory: str) -> Result:
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    path = _path(directory, f"again-{os.getpid()}.pt")
    torch.save(state, path)
    size = os.stat(path).st_size
    back = torch.load(path, map_location="cpu")
    os.unlink(path)
    return {"size_bytes": size, "seen": _seen(back)}


@case
def copy_deeply(directory: str) -> Result:
    from copy import deepcopy

    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    twin = deepcopy(net)
    with torch.no_grad():
        twin.head.weight.add_(1)
    return {"net": _digest(net.head.weight), "twin": _digest(twin.head.weight)}


@case
def pickle_it(directory: str) -> Result:
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    return {"seen": _seen(pickle.loads(pickle.dumps(state)))}


@case
def export_by_dlpack(directory: str) -> Result:
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    return {"seen": _seen({"weight": torch.from_dlpack(state["layers.0.weight"])})}


@case
def move_to_the_cpu(directory: str) -> Result:
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    return {"seen": _seen(net.cpu().state_dict())}


@case
def drop_and_load_again(directory: str) -> Result:
    digests = []
    for _ in range(5):
        state = torch.load(_path(directory, "state.pt"), map_location="cuda")
        digests.append(_digest(state["layers.5.weight"]))
        del state
    return {"digests": digests}


# --- what runs on the weights ---------------------------------------------------------------------


@case
def cublas(directory: str) -> Result:
    results = {}
    for name, kind in (("state.pt", torch.float32), ("bfloat16.pt", torch.bfloat16)):
        state = torch.load(_path(directory, name), map_location="cuda")
        x = torch.linspace(-1, 1, 8 * WIDTH, device="cuda").reshape(8, WIDTH).to(kind)
        weight, bias = state["layers.0.weight"], state["layers.0.bias"]
        results[name] = [
            _digest(x @ weight),
            _digest(nn.functional.linear(x, weight, bias)),
            _digest(torch.addmm(bias, x, weight.t())),
            _digest(torch.bmm(x[None], weight[None])),
            _share([weight]),
        ]
    shared = min(each.pop() for each in results.values())
    return {"results": results, "_shared": shared}


@case
def cudnn(directory: str) -> Result:
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    weight, bias = state["wide.weight"], state["wide.bias"]
    image = torch.linspace(-1, 1, 4 * 64 * 32 * 32, device="cuda").reshape(4, 64, 32, 32)
    output = nn.functional.conv2d(image, weight, bias)
    # Tuning times the algorithms, and may choose another one in each process.
    torch.backends.cudnn.benchmark = True
    tuned = nn.functional.conv2d(image, weight, bias)
    is_close = bool(torch.allclose(output, tuned, rtol=1e-2, atol=1e-2))
    has_cudnn = torch.backends.cudnn.is_available()
    seen = {"output": _digest(output), "is_close": is_close, "has_cudnn": has_cudnn}
    return seen | {"_shared": _share([weight])}


@case
def cudnn_moves_recurrent_weights(directory: str) -> Result:
    """It wants them in one piece of memory, copies them there, and puts the parameters on it."""
    # Before cuBLAS starts. Otherwise its streams may add in another order in each process (docs of
    # torch.nn.LSTM).
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:2"
    path = _path(directory, "recurrent.pt")
    x = torch.linspace(-1, 1, 8 * 4 * 256, device="cuda").reshape(8, 4, 256)
    assigned, loaded, moved = _recurrent(device="meta"), _recurrent(device="cuda"), _recurrent()
    assigned.load_state_dict(torch.load(path, map_location="cuda"), assign=True)
    shared = _share(assigned.parameters())
    loaded.load_state_dict(torch.load(path, map_location="cuda"))
    moved.load_state_dict(torch.load(path))
    moved.to("cuda")
    with torch.no_grad():
        outputs = [_digest(each(x)[0]) for each in (assigned, loaded, moved)]
        assigned.flatten_parameters()
        outputs.append(_digest(assigned(x)[0]))
        assigned.bias_hh_l0.add_(1)
    weights = [_seen(each.state_dict()) for each in (assigned, loaded, moved)]
    again = _seen(torch.load(path, map_location="cuda"))
    return {"outputs": outputs, "weights": weights, "again": again, "_shared": shared}


@case
def cuda_graph(directory: str) -> Result:
    """Capture, replay, and load another model between replays."""
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    static, stream = _sample(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            net(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = net(static)
        replayed = []
        for factor in (1.0, 2.0):
            static.copy_(_sample() * factor)
            graph.replay()
            replayed.append(_digest(output))
            other = torch.load(_path(directory, "bfloat16.pt"), map_location="cuda")
            del other
        graph.replay()
        replayed.append(_digest(output))
    return {"replayed": replayed, "_shared": _share(net.parameters())}


@case
def load_while_a_graph_is_captured(directory: str) -> Result:
    """Dropping and loading in another thread must not spoil a capture."""
    import threading

    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    static, stop, failures = _sample(), threading.Event(), []

    def drop_in_a_loop() -> None:
        import gc

        while not stop.is_set():
            try:
                held = torch.load(_path(directory, "aliases.pt"), map_location="cpu")
                del held
                gc.collect()
            except Exception as error:
                failures.append(repr(error))
                return

    other = torch.load(_path(directory, "bfloat16.pt"), map_location="cuda")
    with torch.no_grad():
        for _ in range(3):
            net(static)
        torch.cuda.synchronize()
        thread = threading.Thread(target=drop_in_a_loop)
        thread.start()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = net(static)
            del other
        stop.set()
        thread.join(30)
        graph.replay()
    return {"output": _digest(output), "failures": failures}


@case
def triton_kernel(directory: str) -> Result:
    from tests.gpu import triton_kernels

    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    weight = state["layers.0.weight"]
    return {"sum": triton_kernels.scaled(weight, 2.0), "_shared": _share([weight])}


@case
def attention(directory: str) -> Result:
    state = torch.load(_path(directory, "bfloat16.pt"), map_location="cuda")
    heads = state["layers.0.weight"].reshape(1, 16, 1024, 64)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return {"mixed": _digest(mixed), "_shared": _share([heads])}


@case
def many_threads(directory: str) -> Result:
    from concurrent.futures import ThreadPoolExecutor

    def load(_: int) -> str:
        state = torch.load(_path(directory, "state.pt"), map_location="cuda")
        return _digest(state["layers.2.weight"])

    with ThreadPoolExecutor(8) as pool:
        return {"digests": sorted(set(pool.map(load, range(16))))}


# --- slow ones, last ------------------------------------------------------------------------------


@case
def transformers_from_pretrained(directory: str) -> Result:
    from transformers import BertModel

    return _bert_run(BertModel.from_pretrained(_bert(directory), device_map="cuda"))


@case
def transformers_in_another_dtype(directory: str) -> Result:
    from transformers import BertModel

    options: dict[str, Any] = {"dtype": torch.float16, "device_map": "cuda"}
    for _ in range(LOADS_OF_CONVERTED):
        model = BertModel.from_pretrained(_bert(directory), **options)
    return _bert_run(model) | {"_shared": _share(model.parameters())}


@case
def transformers_experts(directory: str) -> Result:
    """Their stacks are nearly all of the model: the rest of it is copied."""
    from transformers import MixtralConfig, MixtralForCausalLM

    where = _path(directory, "mixtral")
    if not os.path.exists(where):
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=16,
        )
        MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(where + f"-{os.getpid()}")
        os.rename(where + f"-{os.getpid()}", where)
    for _ in range(LOADS_OF_CONVERTED):
        model = MixtralForCausalLM.from_pretrained(where, device_map="cuda")
    output = model.eval()(torch.arange(32, device="cuda").reshape(1, 32)).logits
    shared = _share(model.parameters())
    return {"seen": _seen(model.state_dict()), "output": _digest(output), "_shared": shared}


def _bert(directory: str) -> str:
    """A folder with a model of 39 MB."""
    from transformers import BertConfig, BertModel

    where = _path(directory, "bert")
    if not os.path.exists(where):
        torch.manual_seed(0)
        config = BertConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
        BertModel(config).save_pretrained(where + f"-{os.getpid()}")
        os.rename(where + f"-{os.getpid()}", where)
    return where


def _bert_run(model: Any) -> Result:
    tokens = torch.arange(32, device="cuda").reshape(1, 32)
    output = model.eval()(tokens).last_hidden_state
    return {"seen": _seen(model.state_dict()), "output": _digest(output)}


def _child(queue: Any, tensor: torch.Tensor) -> None:
    queue.put(_digest(tensor))


@case
def send_by_multiprocessing(directory: str) -> Result:
    """Equal digests where torch can send it; without the shim it always can."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    state = torch.load(_path(directory, "state.pt"), map_location="cuda")
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(queue, state["layers.0.weight"]))
    process.start()
    process.join(60)
    return {"status": process.exitcode, "digest": queue.get() if not process.exitcode else ""}


@case
def torch_compile(directory: str) -> Result:
    net = _net(torch.load(_path(directory, "state.pt"), map_location="cuda"))
    with torch.no_grad():
        expected = net(_sample())
        compiled = torch.compile(net)(_sample())
    is_close = bool(torch.allclose(expected, compiled, rtol=1e-2, atol=1e-2))
    return {"is_close": is_close, "_shared": _share(net.parameters())}


# --- process --------------------------------------------------------------------------------------


def run(*, name: str, directory: str) -> Result:
    """One case, with what the shim counted where it is on."""
    result = CASES[name](directory)
    if os.environ.get("TRIMS_ENABLED") == "1":
        import trims_shim

        result["_events"] = trims_shim.stats().events
    return result


def handles(*, directory: str) -> Result:
    """The public handle of an image on the device; what is promised of it, each true or not."""
    from safetensors.torch import load_file

    import trims_shim

    path, name = _path(directory, "state.safetensors"), "layers.0.weight"
    expected = load_file(path, device="cpu")
    found: Result = {}
    with trims_shim.open(path, device="cuda") as handle:
        found["equal"] = all(torch.equal(handle.torch(n).cpu(), t) for n, t in expected.items())
        weight = handle.torch(name)
        found["cupy"] = _is_equal_by_cupy(handle, name, expected[name])
    found["shared"] = _share([weight]) == 1
    found["alive_after_close"] = torch.equal(weight.cpu(), expected[name])
    with trims_shim.open(path, device="cuda", access="private") as handle:
        mine = handle.torch(name).add_(1)
    found["private"] = torch.equal(mine.cpu(), expected[name] + 1)
    found["untouched"] = torch.equal(weight.cpu(), expected[name])
    return found


def _is_equal_by_cupy(handle: Any, name: str, expected: torch.Tensor) -> bool | None:
    """None where CuPy is not installed."""
    try:
        import cupy
    except ImportError:
        return None
    return bool((cupy.asnumpy(handle.as_cupy(name)) == expected.numpy()).all())


def files(*, directory: str) -> Result:
    """Write the files."""
    make_files(directory)
    return {}


if __name__ == "__main__":
    if os.environ.get("TRIMS_ENABLED") == "1":
        import trims_shim  # noqa: F401
    serve({"run": run, "handles": handles, "files": files}, int(sys.argv[3]))
