"""Shap-E writes the network that it renders with; here it is shared. With the real library where it
is installed; the stand-in does with its network what diffusers 0.42 does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import devices as emulation
import pytest
import torch
from devices import shared
from torch import nn

from trims_shim.patches import diffusers_shap_e

SIDE = 256
NAME = "nerstf.mlp.1.weight"


class ShapERenderer(nn.Module):
    def __init__(self, *, param_names: Any, param_shapes: Any, d_latent: int) -> None:
        super().__init__()
        self.name = param_names[0]
        self.params_proj = nn.Linear(d_latent, SIDE)
        self.mlp = nn.Module()
        self.mlp.mlp = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(2))

    @torch.no_grad()
    def decode_to_image(self, latents: torch.Tensor, device: Any) -> torch.Tensor:
        projected = {self.name: self.params_proj(latents)}
        for name, param in self.mlp.state_dict().items():
            if f"nerstf.{name}" in projected:
                param.copy_(projected[f"nerstf.{name}"].squeeze(0))
        return torch.zeros(1).to(device)

    decode_to_mesh = decode_to_image


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    module = emulation.library(monkeypatch, "diffusers.pipelines.shap_e.renderer", ShapERenderer)
    points = *emulation.OF_LOADING, *diffusers_shap_e.POINTS
    with emulation.emulated(monkeypatch, *points):
        made = module.ShapERenderer(param_names=(NAME,), param_shapes=((SIDE, SIDE),), d_latent=8)
        torch.save(made.state_dict(), tmp_path / "renderer.pt")
        made.load_state_dict(torch.load(tmp_path / "renderer.pt", map_location="cuda"))
        assert shared(made.mlp.mlp[1].weight)
        yield made


@pytest.mark.parametrize("kind", ["decode_to_image", "decode_to_mesh"])
def test_latents_become_weights(renderer: Any, kind: str) -> None:
    latents = torch.randn(1, SIDE, 8)
    with torch.no_grad():
        projected = renderer.params_proj(latents)
    # The network is written before there is anything to render, which would take long.
    with pytest.raises(RuntimeError, match="nowhere"):
        getattr(renderer, kind)(latents, "nowhere")
    expected = projected[NAME] if isinstance(projected, dict) else projected
    assert torch.equal(renderer.mlp.mlp[1].weight, expected.squeeze(0))
    assert not shared(renderer.mlp.mlp[1].weight)
