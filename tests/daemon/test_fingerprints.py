"""Outputs are compared by their bits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto

from trims_shim.daemon.preparer.fingerprints import fingerprint

NAN = np.array([0x7FC00000], np.uint32).view(np.float32)
OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)
DIFFERENT = [
    None,
    True,
    1,
    1.0,
    "1",
    "\ud800",
    b"1",
    [],
    [1],
    [[1]],
    [1, 1],
    {},
    {1: 1},
    {"1": 1},
    {1: 2},
    np.float32(1),
    np.ones(1, np.float32),
    np.ones(1, np.float64),
    np.ones(1, np.int32),
    np.ones((1, 1), np.float32),
    np.zeros(1, np.float32),
    -np.zeros(1, np.float32),
    NAN,
    OTHER_NAN,
    np.array(["a", "b"], object),
    np.array(["ab", ""], object),
    np.array(["astr", "b"], object),
    np.array(["a", "strb"], object),
    np.array(["a", "b"]),
]


class TestFingerprints:
    def test_different_values_have_different_ones(self) -> None:
        assert len({fingerprint(each) for each in DIFFERENT}) == len(DIFFERENT)

    @pytest.mark.parametrize("value", [NAN, np.ones((2, 3)), {"b": 1, "a": [2]}, "text"])
    def test_equal_values_have_equal_ones(self, value: Any) -> None:
        assert fingerprint(copy.deepcopy(value)) == fingerprint(value)

    def test_strings_count_and_not_where_they_lie(self) -> None:
        one, other = (np.array([f"{number}" * 9 for number in (1, 2)], object) for _ in range(2))
        assert one[0] is not other[0]
        assert fingerprint(one) == fingerprint(other)

    def test_the_order_of_a_map_does_not_count(self) -> None:
        assert fingerprint({1: "a", 2: "b"}) == fingerprint({2: "b", 1: "a"})

    def test_how_an_array_lies_in_memory_does_not_count(self) -> None:
        array = np.arange(6).reshape(2, 3)
        assert fingerprint(np.asfortranarray(array)) == fingerprint(array)

    def test_foreign_types(self) -> None:
        with pytest.raises(TypeError, match="object"):
            fingerprint(object())

    def test_types_that_numpy_lacks(self) -> None:
        def of(bits: Any, number: int = TensorProto.BFLOAT16) -> str:
            array = np.array(bits, np.uint16)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)
            return fingerprint(value._ortvalue)

        assert of([1, 2]) == of([1, 2])
        others = of([1, 3]), of([[1, 2]]), of([1, 2], TensorProto.FLOAT16)
        assert len({of([1, 2]), *others}) == 4

    def test_sparse_outputs(self) -> None:
        device = onnxruntime.OrtDevice.make("cpu", 0)
        kind = onnxruntime.SparseTensor

        def coo(value: float, index: int, side: int = 4) -> Any:
            shape, values = np.array([side, 4], np.int64), np.array([value], np.float32)
            made = kind.sparse_coo_from_numpy(shape, values, np.array([index], np.int64), device)
            return made._get_c_tensor()

        def csr(inner: int, outer: list[int]) -> Any:
            shape, values = np.array([4, 4], np.int64), np.array([1], np.float32)
            indices = np.array([inner], np.int64), np.array(outer, np.int64)
            return kind.sparse_csr_from_numpy(shape, values, *indices, device)._get_c_tensor()

        assert fingerprint(coo(1, 2)) == fingerprint(coo(1, 2))
        different = [
            *(coo(*each) for each in ((1, 2), (1, 3), (2, 2), (1, 2, 8))),
            *(csr(*each) for each in ((2, [0, 1, 1, 1, 1]), (3, [0, 1, 1, 1, 1]))),
            csr(2, [0, 0, 1, 1, 1]),
        ]
        assert len(set(map(fingerprint, different))) == len(different)
