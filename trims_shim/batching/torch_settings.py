"""What torch keeps for each thread: how many threads compute, the graph, inference mode.

A new thread begins with OpenMP's default number of threads. torch applies ``set_num_threads`` to it
only when it is asked for the number there, or one of its own operations reads it, which a matrix
product does not (torch 2.13, at::internal::lazy_init_num_threads). Batches would use all
processors, and take several times as long on a busy machine.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["adopt_torch_threads", "torch_in_this_thread", "without_graph"]


def adopt_torch_threads() -> None:
    """Make ``torch.set_num_threads`` hold in this thread, if torch is in use."""
    ask = getattr(sys.modules.get("torch"), "get_num_threads", None)  # or half imported
    if ask is not None:
        ask()


def torch_in_this_thread() -> Any:
    """Return torch, after making ``set_num_threads`` hold in this thread."""
    import torch

    torch.get_num_threads()
    return torch


class without_graph:
    """A context without graph or inference tensors, whatever mode the thread is in.

    Not a generator, which would take as long as both of torch's contexts.
    """

    __slots__ = ("_had_graph", "_inference", "_torch")

    def __enter__(self) -> None:
        torch = sys.modules.get("torch")
        self._torch: Any = torch if hasattr(torch, "inference_mode") else None  # or half imported
        self._inference: Any = None
        if self._torch is None:
            return
        if self._torch.is_inference_mode_enabled():
            self._inference = self._torch.inference_mode(False)
            self._inference.__enter__()
        self._had_graph = self._torch.is_grad_enabled()
        if self._had_graph:
            self._torch.set_grad_enabled(False)

    def __exit__(self, *exc_info: object) -> None:
        if self._torch is None:
            return
        if self._had_graph:
            self._torch.set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(*exc_info)
