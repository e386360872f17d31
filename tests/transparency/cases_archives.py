"""torch.jit, torch.export, torch.package, distributed checkpoints: not served, and intact."""

from __future__ import annotations

import io
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


@cases({"plain": {}, "cpu": {"map_location": "cpu"}, "mmap": {"mmap": True}})
def jit_load(work: Work, options: dict[str, Any]) -> object:
    module = attempt(torch.jit.load, work.file("model.pt", _traced), **options)
    if isinstance(module, Exception):
        return module
    return [module(BATCH), module.state_dict(), module.code]


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


@case()
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


@case(timeout_s=120.0)
def export_load(work: Work) -> object:
    def write(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(net().eval(), (BATCH,)), path)

    path = work.file("model.pt2", write)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(path)
    return [program.module()(BATCH), program.state_dict, attempt(torch.load, path)]


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
            dcp.save(net().state_dict(), checkpoint_id=path, no_dist=True)

    def remove(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    remove(work.directory / "checkpoint")
    path = work.file("checkpoint", write)
    target = net(2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=path, no_dist=True)
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
