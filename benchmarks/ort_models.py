"""ONNX models of real architectures with random weights, for benchmarks of onnxruntime.

Owns the export (torch's own exporter, one file with the weights in it) and the files, which lie
beside the checkpoints of :mod:`benchmarks.models`. Nothing is downloaded, because the time to
create a session depends on the operators and the sizes and layout of the weights, not on their
values.

Transformers are exported for one text of a fixed length, convolutional networks for one picture.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import ARCHITECTURES, cache_directory

__all__ = ["MODELS", "ensure_model"]

_REVISION = 1
"""Part of the file's name. Raise it with each change below that alters the exported models."""
_TOKENS = 32
_PICTURE = (1, 3, 224, 224)


class InvertedResidual(nn.Module):
    """The block of MobileNetV2 (Sandler et al. 2018, figure 4)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [_convolution(inputs, width, 1)]
        layers.append(_convolution(width, width, 3, stride, groups=width))
        layers += [nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, h, w]`` -> ``[batch, outputs, h / stride, w / stride]``."""
        out: torch.Tensor = self.body(x)
        return x + out if self.is_residual else out


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    padding = (kernel - 1) // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


def _mobilenet_v2() -> nn.Module:
    # (expansion, channels, repeats, first stride) of table 2
    table = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)]
    table += [(6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    layers: list[nn.Module] = [_convolution(3, 32, 3, 2)]
    inputs = 32
    for expansion, outputs, repeats, stride in table:
        for number in range(repeats):
            step = stride if number == 0 else 1
            layers.append(InvertedResidual(inputs, outputs, step, expansion))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, _convolution(inputs, 1280, 1), *head)


class Encoder(nn.Module):
    """A BERT of transformers that takes token numbers and a mask."""

    def __init__(self, **sizes: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.model = BertModel(BertConfig(attn_implementation="eager", **sizes))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both ``[batch, tokens]`` -> ``[batch, tokens, hidden]`` and ``[batch, hidden]``."""
        made = self.model(input_ids=tokens, attention_mask=mask)
        return made.last_hidden_state, made.pooler_output


class Decoder(nn.Module):
    """A GPT-2 of transformers without a cache of keys and values."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Both ``[batch, tokens]`` -> logits ``[batch, tokens, vocabulary]``."""
        made = self.model(input_ids=tokens, attention_mask=mask, use_cache=False)
        logits: torch.Tensor = made.logits
        return logits


@dataclass(frozen=True, slots=True)
class _Export:
    """The maker of a model, and the example inputs that fix its shapes."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]


def _perceptron() -> nn.Module:
    width = 768
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def _text(length: int) -> Callable[[], dict[str, torch.Tensor]]:
    def inputs() -> dict[str, torch.Tensor]:
        whole = torch.ones(1, length, dtype=torch.long)
        return {"tokens": whole, "mask": whole.clone()}

    return inputs


def _numbers(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"x": torch.zeros(shape)}


MODELS: dict[str, _Export] = {
    "perceptron": _Export(_perceptron, _numbers(1, 768)),
    "mobilenetv2": _Export(_mobilenet_v2, _numbers(*_PICTURE)),
    "minilm": _Export(
        lambda: Encoder(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
        ),
        _text(_TOKENS),
    ),
    "resnet50": _Export(ARCHITECTURES["resnet50"], _numbers(*_PICTURE)),
    "bert-base": _Export(Encoder, _text(_TOKENS)),
    "gpt2": _Export(Decoder, _text(_TOKENS)),
}
"""Smallest first."""


def ensure_model(name: str) -> Path:
    """Return the cached ONNX file of a model; export it if missing (up to a minute)."""
    path = cache_directory() / f"{name}-{_REVISION}.onnx"
    if not path.exists():
        _export(MODELS[name], path)
    return path


def _export(export: _Export, path: Path) -> None:
    """Write beside the target and rename: an interrupted run leaves no half file."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = export.build().eval()
    inputs = export.inputs()
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    settings: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    try:
        torch.onnx.export(
            model, tuple(inputs.values()), partial, input_names=list(inputs), **settings
        )
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped from the page cache later
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
