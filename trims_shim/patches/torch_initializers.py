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
    DevicePoint(
        name="torch.nn.init._no_grad_fill_",
        target="torch.nn.init:_no_grad_fill_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init._no_grad_zero_",
        target="torch.nn.init:_no_grad_zero_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init._no_grad_uniform_",
        target="torch.nn.init:_no_grad_uniform_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init._no_grad_normal_",
        target="torch.nn.init:_no_grad_normal_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init._no_grad_trunc_normal_",
        target="torch.nn.init:_no_grad_trunc_normal_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        # Of kaiming_uniform_ and kaiming_normal_, whose own warning names their caller.
        name="torch.nn.init._calculate_correct_fan",
        target="torch.nn.init:_calculate_correct_fan",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init.orthogonal_",
        target="torch.nn.init:orthogonal_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init.sparse_",
        target="torch.nn.init:sparse_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init.eye_",
        target="torch.nn.init:eye_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
    DevicePoint(
        name="torch.nn.init.dirac_",
        target="torch.nn.init:dirac_",
        supported="2.4 and newer",
        wrap=_wrap,
    ),
)
