"""Torch's modes, which see its operations: whether the program has any, and hiding ours from them.

Where a mode would see our operations instead of torch's, torch's own code does the work. Operations
for our own purposes are hidden from modes. Our code is also hidden from torch.compile, which would
compile it although it leaves torch's own code alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

__all__ = ["call_under", "has_foreign_mode", "has_mode", "uncompiled", "unseen"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

passive_modes: set[type] = {DeviceContext}
"""Function modes that see our operations but change none of them: the default device's."""
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


def call_under(
    mode: torch.overrides.TorchFunctionMode,
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function under a function mode.

    ``with`` would leave the mode on the stack when a signal handler raises at its begin or end. The
    handler may come at each call here, so there are two that take the mode off.
    """
    try:
        try:
            torch._C._push_on_torch_function_stack(mode)
            return function(*args, **kwargs)
        finally:
            _take_off(mode)
    finally:
        _take_off(mode)


def _take_off(mode: torch.overrides.TorchFunctionMode) -> None:
    level = torch._C._len_torch_function_stack()
    if level and torch._C._get_function_stack_at(level - 1) is mode:
        torch._C._pop_torch_function_stack()


def unseen() -> contextlib.AbstractContextManager[object]:
    """Hide the block's operations from the program's modes, the default device and functorch.

    torch's own reader makes storages in C++, which modes do not see; a tensor that functorch wraps
    has no storage.
    """
    if not (has_mode() or torch._C._functorch.peek_interpreter_stack() is not None):
        return _NOTHING
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_python_dispatch._disable_current_modes())
    stack.enter_context(torch._C._DisableFuncTorch())
    return stack


def uncompiled(function: _Function) -> _Function:
    """Make torch.compile leave ``function`` alone, with all that it calls; return what to call.

    torch.compile leaves torch's own files alone. It would compile each of our functions on the way,
    and warn of those that it cannot compile. ``torch.compiler.disable`` does the same as this, but
    imports torch._dynamo, which takes seconds. Does nothing in a torch without these names.
    """
    if hasattr(_frames, "_FrameExecStrategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
        return function
    if not hasattr(_frames, "skip_code"):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:  # before torch 2.7, which knows one frame only
        compiler = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(compiler)

    _frames.skip_code(call.__code__)
    return cast(_Function, functools.update_wrapper(call, function))
