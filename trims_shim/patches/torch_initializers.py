"""torch.nn.init: tensors on shared device memory become private before they are filled.

Where possible, the target is the private function that several public ones call, so that public
names imported earlier are covered. A tensor that a program fills by hand, with
``weight.data.normal_()``, is not seen here; see :mod:`.torch_unshare`.
"""

from __future__ import annotations

from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_device import DevicePoint
from trims_shim.patches.torch_unshare import writing_tensor

__all__ = ["POINTS"]

_wrap = writing_tensor("tensor", "init")

POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torch.nn.init:_no_grad_fill_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:_no_grad_zero_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:_no_grad_uniform_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:_no_grad_normal_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:_no_grad_trunc_normal_", "2.4+", _wrap),
    # Of kaiming_uniform_ and kaiming_normal_, whose own warning names their caller.
    DevicePoint("torch.nn.init:_calculate_correct_fan", "2.4+", _wrap),
    DevicePoint("torch.nn.init:orthogonal_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:sparse_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:eye_", "2.4+", _wrap),
    DevicePoint("torch.nn.init:dirac_", "2.4+", _wrap),
)
