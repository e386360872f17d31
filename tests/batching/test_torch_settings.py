"""What torch keeps for each thread is as batches need it."""

from __future__ import annotations

import pytest

from trims_shim.batching.torch_settings import without_graph


def test_no_graph_in_whatever_thread() -> None:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        with without_graph():
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
    with torch.no_grad(), without_graph():
        assert not torch.is_grad_enabled()
    with pytest.raises(ValueError, match="out"), without_graph():
        raise ValueError("out")
    assert torch.is_grad_enabled()
