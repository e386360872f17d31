"""optimizer.load_state_dict and training that resumes from a loaded checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # Optimizers import it at their first step: once here, not in each case.

from .payloads import Net, net, saved
from .registry import Work, attempt, case, cases

KINDS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw_amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def _step(module: Net, optimizer: Any) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 256) / 256).pow(2).sum().backward()
    optimizer.step()


def _checkpoint(make: Any) -> Any:
    def write(path: Path) -> None:
        module = net()
        optimizer = make(module.parameters())
        _step(module, optimizer)
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return write


@cases(KINDS, served=True)
def resumed(work: Work, make: Any) -> object:
    path = work.file("model.pt", _checkpoint(make))
    loaded = torch.load(path)
    module = net(2)
    optimizer = make(module.parameters())
    module.load_state_dict(loaded["module"])
    result = optimizer.load_state_dict(loaded["optimizer"])
    before = copy.deepcopy(optimizer.state_dict())
    _step(module, optimizer)
    return [result, before, module, optimizer.state_dict(), loaded, torch.load(path)]


@case(served=True)
def resumed_from_mapped_checkpoint(work: Work) -> object:
    path = work.file("model.pt", _checkpoint(KINDS["adam"]))
    module, loaded = net(2), torch.load(path, mmap=True)
    module.load_state_dict(loaded["module"], assign=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    optimizer.load_state_dict(loaded["optimizer"])
    _step(module, optimizer)
    return [module, loaded, torch.load(path)["module"]]


@case(served=True)
def optimizer_that_does_not_fit(work: Work) -> object:
    loaded = torch.load(work.file("model.pt", _checkpoint(KINDS["adam"])))["optimizer"]
    few = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    other = torch.optim.SGD(net(2).parameters(), lr=1.0)
    return [
        attempt(few.load_state_dict, loaded),
        attempt(other.load_state_dict, {}),
        attempt(other.load_state_dict, loaded),
    ]


@case(served=True)
def loaded_tensors_as_parameters(work: Work) -> object:
    """Parameters that are loaded tensors themselves: the step writes into them."""
    path = work.file("model.pt", saved(net()))
    module = torch.load(path, weights_only=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    _step(module, optimizer)
    return [module, torch.load(path, weights_only=False)]


@case(served=True)
def scheduler_and_scaler(work: Work) -> object:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    value = {"scheduler": scheduler.state_dict(), "module": module.state_dict()}
    loaded = torch.load(work.file("model.pt", saved(value)))
    scheduler.load_state_dict(loaded["scheduler"])
    return [loaded, scheduler.state_dict()]
