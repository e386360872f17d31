"""The GPU benchmark's models: architectures, their inputs, and their checkpoints.

Owns the architectures that :mod:`benchmarks.models` lacks, and checkpoints with random weights that
keep activations finite, so that outputs can be compared. The scaled AlexNet and VGG-16 are those of
TrIMS (Dakkak et al. 2018, tables 3 and 4): the same layers over larger images, so that the first
fully connected layer grows (rai-project/trims-tools, large_models/). Weights are made on the device
that will use them: a processor needs half a minute for seven billion random numbers.

A checkpoint is used again as long as its size fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import ENVELOPE_BYTES, Bert, Gpt2, ResNet, vgg16_features, write_state

__all__ = ["SUBJECTS", "Subject", "checkpoint", "empty_model", "weights_bytes"]


@dataclass(frozen=True, slots=True)
class Subject:
    """One model: how it is made, and its input."""

    make: Callable[[], nn.Module]
    sample: Callable[[], torch.Tensor]
    dtype: torch.dtype = torch.float32


class Inception(nn.Module):
    """An inception module (Szegedy et al. 2014, figure 2b)."""

    def __init__(self, inputs: int, *, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pool = widths
        self.branch1 = nn.Conv2d(inputs, one, 1)
        self.branch3 = nn.Sequential(
            nn.Conv2d(inputs, reduce3, 1), nn.ReLU(), nn.Conv2d(reduce3, three, 3, padding=1)
        )
        self.branch5 = nn.Sequential(
            nn.Conv2d(inputs, reduce5, 1), nn.ReLU(), nn.Conv2d(reduce5, five, 5, padding=2)
        )
        self.branch_pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(inputs, pool, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, inputs, h, w]`` -> ``[batch, sum of the branches' widths, h, w]``."""
        return F.relu(torch.cat([branch(x) for branch in self.children()], dim=1))


def _googlenet() -> nn.Module:
    """GoogLeNet without its training heads (Szegedy et al. 2014, table 1): 27 MiB, as in TrIMS."""
    head = [nn.Conv2d(3, 64, 7, 2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    head += [nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU()]
    plan: list[tuple[int, tuple[int, int, int, int, int, int]] | None] = [
        None,
        (192, (64, 96, 128, 16, 32, 32)),
        (256, (128, 128, 192, 32, 96, 64)),
        None,
        (480, (192, 96, 208, 16, 48, 64)),
        (512, (160, 112, 224, 24, 64, 64)),
        (512, (128, 128, 256, 24, 64, 64)),
        (512, (112, 144, 288, 32, 64, 64)),
        (528, (256, 160, 320, 32, 128, 128)),
        None,
        (832, (256, 160, 320, 32, 128, 128)),
        (832, (384, 192, 384, 48, 128, 128)),
    ]
    body: list[nn.Module] = [
        nn.MaxPool2d(3, 2, ceil_mode=True) if step is None else Inception(step[0], widths=step[1])
        for step in plan
    ]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*head, *body, *tail)


def _classifier(inputs: int) -> list[nn.Module]:
    return [
        nn.Flatten(),
        nn.Linear(inputs, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    ]


def _alexnet(side: int) -> nn.Module:
    """AlexNet over images of ``side`` pixels: 227 is the original."""
    norm = (5, 1e-4, 0.75, 2.0)
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 11, 4), nn.ReLU()]
    layers += [nn.LocalResponseNorm(*norm), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(96, 256, 5, padding=2), nn.ReLU()]
    layers += [nn.LocalResponseNorm(*norm), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(384, 384, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)]
    edge = (side - 11) // 4 + 1
    for _ in range(3):
        edge = (edge - 3) // 2 + 1
    return nn.Sequential(*layers, *_classifier(256 * edge * edge))


def _vgg16(side: int) -> nn.Module:
    """VGG-16 over images of ``side`` pixels: 224 is the original."""
    return nn.Sequential(*vgg16_features(), *_classifier(512 * (side // 32) ** 2))


class VitBlock(nn.Module):
    """One encoder block (Dosovitskiy et al. 2020) with torchvision's parameter names."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(hidden, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, hidden]`` -> the same shape."""
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class Vit(nn.Module):
    """Vision transformer over images of 224 pixels in patches of 16."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, hidden, 16, 16)
        self.class_token = nn.Parameter(torch.empty(1, 1, hidden))
        self.pos_embedding = nn.Parameter(torch.empty(1, 197, hidden))
        self.layers = nn.Sequential(*(VitBlock(hidden, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, 224, 224]`` -> ``[batch, 1000]``."""
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1)
        out: torch.Tensor = self.head(self.ln(self.layers(x + self.pos_embedding))[:, 0])
        return out


class DecoderLayer(nn.Module):
    """One layer of a Llama-shaped decoder (Touvron et al. 2023), with transformers' names."""

    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(hidden, hidden, bias=False) for name in "qkvo"}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, wide, bias=False),
                "up_proj": nn.Linear(hidden, wide, bias=False),
                "down_proj": nn.Linear(wide, hidden, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, hidden]`` -> the same shape."""
        normed, attention = self.input_layernorm(x), self.self_attn
        q, k, v = (
            attention[f"{name}_proj"](normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + attention["o_proj"](mixed.transpose(1, 2).flatten(-2))
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        wide = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        out: torch.Tensor = x + mlp["down_proj"](wide)
        return out


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Apply the rotary position embedding, computed here so that checkpoints need no buffer."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Decoder(nn.Module):
    """A decoder with the shape of Llama; ``wide`` is the hidden size of its gated layers."""

    def __init__(self, layers: int, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32000, hidden)
        self.layers = nn.Sequential(*(DecoderLayer(hidden, heads, wide) for _ in range(layers)))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.lm_head = nn.Linear(hidden, 32000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers ``[batch, tokens]`` -> logits of the last one ``[batch, 32000]``."""
        hidden = self.norm(self.layers(self.embed_tokens(tokens)))
        logits: torch.Tensor = self.lm_head(hidden[:, -1])
        return logits


def _image(side: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.linspace(-1, 1, 3 * side * side).reshape(1, 3, side, side)


def _tokens() -> torch.Tensor:
    return (torch.arange(128) * 37 % 30000).reshape(1, 128)


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 10))


SUBJECTS: dict[str, Subject] = {
    "tiny": Subject(_tiny, _image(32)),
    "googlenet": Subject(_googlenet, _image(224)),
    "resnet50": Subject(lambda: ResNet((3, 4, 6, 3), bottleneck=True), _image(224)),
    "alexnet-227": Subject(lambda: _alexnet(227), _image(227)),
    "vit-b16": Subject(lambda: Vit(12, 768, 12), _image(224)),
    "bert-base": Subject(lambda: Bert(12, 768, 12), _tokens),
    "gpt2": Subject(lambda: Gpt2(12, 768, 12), _tokens),
    "vgg16-224": Subject(lambda: _vgg16(224), _image(224)),
    "alexnet-454": Subject(lambda: _alexnet(454), _image(454)),
    "bert-large": Subject(lambda: Bert(24, 1024, 16), _tokens),
    "vgg16-448": Subject(lambda: _vgg16(448), _image(448)),
    "alexnet-681": Subject(lambda: _alexnet(681), _image(681)),
    "alexnet-908": Subject(lambda: _alexnet(908), _image(908)),
    "vgg16-672": Subject(lambda: _vgg16(672), _image(672)),
    "vgg16-896": Subject(lambda: _vgg16(896), _image(896)),
    "decoder-7b": Subject(lambda: Decoder(32, 4096, 32, 11008), _tokens, torch.bfloat16),
}
"""Smallest first; "tiny" is for trial runs."""


def empty_model(name: str, device: str) -> nn.Module:
    """A model in evaluation mode with uninitialised weights; ``meta`` allocates nothing."""
    with torch.device("meta"):
        model = SUBJECTS[name].make()
    model = model.to(SUBJECTS[name].dtype).eval()
    return model if device == "meta" else model.to_empty(device=device)


def weights_bytes(name: str) -> int:
    """Bytes of the tensors in an architecture's state dict."""
    return sum(tensor.nbytes for tensor in empty_model(name, "meta").state_dict().values())


def checkpoint(name: str, file_format: str, directory: Path, *, device: str) -> Path:
    """A checkpoint in ``pt`` or ``safetensors``; it is written if it is missing."""
    path = directory / f"{name}.{file_format}"
    expected = weights_bytes(name)
    size = path.stat().st_size if path.exists() else 0
    if not expected <= size <= expected * 1.01 + ENVELOPE_BYTES:
        write_state(_random_state(name, device), path)
    return path


def _random_state(name: str, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for key, like in empty_model(name, "meta").state_dict().items():
        values = torch.zeros(like.shape, dtype=like.dtype, device=device)
        if like.is_floating_point():
            values.uniform_(-1, 1, generator=generator)
            _scale(key, values)
        state[key] = values.cpu()
    return state


def _scale(key: str, values: torch.Tensor) -> None:
    """Keep activations of any depth finite: unit gain for matrices, near one for scales."""
    if key.endswith("running_var") or (values.dim() == 1 and key.endswith("weight")):
        values.mul_(0.05).add_(1)
    elif values.dim() < 2:
        values.mul_(0.05)
    else:
        values.mul_((3 / values[0].numel()) ** 0.5)
