"""RWKV writes its weights when it is used; here they are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import devices as emulation
import pytest
import torch
from devices import Devices, shared

from trims_shim.patches import transformers_rwkv

modeling = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")

SIDE = 256


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    with emulation.emulated(
        monkeypatch, *emulation.OF_LOADING, *transformers_rwkv.POINTS
    ) as devices:
        yield devices


def test_inference_and_training(devices: Devices, tmp_path: Path) -> None:
    configuration = modeling.RwkvConfig(
        vocab_size=32, hidden_size=SIDE, num_hidden_layers=4, rescale_every=1, context_length=16
    )
    theirs, ours = (modeling.RwkvModel(configuration).eval() for _ in range(2))
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    ours.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cuda"))
    rescaled = ours.blocks[3].attention.output.weight
    assert shared(rescaled)
    numbers = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = theirs(numbers).last_hidden_state
        assert torch.equal(ours(numbers).last_hidden_state, expected)
        assert not shared(rescaled)
        ours.train()._rescale_layers()
    assert torch.equal(
        rescaled, torch.load(tmp_path / "model.pt")["blocks.3.attention.output.weight"]
    )
    assert shared(ours.embeddings.weight) or ours.embeddings.weight.nbytes < (64 << 10)
