"""What crosses a cut of a graph, and what a piece of it consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.onnx_models import FLOAT, Graph  # noqa: E402
from trims_shim.batching.staged.slicing.onnx_graph import OnnxGraph  # noqa: E402
from trims_shim.errors import StagingError  # noqa: E402


@pytest.fixture
def graph(tmp_path: Path) -> OnnxGraph:
    """x -> a = x w -> b = relu(a) -> y = b + x * scale(of the shape of x)."""
    made = Graph()
    x = made.input("x", ["batch", 4])
    made.node("MatMul", x, made.weight("w", 4, 4), outputs=["a"])
    made.node("Relu", "a", outputs=["b"])
    made.node("Shape", x, start=1, outputs=["shape"])
    made.node("Cast", "shape", to=FLOAT, outputs=["scale"])
    made.node("Mul", x, "scale", outputs=["c"])
    made.node("Add", "b", "c", outputs=["y"])
    made.output("y", ["batch", 4])
    path = tmp_path / "model.onnx"
    onnx.save_model(
        made.model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    return OnnxGraph(str(path))


def test_onnxruntime_that_cannot_read_the_weights_of_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.20.1")
    with pytest.raises(StagingError, match=r"1\.21 or later: run `pip .*this is onnxruntime 1\.20"):
        OnnxGraph(str(tmp_path / "not read"))


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    made = Graph()
    made.node("Add", made.input("x", ["batch", 4]), "w", outputs=["y"])
    made.output("y", ["batch", 4])
    model = made.model()
    values = onnx.helper.make_tensor("w", FLOAT, [1], [2.0])
    place = onnx.helper.make_tensor("place", onnx.TensorProto.INT64, [1], [3])
    sparse = onnx.helper.make_sparse_tensor(values, place, [4])
    model.graph.sparse_initializer.append(sparse)
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path)
    with pytest.raises(StagingError, match="sparse initializers"):
        OnnxGraph(str(path))


def test_what_crosses(graph: OnnxGraph) -> None:
    assert (graph.inputs, graph.outputs) == (["x"], ["y"])
    crossing = [set(graph.crossing(position)) for position in range(7)]
    assert crossing == [
        {"x"}, {"x", "a"}, {"x", "b"}, {"x", "b", "shape"}, {"x", "b", "scale"}, {"b", "c"}, {"y"},
    ]  # fmt: skip


def test_what_depends_on_shapes_only(graph: OnnxGraph) -> None:
    names = ("x", "a", "b", "c", "shape", "scale", "y")
    assert [graph.depends_on_content(name) for name in names] == [True] * 4 + [False] * 2 + [True]


@pytest.mark.parametrize("operator", ["BlackmanWindow", "HammingWindow", "HannWindow"])
def test_the_shape_of_a_window_depends_on_contents(tmp_path: Path, operator: str) -> None:
    made = Graph()
    x = made.input("x", ["batch"], onnx.TensorProto.INT64)
    window = made.node(operator, made.node("ReduceMax", x, keepdims=0))
    made.node("Shape", window, outputs=["shape"])
    made.output("shape", [1], onnx.TensorProto.INT64)
    onnx.save_model(made.model(), tmp_path / "model.onnx")
    assert OnnxGraph(str(tmp_path / "model.onnx")).depends_on_content("shape")


def test_a_piece_refers_to_the_weights_of_the_whole(graph: OnnxGraph) -> None:
    first = onnx.load_from_string(graph.piece(0, 2, {"x": None}, ["b"]))
    assert [node.op_type for node in first.graph.node] == ["MatMul", "Relu"]
    (weight,) = first.graph.initializer
    assert not weight.raw_data
    assert {each.key: each.value for each in weight.external_data}["location"] == "weights.bin"
    b, c = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float16)
    last = onnx.load_from_string(graph.piece(5, 6, {"b": b, "c": c}, ["y"]))
    assert not last.graph.initializer
    assert [each.name for each in last.graph.input] == ["b", "c"]
    kinds = [each.type.tensor_type.elem_type for each in last.graph.input]
    assert kinds == [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16]
    assert graph.needed(5, 6, ["x", "c", "b"]) == ["c", "b"]


def test_sub_graphs_use_values_of_the_graph(tmp_path: Path) -> None:
    branch = Graph("branch")
    branch.node("Add", "outer", "outer", outputs=["inner"])
    branch.node("Neg", "inner", outputs=["result"])
    branch.output("result", None)
    made = Graph()
    made.node("Relu", made.input("x", ["batch", 4]), outputs=["outer"])
    made.node("Identity", made.input("which", [], onnx.TensorProto.BOOL), outputs=["flag"])
    made.node("If", "flag", then_branch=branch.finish(), else_branch=branch.finish(), outputs=["y"])
    made.output("y", ["batch", 4])
    onnx.save_model(made.model(), tmp_path / "model.onnx")
    graph = OnnxGraph(str(tmp_path / "model.onnx"))
    assert set(graph.crossing(2)) == {"outer", "flag"}
    assert graph.needed(2, 3, ["x", "outer", "flag", "inner"]) == ["outer", "flag"]
