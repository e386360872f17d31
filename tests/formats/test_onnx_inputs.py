"""Inputs that were weights go with the weights; all others stay, and so does the rest."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx_kinds import sample

from trims_shim.errors import TruncatedFile
from trims_shim.formats.onnx_inputs import without_lost_inputs


def model(inputs: str, initializers: str) -> bytes:
    graph = onnx.GraphProto(name="graph")
    for name in inputs:
        graph.input.add(name=name, doc_string=f"input {name}")
        graph.node.add(op_type="Relu", name=name)
    for name in initializers:
        graph.initializer.add(name=name, dims=[2], data_type=1, raw_data=bytes(8))
    made = onnx.ModelProto(ir_version=3, producer_name="tests", graph=graph)
    return bytes(made.SerializeToString(deterministic=True))


def inputs_of(content: bytes) -> str:
    return "".join(each.name for each in onnx.ModelProto.FromString(content).graph.input)


@pytest.mark.parametrize(
    ("source", "saved", "expected"),
    [
        (("xab", "ab"), ("xab", "b"), "xb"),
        (("xab", "ab"), ("xab", ""), "x"),
        (("axb", "ab"), ("axb", "c"), "x"),
        (("xab", "ab"), ("xab", "ab"), "xab"),
        (("xab", ""), ("xab", "c"), "xab"),
        (("x", "ab"), ("xab", ""), "xab"),
        (("xab", "ab"), ("x", ""), "x"),
    ],
    ids=str,
)
def test_inputs(source: tuple[str, str], saved: tuple[str, str], expected: str) -> None:
    before = model(*saved)
    result = without_lost_inputs(before, model(*source))
    assert inputs_of(result) == expected
    if expected == saved[0]:
        assert result == before
    kept, whole = onnx.ModelProto.FromString(result), onnx.ModelProto.FromString(before)
    assert [each.doc_string for each in kept.graph.input] == [f"input {name}" for name in expected]
    del kept.graph.input[:]
    del whole.graph.input[:]
    assert kept == whole


def test_what_onnxruntime_saves(tmp_path: Path) -> None:
    """The case this is for: batch norm is fused into a convolution, and its weights are gone."""
    made = sample("old")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = f"{tmp_path}/saved.onnx"
    original = onnxruntime.InferenceSession(made.content, options)
    with open(f"{tmp_path}/saved.onnx", "rb") as file:
        saved = file.read()
    assert len(inputs_of(saved)) > len("x")
    result = without_lost_inputs(saved, made.content)
    options.optimized_model_filepath = ""
    again = onnxruntime.InferenceSession(result, options)
    assert [each.name for each in again.get_inputs()] == ["x"]
    [feed] = made.feeds
    assert again.run(None, feed)[0].tobytes() == original.run(None, feed)[0].tobytes()


def test_no_source_and_damaged_ones() -> None:
    saved = model("xa", "")
    assert without_lost_inputs(saved, b"") == saved
    with pytest.raises(TruncatedFile):
        without_lost_inputs(saved, model("xa", "a")[:-1])
