"""Modes, which see each of torch's operations: whether the program has any, and hiding ours.

Where one would see our operations instead of torch's, torch's own code does the work; what we do
for ourselves is hidden from them. So is our code from torch.compile, which would compile it where
it leaves torch's alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

__all__ = ["has_foreign_mode", "has_mode", "uncompiled", "unseen"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

passive_modes: set[type] = {DeviceContext}
"""Function modes that see what we do and change none of it: the default device."""
_NOTHING = contextlib.nullcontext()


def has_mode() -> bool:
    """Whether a function or dispatch mode sees torch's calls."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def has_foreign_mode() -> bool:
    """Whether a function or dispatch mode other than the default device's sees torch's calls."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        type(torch._C._get_function_stack_at(level)) not in passive_modes
        for level in range(torch._C._len_torch_function_stack())
    )


def unseen() -> contextlib.AbstractContextManager[object]:
    """Hide what we do from modes of the program, the default device and functorch among them.

    torch's own reader makes storages in C++, where no mode looks; a tensor that functorch wraps has
    no storage to give.
    """
    if not (has_mode() or torch._C._functorch.peek_interpreter_stack() is not None):
        return _NOTHING
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_python_dispatch._disable_current_modes())
    stack.enter_context(torch._C._DisableFuncTorch())
    return stack


def uncompiled(function: _Function) -> _Function:
    """``function``, which torch.compile shall leave alone where compiled code comes to call it.

    With all that it calls. torch.compile does so with torch's own files, and else would compile
    each of our functions on the way, and warn of what it cannot. As ``torch.compiler.disable``, but
    torch._dynamo, which takes seconds to import, is not; a torch without these names goes on.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
