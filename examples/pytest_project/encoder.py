"""The model under test: a multilingual text encoder, most of whose 205 MB are word vectors."""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

WORDS, WIDTH, DEPTH = 48_000, 1024, 2
CHECKPOINT = Path(tempfile.gettempdir()) / "trims-example-encoder.pt"


class Encoder(nn.Module):
    """Word numbers to one vector of WIDTH numbers between -1 and 1 for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """``[batch, words]`` -> ``[batch, WIDTH]``."""
        x = self.words(texts)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def load(path: Path) -> Encoder:
    """The encoder with its trained weights, as torch recommends it for large models."""
    with torch.device("meta"):
        encoder = Encoder()
    encoder.load_state_dict(torch.load(path), assign=True)
    return encoder.eval()


def write_checkpoint() -> None:
    """Stand-in for a training run."""
    if CHECKPOINT.exists():
        return
    torch.manual_seed(0)
    partial = CHECKPOINT.with_suffix(f".{os.getpid()}")
    torch.save(Encoder().state_dict(), partial)
    partial.rename(CHECKPOINT)
