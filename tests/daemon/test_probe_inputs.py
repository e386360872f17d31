"""Inputs that fit any signature, the same in every process."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from onnx import TensorProto, helper

from trims_shim.daemon.preparer import probe_inputs
from trims_shim.daemon.preparer.probe_inputs import Argument, NoInputs


class TestInputs:
    @pytest.mark.parametrize(
        ("dimension", "extent"),
        [
            (7, 7),
            (0, 0),
            (-1, 5),
            (None, 5),
            ("batch", 5),
            ("", 5),
            ("past + sequence", 10),
            ("past_sequence_length+1", 6),
            ("a + b + 2", 12),
        ],
    )
    def test_dimensions(self, dimension: Any, extent: int) -> None:
        values = probe_inputs.inputs(
            [Argument("x", "tensor(float)", (dimension, 2))], size=5, filling="ones"
        )
        assert values["x"].shape == (extent, 2)

    @pytest.mark.parametrize("filling", probe_inputs.FILLINGS)
    @pytest.mark.parametrize(
        "element",
        [
            "float",
            "double",
            "float16",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "bool",
            "complex64",
            "complex128",
        ],
    )
    def test_types(self, element: str, filling: str) -> None:
        values = probe_inputs.inputs(
            [Argument("x", f"tensor({element})", (3, 4))], size=1, filling=filling
        )
        expected = {"float": "float32", "double": "float64"}.get(element, element)
        assert values["x"].dtype == expected
        assert values["x"].shape == (3, 4)

    def test_they_are_the_same_in_every_process(self) -> None:
        values = probe_inputs.inputs(
            [Argument("x", "tensor(float)", (4,))], size=1, filling="small"
        )
        assert values["x"].tolist() == pytest.approx(
            [1.6243454, -0.6117564, -0.5281718, -1.0729686]
        )

    def test_two_inputs_differ(self) -> None:
        both = [Argument(name, "tensor(float)", (4,)) for name in "xy"]
        values = probe_inputs.inputs(both, size=1, filling="small")
        assert values["x"].tolist() != values["y"].tolist()

    def test_indices_are_small_and_pixels_are_not(self) -> None:
        names = ("int64", "uint8", "int8")
        arguments = [Argument(name, f"tensor({name})", (10_000,)) for name in names]
        values = probe_inputs.inputs(arguments, size=1, filling="small")
        assert set(values["int64"].tolist()) == {0, 1}
        assert set(values["uint8"].tolist()) == set(range(256))
        assert set(values["int8"].tolist()) == set(range(-128, 128))

    @pytest.mark.parametrize(
        ("filling", "expected"),
        [("ones", [1] * 9), ("zeros", [0] * 9), ("count", [*range(8), 0])],
    )
    def test_other_values(self, filling: str, expected: list[int]) -> None:
        """For models that take no others as indices, lengths or shapes."""
        argument = Argument("x", "tensor(int64)", (9,))
        values = probe_inputs.inputs([argument], size=1, filling=filling)
        assert values["x"].tolist() == expected

    def test_strings(self) -> None:
        values = probe_inputs.inputs(
            [Argument("x", "tensor(string)", (2, 1))], size=1, filling="ones"
        )
        assert values["x"].tolist() == [["1"], ["1"]]

    def test_values_of_values(self) -> None:
        made = probe_inputs.inputs(
            [
                Argument("s", "seq(tensor(int64))", ()),
                Argument("o", "optional(tensor(float))", (2,)),
                Argument("n", "map(int64,tensor(float))", ()),
                Argument("t", "map(string,tensor(float))", ()),
            ],
            size=1,
            filling="ones",
        )
        assert [each.tolist() for each in made["s"]] == [[1, 1], [1, 1]]
        assert made["o"].tolist() == [1, 1]
        assert made["n"] == {0: 1.0, 1: 1.0}
        assert made["t"] == {"a": 1.0, "b": 1.0}

    def test_an_optional_may_be_absent(self) -> None:
        made = probe_inputs.inputs(
            [Argument("o", "optional(tensor(float))", (2,))], size=1, filling="zeros"
        )
        assert made == {"o": None}

    @pytest.mark.parametrize(
        "element", ["bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"]
    )
    def test_numbers_that_numpy_lacks(self, element: str) -> None:
        made = probe_inputs.inputs(
            [Argument("x", f"tensor({element})", (2,))], size=1, filling="ones"
        )
        number = TensorProto.DataType.Value(element.upper())
        assert made["x"].element_type() == number
        value = made["x"]._ortvalue
        content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
        expected = helper.make_tensor("x", number, (2,), [1.0, 1.0]).int32_data
        assert content == b"".join(each.to_bytes(len(content) // 2, "little") for each in expected)

    @pytest.mark.parametrize(
        "kind", ["tensor(int4)", "sparse_tensor(float)", "seq(map(int64,tensor(float)))", "what"]
    )
    def test_what_cannot_be_made(self, kind: str) -> None:
        with pytest.raises(NoInputs, match="an input is"):
            probe_inputs.inputs([Argument("x", kind, (2,))], size=1, filling="ones")

    @pytest.mark.parametrize("shape", [(1 << 62, 1 << 62), (1 << 25,)])
    def test_shapes_are_not_believed(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(NoInputs, match="256 MiB"):
            probe_inputs.inputs([Argument("x", "tensor(float)", shape)], size=1, filling="ones")

    def test_a_number_that_is_a_name(self) -> None:
        """Files may say anything."""
        huge = Argument("x", "tensor(float)", ("9" * 5000,))
        assert probe_inputs.inputs([huge], size=3, filling="ones")["x"].shape == (3,)


class TestSizes:
    @pytest.mark.parametrize("shape", [("n",), (None,), (-1,), (2, "n")])
    def test_open_dimensions(self, shape: Any) -> None:
        tried = probe_inputs.sizes([Argument("x", "tensor(float)", shape)])
        assert tried == probe_inputs.SIZES
        assert list(tried) == sorted(set(tried))

    def test_values_without_a_shape(self) -> None:
        assert probe_inputs.sizes([Argument("x", "seq(tensor(float))", ())]) == probe_inputs.SIZES

    def test_known_shapes(self) -> None:
        assert len(probe_inputs.sizes([Argument("x", "tensor(float)", (2, 3))])) == 1
        assert len(probe_inputs.sizes([])) == 1
