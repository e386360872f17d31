"""Loaded tensors in threads, forked and spawned processes, queues and DataLoader workers."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from .forked import described_here, in_forked_child
from .payloads import net, saved, state
from .registry import Work, case, cases


@cases({"plain": {}, "mmap": {"mmap": True}}, served=True)
def child_uses_loaded_tensors(work: Work, options: dict[str, Any]) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())), **options)

    def use() -> object:
        loaded["bulk"][0] = 5
        loaded["weight"].zero_()
        return loaded

    child = in_forked_child(use)
    loaded["bias"].add_(1)
    return [child, loaded]


@case(served=True)
def child_loads_again(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    loaded = torch.load(path)
    child = in_forked_child(lambda: [loaded, torch.load(path), torch.load(path, mmap=True)])
    grandchild = in_forked_child(lambda: in_forked_child(lambda: [loaded, torch.load(path)]))
    return [child, grandchild, loaded, torch.load(path)]


@case()
def child_loads_first(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    return [in_forked_child(lambda: torch.load(path)), torch.load(path)]


@case(served=True)
def child_drops_the_tensors(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    loaded = torch.load(path)

    def drop() -> object:
        loaded.clear()
        return len(loaded)

    return [in_forked_child(drop), loaded, torch.load(path)]


@case(served=True)
def parent_drops_while_child_uses(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    loaded = torch.load(path)
    reading, writing = os.pipe()
    answer_reading, answer_writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(reading, 1)
            os.write(answer_writing, json.dumps(described_here(loaded)).encode())
        finally:
            os._exit(0)
    loaded.clear()
    again = torch.load(path)
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    return [json.loads(os.read(answer_reading, 1 << 20)), again]


def _child(path: str, argument: Any, queue: Any, back: Any) -> None:
    received = queue.get(timeout=50)
    received["weight"].add_(100)
    seen = described_here([argument, received, torch.load(path)])
    back.put([seen, os.path.basename(os.getcwd())])


@cases({"fork": "fork", "spawn": "spawn"}, served=True)
def process_gets_tensors(work: Work, method: str) -> object:
    """Through a queue tensors move to shared memory: the child's write is seen here."""
    context = mp.get_context(method)
    path = str(work.file("model.pt", saved(state())))
    argument, loaded = torch.load(path), torch.load(path)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_child, args=(path, argument, there, back))
    process.start()
    there.put(loaded)
    seen, _ = back.get(timeout=50)
    process.join(50)
    shared = {name: tensor.is_shared() for name, tensor in loaded.items()}
    return [seen, argument, loaded, shared, process.exitcode]


class Rows(Dataset):  # type: ignore[type-arg]
    """Rows of a loaded table, and a prediction of a loaded module."""

    def __init__(self, table: torch.Tensor, module: torch.nn.Module, path: str) -> None:
        self.table, self.module, self.path = table, module, path

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        torch.set_num_threads(1)
        with torch.no_grad():
            predicted = self.module(self.table[index : index + 1] / 1e6)
        return self.table[index], predicted, torch.load(self.path)["count"]


@cases({"none": 0, "two": 2}, served=True)
def data_loader(work: Work, workers: int) -> object:
    path = str(work.file("model.pt", saved(state())))
    module = net().eval()
    module.load_state_dict(torch.load(work.file("net.pt", saved(net(2).state_dict()))))
    table = torch.load(path)["bulk"].view(256, 320)
    rows = Rows(table.t(), module, path)
    return [list(DataLoader(rows, batch_size=2, num_workers=workers, timeout=min(workers, 1) * 50))]


@cases({"same_file": 1, "four_files": 4}, served=True)
def threads(work: Work, files: int) -> object:
    paths = [work.file(f"{n}.pt", saved(state(start=n))) for n in range(files)]

    def load(number: int) -> Any:
        loaded = torch.load(paths[number % files])
        loaded["weight"].add_(number)
        return loaded

    with ThreadPoolExecutor(4) as pool:
        loads = list(pool.map(load, range(16)))
    return [loads, [torch.load(path) for path in paths]]


@case(served=True)
def tensors_cross_threads(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    loaded: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: loaded.update(torch.load(path)))
    thread.start()
    thread.join()
    return [loaded, threading.active_count()]


@case(served=True)
def shared_before_fork(work: Work) -> object:
    loaded = torch.load(work.file("model.pt", saved(state())))
    loaded["weight"].share_memory_()

    def use() -> object:
        loaded["weight"].fill_(3)
        loaded["bias"].fill_(3)
        return None

    return [in_forked_child(use), loaded]
