"""TorchScript modules to save: each kind of attribute that may hold a tensor."""

from __future__ import annotations

import io
import warnings
from typing import Any, Dict, List, Optional  # noqa: UP035 - TorchScript knows no others

import torch

__all__ = ["BATCH", "SHARED", "Model", "Restoring", "load", "saved"]

BATCH = torch.ones(2, 64)
SHARED = ("inner.weight", "inner.table", "again.weight", "tied", "coarse", "spread", "square")
"""Attributes of :class:`Model` whose memory can be the cache's."""


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.register_buffer("table", torch.arange(1024, dtype=torch.float64))
        self.bias: Optional[torch.Tensor] = torch.randn(64)  # noqa: UP045

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen = batch @ self.weight + self.table[:64].float()
        bias = self.bias
        return seen if bias is None else seen + bias


class Model(torch.nn.Module):
    """Ties, one module twice, views of one storage, tensors in containers, half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Inner()
        self.again = self.inner
        self.tied = self.inner.weight
        self.listed: List[torch.Tensor] = [torch.randn(2048), self.inner.weight]  # noqa: UP006
        self.named: Dict[str, torch.Tensor] = {"a": torch.randn(2048)}  # noqa: UP006
        self.coarse = torch.nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False)
        both = torch.randn(4096)
        self.register_buffer("low", both[:2048])
        self.register_buffer("high", both[2048:])
        self.spread = torch.nn.Parameter(torch.randn(64, 64).t())
        # Of 256 rows and 65536 elements, which need one more byte than one less.
        self.register_buffer("square", torch.randn(256, 256))
        self.count = 7
        self.shape = (64, 64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen = self.inner(batch) @ self.tied + self.coarse.float()[0] + self.low[:64]
        seen = seen + self.high[:64] + self.spread[0] + self.listed[0][:64]
        return (seen + self.named["a"][: self.shape[0]]) * self.count


class Restored(torch.nn.Module):
    """Looks at its weight when it is loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.total = 0.0

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        return {"weight": self.weight}

    @torch.jit.export
    def __setstate__(self, state):  # type: ignore[no-untyped-def]
        # type: (Dict[str, Tensor]) -> None
        self.weight = state["weight"]
        self.total = float(self.weight.sum())
        self.training = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.weight + self.total


class Restoring(torch.nn.Module):
    """The weight that one of its modules looks at is its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(64, 64)
        self.inner = Restored(self.weight)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.inner(batch)
        return seen @ self.weight


def saved(model: torch.nn.Module, **extra_files: str) -> bytes:
    """The archive of ``torch.jit.save``, from scripting unless it is a script already."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), content, _extra_files=extra_files)
    return content.getvalue()


def load(source: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(source, **options)
