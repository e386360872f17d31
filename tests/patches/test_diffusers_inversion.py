"""Tokens that diffusers adds to embeddings that are shared. With the real library where it is
installed; the stand-in writes as diffusers 0.42 does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import shared
from torch import nn

from trims_shim.patches import diffusers_inversion

SIDE = 256


class TextualInversionLoaderMixin:
    def load_textual_inversion(
        self, embedding: torch.Tensor, token: str, tokenizer: Any, text_encoder: Any
    ) -> None:
        self._check_text_inv_inputs(tokenizer, text_encoder, [embedding], [token])
        text_encoder.resize_token_embeddings(len(tokenizer) + 1)
        tokenizer.add_tokens(token)
        number = tokenizer.convert_tokens_to_ids(token)
        text_encoder.get_input_embeddings().weight.data[number] = embedding

    def _check_text_inv_inputs(
        self, tokenizer: Any, text_encoder: Any, sources: Any, tokens: Any
    ) -> None:
        if text_encoder is None:
            raise ValueError("requires a text_encoder")


class Tokenizer:
    """With room for one more."""

    def __init__(self) -> None:
        self.tokens = [str(number) for number in range(SIDE - 1)]

    def __len__(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> list[str]:
        return self.tokens

    def add_tokens(self, token: str) -> None:
        self.tokens.append(token)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.tokens.index(token)


class Encoder(nn.Module):
    """A text encoder, as far as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SIDE, SIDE)
        self.dense = nn.Linear(SIDE, SIDE)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def resize_token_embeddings(self, length: int) -> None:
        assert length == SIDE


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = emulation.library(
        monkeypatch, "diffusers.loaders.textual_inversion", TextualInversionLoaderMixin
    )
    points = *emulation.OF_LOADING, *diffusers_inversion.POINTS
    with emulation.emulated(monkeypatch, *points):
        loader = module.TextualInversionLoaderMixin()
        loader.hf_device_map, loader.components = None, {}
        yield loader


def test_a_token_for_which_there_is_room(loader: Any, tmp_path: Path) -> None:
    encoder = Encoder()
    torch.save(encoder.state_dict(), tmp_path / "model.pt")
    encoder.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cuda"))
    assert shared(encoder.tokens.weight)
    before, embedding = encoder.tokens.weight.detach().clone(), torch.randn(SIDE)
    loader.load_textual_inversion(
        embedding, token="<cat>", tokenizer=Tokenizer(), text_encoder=encoder
    )
    assert torch.equal(encoder.tokens.weight[-1], embedding)
    assert torch.equal(encoder.tokens.weight[:-1], before[:-1])
    assert shared(encoder.dense.weight)


def test_a_loader_without_an_encoder(loader: Any) -> None:
    with pytest.raises(ValueError, match="text_encoder"):
        loader.load_textual_inversion(
            torch.randn(SIDE), token="<cat>", tokenizer=Tokenizer(), text_encoder=None
        )
