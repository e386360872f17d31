"""Weights of matrix products that are stored transposed.

Promise: only where a product's own attribute can say so, and the weight is read by nothing else;
onnxruntime packs them into the very bytes that lie in the file, and computes the same bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_messages import save_optimised, session
from onnx_models import Graph

from trims_shim.errors import FormatError
from trims_shim.formats.onnx_relayout import relayout
from trims_shim.formats.onnx_transposition import Transposition, with_transposed_weights

ROWS, COLUMNS = 96, 256
SIZE = 4 * ROWS * COLUMNS


def _weight(name: str = "w", offset: int = 4096, **fields: Any) -> onnx.TensorProto:
    shape = fields.pop("dims", (ROWS, COLUMNS))
    tensor = onnx.TensorProto(name=name, dims=shape, data_location=TensorProto.EXTERNAL)
    tensor.data_type = fields.pop("data_type", TensorProto.FLOAT)
    size = int(np.prod(shape)) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    entries = {"location": "w.bin", "offset": str(offset), "length": str(size)}
    if fields.pop("is_packed", True):
        entries["prepacked_0"] = f"Gemm+1|{offset + size};64;0"
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _product(*inputs: str, operator: str = "Gemm", **attributes: Any) -> onnx.NodeProto:
    name = "_".join(inputs)
    return helper.make_node(operator, list(inputs), [f"of_{name}"], name=name, **attributes)


def _model(*parts: Any, outputs: tuple[str, ...] = ()) -> bytes:
    graph = onnx.GraphProto(name="graph", doc_string="kept")
    for each in parts:
        if isinstance(each, onnx.NodeProto):
            graph.node.append(each)
        else:
            graph.initializer.append(each)
    for name in outputs:
        graph.output.add(name=name)
    made = onnx.ModelProto(ir_version=10, producer_name="tests", graph=graph)
    return bytes(made.SerializeToString(deterministic=True))


def _branch(*inputs: str) -> onnx.NodeProto:
    inside = helper.make_graph([_product(*inputs)], "inside", [], [])
    deeper = helper.make_graph([helper.make_node("If", ["c"], [], then_branch=inside)], "", [], [])
    return helper.make_node("If", ["c"], ["z"], then_branch=deeper)


def _transposed_names(content: bytes) -> list[str]:
    graph = onnx.ModelProto.FromString(content).graph
    values = ((node.name, {each.name: each.i for each in node.attribute}) for node in graph.node)
    return [name for name, attributes in values if attributes.get("transB")]


@pytest.mark.parametrize(
    "attributes",
    [{}, {"transB": 0}, {"alpha": 2.0, "transA": 1, "transB": 0, "beta": 0.5}],
    ids=["none", "false", "all"],
)
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_product_of_a_packed_weight(domain: str, attributes: dict[str, Any]) -> None:
    operator = "FusedGemm" if domain else "Gemm"
    node = _product("x", "w", "b", operator=operator, domain=domain, **attributes)
    before = _model(node, _weight())
    result, found = with_transposed_weights(before)
    assert found == (Transposition(4096, ROWS, COLUMNS),)
    expected = onnx.ModelProto.FromString(before)
    expected.graph.initializer[0].dims[:] = [COLUMNS, ROWS]
    changed = onnx.ModelProto.FromString(result)
    (ours,) = changed.graph.node
    kept = {each.name: helper.get_attribute_value(each) for each in ours.attribute}
    assert kept == attributes | {"transB": 1}
    del ours.attribute[:], expected.graph.node[0].attribute[:]
    assert changed == expected
    assert with_transposed_weights(result) == (result, ())


def test_all_products_of_one_weight() -> None:
    content, found = with_transposed_weights(
        _model(_product("x", "w"), _weight(), _product("y", "w", "c"), _product("x", "other"))
    )
    assert len(found) == 1
    assert _transposed_names(content) == ["x_w", "y_w_c"]


def test_the_shape_that_is_said_once_more_goes() -> None:
    """It would be another one, and onnxruntime takes it from the weight."""
    model = onnx.ModelProto.FromString(_model(_product("x", "w"), _weight()))
    for name in ("x", "w", "of_x_w"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    content, found = with_transposed_weights(model.SerializeToString())
    assert found
    values = onnx.ModelProto.FromString(content).graph.value_info
    assert [each.name for each in values] == ["x", "of_x_w"]


_OTHERS: dict[str, bytes] = {
    "already": _model(_product("x", "w", transB=1), _weight()),
    "one is already": _model(_product("x", "w"), _product("y", "w", transB=1), _weight()),
    "MatMul": _model(_product("x", "w", operator="MatMul"), _weight()),
    "another domain": _model(_product("x", "w", domain="custom"), _weight()),
    "first factor": _model(_product("w", "x"), _weight()),
    "both factors": _model(_product("w", "w"), _weight()),
    "summand": _model(_product("x", "w"), _product("x", "v", "w"), _weight()),
    "another reader": _model(_product("x", "w"), _product("w", operator="Relu"), _weight()),
    "in a sub-graph": _model(_product("x", "w"), _branch("x", "w"), _weight()),
    "output": _model(_product("x", "w"), _weight(), outputs=("w",)),
    "nobody": _model(_weight()),
    "not packed": _model(_product("x", "w"), _weight(is_packed=False)),
    "small": _model(_product("x", "w"), _weight(dims=(64, 64))),
    "not a matrix": _model(_product("x", "w"), _weight(dims=(1, ROWS, COLUMNS))),
    "halves": _model(_product("x", "w"), _weight(data_type=TensorProto.FLOAT16, dims=(512, 512))),
    "twice": _model(_product("x", "w"), _weight(), _weight(offset=1 << 20)),
    "data of two": _model(_product("x", "w"), _weight(), _weight("v")),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_what_stays_as_it_is(name: str) -> None:
    assert with_transposed_weights(_OTHERS[name]) == (_OTHERS[name], ())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_model_is_refused_or_read(data: st.DataObject) -> None:
    content = bytearray(_model(_product("x", "w"), _branch("x", "v"), _weight(), _weight("v", 0)))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut])):
        try:
            with_transposed_weights(damaged)
        except FormatError:
            pass


def _saved(directory: Path) -> Path:
    """A network as onnxruntime saves it."""
    graph = Graph("products", seed=7)
    x = graph.input("x", [5, ROWS])
    for number, operator in enumerate(("", "Relu")):
        weight = graph.weight(f"w{number}", (ROWS, COLUMNS)[number], (COLUMNS, ROWS)[number])
        x = graph.node("Gemm", x, weight, graph.weight(f"b{number}", (COLUMNS, ROWS)[number]))
        x = graph.node(operator, x) if operator else x
    graph.output(x, [5, ROWS])
    source = directory / "source.onnx"
    source.write_bytes(graph.model().SerializeToString())
    return source


def test_onnxruntime_takes_what_is_packed_in_the_file(tmp_path: Path) -> None:
    """Writing to the file below a session shows what it maps. Nobody may do that elsewhere."""
    source = _saved(tmp_path)
    model, data = save_optimised(source, tmp_path)
    if b"prepacked_" not in model.read_bytes():
        pytest.skip("this onnxruntime saves no packed weights")
    before = data.read_bytes()
    layout = relayout(model.read_bytes(), data_size_bytes=len(before), location="weights.bin")
    content, found = with_transposed_weights(layout.model)
    assert sorted((each.rows, each.columns) for each in found) == [(ROWS, COLUMNS), (COLUMNS, ROWS)]
    weights = np.zeros(layout.size_bytes, np.uint8)
    for copy in layout.copies:
        piece = np.frombuffer(before, np.uint8, copy.size_bytes, copy.source_offset)
        weights[copy.target_offset : copy.target_offset + copy.size_bytes] = piece
    for each in found:
        part = weights[each.offset_bytes : each.offset_bytes + SIZE]
        matrix = part.view(np.float32).reshape(each.rows, each.columns)
        part[:] = np.ascontiguousarray(matrix.T).view(np.uint8).ravel()
    (tmp_path / "weights.bin").write_bytes(weights.tobytes())
    (tmp_path / "model.onnx").write_bytes(content)
    feeds = {"x": np.random.RandomState(1).standard_normal((5, ROWS)).astype(np.float32)}
    ours = session(tmp_path / "model.onnx", level="ORT_DISABLE_ALL")
    (result,), (expected,) = ours.run(None, feeds), session(source).run(None, feeds)
    assert result.tobytes() == expected.tobytes()
    with (tmp_path / "weights.bin").open("r+b") as file:
        for tensor in onnx.ModelProto.FromString(content).graph.initializer:
            entries = {pair.key: pair.value for pair in tensor.external_data}
            for blob in entries.get("prepacked_0", "").split("|")[1:]:
                offset, size, _ = map(int, blob.split(";"))
                os.pwrite(file.fileno(), bytes(size), offset)
    (zeroed,) = ours.run(None, feeds)
    assert zeroed.tobytes() != expected.tobytes()
