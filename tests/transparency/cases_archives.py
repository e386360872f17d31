"""Served: torch.export, torch.jit. Not, and intact: torch.package, distributed checkpoints."""

from __future__ import annotations

import copy
import io
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from .payloads import Net, bulk, net, saved, state
from .registry import Work, attempt, case, cases

BATCH = torch.ones(2, 256)


def _traced(path: Path) -> None:
    torch.jit.save(torch.jit.trace(net().eval(), BATCH), path)


@cases({"plain": {}, "cpu": {"map_location": "cpu"}}, served=True)
def jit_load(work: Work, options: dict[str, Any]) -> object:
    module = attempt(torch.jit.load, work.file("model.pt", _traced), **options)
    wrong = attempt(torch.jit.load, work.directory / "model.pt", mmap=True)
    return [module(BATCH), module.state_dict(), module.code, str(module.graph), wrong]


@case(served=True)
def jit_used_after_load(work: Work) -> object:
    """Saved again, copied, frozen, trained, moved, in both modes of autograd."""
    path = work.file("model.pt", _traced)
    module = torch.jit.load(path)
    torch.jit.save(module, "again.pt")
    copied = copy.deepcopy(module)
    seen: list[Any] = [torch.jit.load("again.pt").state_dict(), copied(BATCH)]
    with torch.inference_mode():
        inferring = torch.jit.load(path)
        seen.append([inferring(BATCH), inferring.large.weight.is_inference()])
    frozen = torch.jit.freeze(torch.jit.load(path).eval())
    torch.jit.save(frozen, "frozen.pt")
    seen.append([frozen(BATCH), torch.jit.load("frozen.pt")(BATCH)])
    seen.append(attempt(torch.jit.optimize_for_inference, torch.jit.load(path).eval())(BATCH))
    loss = module.double()(BATCH.double()).sum()
    loss.backward()
    gradients = {name: each.grad for name, each in module.named_parameters()}
    module.load_state_dict(torch.jit.load(path).state_dict())
    return [seen, loss, gradients, module.state_dict(), copied.state_dict()]


@case()
def jit_load_from_file_object(work: Work) -> object:
    path = work.file("model.pt", _traced)
    with path.open("rb") as file:
        module = torch.jit.load(file)
        seen = [module(BATCH), file.tell()]
    return [seen, torch.jit.load(io.BytesIO(path.read_bytes()))(BATCH)]


@case()
def jit_load_refused(work: Work) -> object:
    path = work.file("model.pt", saved(state()))
    error = attempt(torch.jit.load, path)
    # The message carries a C++ back-trace: only its first line is stable.
    first = str(error).splitlines()[0]
    missing = attempt(torch.jit.load, "no-such-file")
    return [type(error).__name__, first, missing]


@case(served=True)
def jit_written_while_loaded(work: Work) -> object:
    path = work.fresh("model.pt", _traced)
    module = torch.jit.load(path)
    with torch.no_grad():
        module.large.weight.add_(1)
    path.unlink()
    return [module(BATCH), module.state_dict()]


@case(served=True)
def jit_save_of_loaded_weights(work: Work) -> object:
    module = net(2).eval()
    module.load_state_dict(torch.load(work.file("model.pt", saved(net().state_dict()))))
    torch.jit.save(torch.jit.trace(module, BATCH), "traced.pt")
    size = Path("traced.pt").stat().st_size // 4096
    return [size, torch.jit.load("traced.pt").state_dict()]


@case(served=True)
def script_module_loads_state_dict(work: Work) -> object:
    source = torch.load(work.file("model.pt", saved(net().state_dict())))
    module = torch.jit.trace(net(3).eval(), BATCH)
    result = module.load_state_dict(source)
    source["large.weight"].zero_()
    return [repr(result), module.state_dict(), module(BATCH)]


class _Exported(torch.nn.Module):
    """Layers, tied weights, buffers that overlap, half precision, a constant of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.tied = torch.nn.Linear(256, 256)
        self.tied.weight = self.net.large.weight
        both = torch.arange(512.0)
        self.register_buffer("low", both[:256])
        self.register_buffer("high", both[128:384])
        self.scale = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16), requires_grad=False)
        self.table = torch.arange(256.0)

    def forward(self, batch: torch.Tensor) -> list[torch.Tensor]:
        batch = (batch + self.low - self.high) * self.scale.float() + self.table
        return [self.net(batch), self.tied(batch)]


def _exported(path: Path) -> None:
    program = torch.export.export(_Exported().eval(), (BATCH,))
    torch.export.save(program, path, extra_files={"note.txt": "seen"})


def _export_loaded(source: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(source, **options)


@case(served=True)
def export_load(work: Work) -> object:
    """One case, because exporting takes seconds."""
    path = work.file("model.pt2", _exported)
    return [_export_by_path(path), _export_by_others(path), attempt(torch.load, path)]


def _export_by_path(path: Path) -> object:
    extra = {"note.txt": ""}
    program = _export_loaded(path, extra_files=extra)
    seen = [program.module()(BATCH), program.state_dict, program.constants, extra, str(program)]
    with torch.no_grad():
        program.state_dict["net.large.weight"].add_(1)
    written = program.module()(BATCH)
    again = _export_loaded(str(path))
    torch.export.save(again, "again.pt2")
    copied = copy.deepcopy(again.module())
    saved_again = _export_loaded("again.pt2").state_dict
    return [seen, written, again.module()(BATCH), copied(BATCH), saved_again]


def _export_by_others(path: Path) -> object:
    """File objects, bytes, and what is no such archive."""
    with path.open("rb") as file:
        seen = [_export_loaded(file).state_dict, file.tell()]
    seen.append(_export_loaded(io.BytesIO(path.read_bytes())).state_dict)
    Path("cut.pt2").write_bytes(path.read_bytes()[:-1000])
    torch.save(state(), "state.pt2")
    logging.disable()  # torch logs such errors with the number of the process
    for name in ("cut.pt2", "state.pt2", "no-such-file.pt2"):
        error = attempt(_export_loaded, name)
        # Messages carry C++ back-traces: only their first lines are stable.
        seen.append([type(error).__name__, str(error).splitlines()[0]])
    return seen


@case()
def package_importer(work: Work) -> object:
    def write(path: Path) -> None:
        with torch.package.PackageExporter(path) as exporter:
            exporter.save_pickle("data", "weights.pkl", {"weight": bulk()})

    importer = torch.package.PackageImporter(work.file("model.zip", write))
    return importer.load_pickle("data", "weights.pkl")


@case()
def distributed_checkpoint(work: Work) -> object:
    import torch.distributed.checkpoint as dcp

    def write(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(net().state_dict(), checkpoint_id=path)

    def remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    remove(work.directory / "checkpoint")
    path = work.file("checkpoint", write)
    target = net(2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=path)
    return target


@case(served=True)
def hub_style_url_loader(work: Work) -> object:
    path = work.file("model.pt", saved(net().state_dict()))
    folder = str(work.directory / "hub")
    shutil.rmtree(folder, ignore_errors=True)
    return [
        torch.hub.load_state_dict_from_url(path.as_uri(), folder, progress=False),
        torch.hub.load_state_dict_from_url(path.as_uri(), folder, map_location="cpu"),
        isinstance(net(), Net),
    ]
