"""Checkpoints of real architectures with random weights, for benchmarks.

Owns the architectures (with the state dict names and shapes that torchvision and transformers give
them) and the checkpoint cache. Weights are random, because the cost of a load depends only on the
number, the sizes and the names of the tensors.

The cache is ``$TRIMS_BENCH_DIR``, else a directory of this user below the temp directory. A file in
it is used again if its size fits its architecture. The third format, "transformers", is a
safetensors file in a folder for ``from_pretrained``; it exists for GPT-2 only.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "ARCHITECTURES",
    "ENVELOPE_BYTES",
    "Checkpoint",
    "build",
    "cache_directory",
    "ensure_checkpoint",
    "state_bytes",
    "write_state",
]

ENVELOPE_BYTES = 1 << 20
"""Upper bound of a checkpoint's names, headers and padding."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint file and its contents."""

    architecture: str
    path: Path
    size_bytes: int
    tensors: int


class ResidualBlock(nn.Module):
    """A ResNet block: ``kernels`` is (3, 3), or (1, 3, 1) for the bottleneck kind."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, *, bottleneck: bool):
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        channels = [inputs, *[width] * (len(kernels) - 1), outputs]
        strided = 1 if bottleneck else 0
        for i, kernel in enumerate(kernels):
            step = stride if i == strided else 1
            conv = nn.Conv2d(
                channels[i], channels[i + 1], kernel, step, padding=kernel // 2, bias=False
            )
            setattr(self, f"conv{i + 1}", conv)
            setattr(self, f"bn{i + 1}", nn.BatchNorm2d(channels[i + 1]))
        self.depth = len(kernels)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, h, w]`` -> ``[batch, outputs, h / stride, w / stride]``."""
        identity = x if self.downsample is None else self.downsample(x)
        for i in range(1, self.depth + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x))
            x = F.relu(x) if i < self.depth else x
        return F.relu(x + identity)


class ResNet(nn.Module):
    """ResNet with torchvision's parameter names."""

    def __init__(self, depths: tuple[int, ...], *, bottleneck: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs, expansion = 64, 4 if bottleneck else 1
        for level, depth in enumerate(depths):
            width = 64 << level
            blocks = []
            for i in range(depth):
                stride = 2 if i == 0 and level > 0 else 1
                outputs = width * expansion
                blocks.append(ResidualBlock(inputs, width, outputs, stride, bottleneck=bottleneck))
                inputs = outputs
            setattr(self, f"layer{level + 1}", nn.Sequential(*blocks))
        self.levels = len(depths)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, h, w]`` -> ``[batch, 1000]``."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        for level in range(1, self.levels + 1):
            x = getattr(self, f"layer{level}")(x)
        logits: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class BertSelfAttention(nn.Module):
    """Query, key and value projections."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, hidden]`` -> the same shape."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.children())
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class BertOutput(nn.Module):
    """Projection, residual connection, normalisation."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both ``[batch, tokens, ...]`` -> ``[batch, tokens, hidden]``."""
        normed: torch.Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class BertLayer(nn.Module):
    """One encoder layer with the names of transformers' BertLayer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": BertSelfAttention(hidden, heads), "output": BertOutput(hidden, hidden)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, 4 * hidden)})
        self.output = BertOutput(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, hidden]`` -> the same shape."""
        x = self.attention["output"](self.attention["self"](x), x)
        out: torch.Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return out


class Bert(nn.Module):
    """BERT with the state dict of transformers' BertModel."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(30522, hidden),
                "position_embeddings": nn.Embedding(512, hidden),
                "token_type_embeddings": nn.Embedding(2, hidden),
                "LayerNorm": nn.LayerNorm(hidden, eps=1e-12),
            }
        )
        stack = nn.ModuleList(BertLayer(hidden, heads) for _ in range(layers))
        self.encoder = nn.ModuleDict({"layer": stack})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers ``[batch, tokens]`` -> pooled ``[batch, hidden]``."""
        embed = self.embeddings
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = embed["word_embeddings"](tokens) + embed["position_embeddings"](positions)
        x = embed["LayerNorm"](x + embed["token_type_embeddings"](torch.zeros_like(tokens)))
        for layer in self.encoder["layer"].children():
            x = layer(x)
        return torch.tanh(self.pooler["dense"](x[:, 0]))


class Conv1D(nn.Module):
    """GPT-2's linear layer; its weight is stored transposed, ``[inputs, outputs]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``."""
        return x @ self.weight + self.bias


class Gpt2Block(nn.Module):
    """One decoder layer with the names of transformers' GPT2Block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = nn.ModuleDict(
            {"c_attn": Conv1D(hidden, 3 * hidden), "c_proj": Conv1D(hidden, hidden)}
        )
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = nn.ModuleDict(
            {"c_fc": Conv1D(hidden, 4 * hidden), "c_proj": Conv1D(4 * hidden, hidden)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, hidden]`` -> the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.attn["c_proj"](mixed)
        wide = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        out: torch.Tensor = x + self.mlp["c_proj"](wide)
        return out


class Gpt2(nn.Module):
    """GPT-2 with the state dict of transformers' GPT2Model."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(50257, hidden)
        self.wpe = nn.Embedding(1024, hidden)
        self.h = nn.ModuleList(Gpt2Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers ``[batch, tokens]`` -> ``[batch, tokens, hidden]``."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        out: torch.Tensor = self.ln_f(x)
        return out


def _mobilenet() -> nn.Module:
    """MobileNet (Howard et al. 2017, table 1)."""
    plan = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    plan += [(512, 512, 1)] * 5 + [(512, 1024, 2), (1024, 1024, 1)]
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, padding=1, bias=False), nn.BatchNorm2d(32)]
    for inputs, outputs, stride in plan:
        depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        layers += [nn.ReLU(), depthwise, nn.BatchNorm2d(inputs), nn.ReLU()]
        layers += [nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*layers, *head)


def vgg16_features() -> list[nn.Module]:
    """The layers of VGG-16 before its classifier."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _vgg16() -> nn.Module:
    """VGG-16 with torchvision's parameter names."""
    model = nn.Sequential()
    model.features = nn.Sequential(*vgg16_features())
    model.avgpool = nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten())
    hidden = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()]
    hidden += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    model.classifier = nn.Sequential(*hidden, nn.Linear(4096, 1000))
    return model


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


_GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}
"""Layers, width and heads."""

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "tiny-100k": lambda: _perceptron(110),
    "tiny-1m": lambda: _perceptron(350),
    "mobilenet": _mobilenet,
    "resnet18": lambda: ResNet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: ResNet((3, 4, 6, 3), bottleneck=True),
    "bert-base": lambda: Bert(12, 768, 12),
    "gpt2": lambda: Gpt2(*_GPT2["gpt2"]),
    "vgg16": _vgg16,
    "bert-large": lambda: Bert(24, 1024, 16),
    "gpt2-medium": lambda: Gpt2(*_GPT2["gpt2-medium"]),
}
"""Smallest first. "tiny-*" are small perceptrons, whose files gain nothing from a cache."""


def build(architecture: str) -> nn.Module:
    """Make a model quickly, with every page written as after normal initialisation."""
    with torch.device("meta"):
        model = ARCHITECTURES[architecture]()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(1)
    return model


def state_bytes(architecture: str) -> tuple[int, int]:
    """(bytes, number) of the tensors in an architecture's state dict; allocates nothing."""
    with torch.device("meta"):
        state = ARCHITECTURES[architecture]().state_dict()
    return sum(tensor.nbytes for tensor in state.values()), len(state)


def ensure_checkpoint(architecture: str, file_format: str) -> Checkpoint:
    """Return the cached checkpoint of an architecture; write it if it is missing."""
    if file_format == "transformers":
        return _ensure_folder(architecture)
    expected, tensors = state_bytes(architecture)
    path = cache_directory() / f"{architecture}.{file_format}"
    size = path.stat().st_size if path.exists() else 0
    if not expected <= size <= expected * 1.2 + ENVELOPE_BYTES:
        write_state(_random_state(architecture), path)
    return Checkpoint(architecture, path, path.stat().st_size, tensors)


def _ensure_folder(architecture: str) -> Checkpoint:
    layers, width, heads = _GPT2[architecture]
    made = ensure_checkpoint(architecture, "safetensors")
    folder = made.path.with_suffix("")
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(made.path)
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads}
    (folder / "config.json").write_text(json.dumps(config))
    return replace(made, path=weights)


def cache_directory() -> Path:
    """The directory that keeps model files between runs; made if it is missing."""
    default = Path(tempfile.gettempdir()) / f"trims-bench-{os.getuid()}"
    directory = Path(os.environ.get("TRIMS_BENCH_DIR") or default)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def write_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a ``.pt`` or ``.safetensors`` file beside the target, then rename: an interrupted run
    leaves no half file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".pt":
            torch.save(state, partial)
        else:
            from safetensors.torch import save_file

            save_file(state, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped from the page cache later
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _random_state(architecture: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = build(architecture).state_dict()
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.uniform_(-0.05, 0.05, generator=generator)
    return state
