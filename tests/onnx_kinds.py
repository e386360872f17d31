"""More kinds of ONNX models for :mod:`onnx_models`: quantised, branching, of other types.

:mod:`onnx_unusual` has those that are odd in other ways, and models that cannot be loaded.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, SAMPLES, STRING, Graph, Sample, images, weights
from onnx_unusual import BROKEN

__all__ = ["BROKEN", "NOT_RELOADED", "sample"]

RUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
NOT_RELOADED = frozenset({"branches", "loop", "scan", "optional"} if RUNTIME < (1, 31) else ())
"""With weights in sub-graphs: versions before 1.31 save these twice, and do not load them again."""


def sample(name: str, seed: int = 1) -> Sample:
    """The model of this kind."""
    return SAMPLES[name](seed)


# --- quantised and narrow -------------------------------------------------------------------------


def _scaled(graph: Graph, value: str, name: str, *, symmetric: bool = False) -> str:
    """A value through int8 or uint8 and back."""
    scale = graph.constant(f"{name}.scale", np.array(0.02, np.float32))
    zero = np.array(0, np.int8) if symmetric else np.array(128, np.uint8)
    point = graph.constant(f"{name}.zero", zero)
    return graph.node(
        "DequantizeLinear", graph.node("QuantizeLinear", value, scale, point), scale, point
    )


def _int8_weight(graph: Graph, name: str, *shape: int, axis: int) -> str:
    scales = np.abs(weights(graph.seed, f"{name}.scales", shape[axis])) + np.float32(0.01)
    return graph.node(
        "DequantizeLinear",
        graph.weight(name, *shape, dtype=np.int8),
        graph.constant(f"{name}.scales", scales * np.float32(0.01)),
        graph.constant(f"{name}.points", np.zeros(shape[axis], np.int8)),
        axis=axis,
    )


def quantised_static(seed: int = 1) -> Sample:
    """QDQ: convolutions and a product of int8 weights, as a static quantiser writes them."""
    graph = Graph("quantised_static", seed)
    value = _scaled(graph, graph.input("x", ["batch", 3, 12, 12]), "in")
    for number, (channels, count) in enumerate([(3, 16), (16, 32)]):
        kernel = _int8_weight(graph, f"kernel{number}", count, channels, 3, 3, axis=0)
        value = graph.node("Relu", graph.node("Conv", value, kernel, pads=[1, 1, 1, 1]))
        value = _scaled(graph, value, f"between{number}")
    value = _scaled(graph, graph.node("GlobalAveragePool", value), "pooled")
    value = graph.node("Flatten", value)
    value = graph.node("MatMul", value, _int8_weight(graph, "last", 32, 10, axis=1))
    _scaled(graph, value, "out")
    graph.nodes[-1].output[:] = ["y"]
    graph.output("y", ["batch", 10])
    return Sample(graph.model(), ({"x": images(seed, 2, 3, 12, 12)},))


def quantised_dynamic(seed: int = 1) -> Sample:
    """MatMulInteger after DynamicQuantizeLinear, as a dynamic quantiser writes it."""
    graph = Graph("quantised_dynamic", seed)
    graph.input("x", ["batch", 64])
    graph.node("DynamicQuantizeLinear", "x", outputs=["q", "scale", "point"])
    product = graph.node(
        "MatMulInteger",
        "q",
        graph.weight("weight", 64, 96, dtype=np.int8),
        "point",
        graph.constant("weight.point", np.array(0, np.int8)),
    )
    scale = graph.node("Mul", "scale", graph.constant("weight.scale", np.array(0.01, np.float32)))
    value = graph.node("Mul", graph.node("Cast", product, to=FLOAT), scale)
    graph.node("Add", value, graph.weight("bias", 96), outputs=["y"])
    graph.output("y", ["batch", 96])
    return Sample(graph.model(), ({"x": images(seed, 3, 64)},))


def blockwise(seed: int = 1) -> Sample:
    """MatMulNBits: 4-bit weights in blocks, an operator of onnxruntime's own."""
    graph = Graph("blockwise", seed)
    graph.input("x", ["batch", 128])
    graph.node(
        "MatMulNBits",
        "x",
        graph.weight("weight", 64, 4, 16, dtype=np.uint8),
        graph.constant("scales", np.abs(weights(seed, "scales", 64 * 4))),
        domain="com.microsoft",
        outputs=["y"],
        K=128,
        N=64,
        bits=4,
        block_size=32,
    )
    graph.output("y", ["batch", 64])
    model = graph.model(domains=[("com.microsoft", 1)])
    return Sample(model, ({"x": images(seed, 3, 128)},))


def half(seed: int = 1) -> Sample:
    """float16 throughout."""
    kind = TensorProto.FLOAT16
    graph = Graph("half", seed)
    graph.input("x", ["batch", 64], kind)
    hidden = graph.node("MatMul", "x", graph.weight("first", 64, 96, dtype=np.float16))
    hidden = graph.node("Add", hidden, graph.weight("bias", 96, dtype=np.float16))
    graph.node("MatMul", hidden, graph.weight("last", 96, 32, dtype=np.float16), outputs=["y"])
    graph.output("y", ["batch", 32], kind)
    return Sample(graph.model(), ({"x": images(seed, 3, 64).astype(np.float16)},))


def _typed(name: str, kind: int, shape: tuple[int, ...], raw: bytes) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
    tensor.raw_data = raw
    return tensor


def brain_float(seed: int = 1) -> Sample:
    """bfloat16 weights, computed with in float."""
    graph = Graph("brain_float", seed)
    graph.input("x", ["batch", 64])
    upper = weights(seed, "weight", 64, 96).view(np.uint32) >> 16
    graph.constant(
        "weight", _typed("weight", TensorProto.BFLOAT16, (64, 96), upper.astype("<u2").tobytes())
    )
    graph.node("MatMul", "x", graph.node("Cast", "weight", to=FLOAT), outputs=["y"])
    graph.output("y", ["batch", 96])
    return Sample(graph.model(), ({"x": images(seed, 3, 64)},))


def weight_only(seed: int = 1) -> Sample:
    """int8 and int4 weights that are dequantised in the graph."""
    graph = Graph("weight_only", seed)
    graph.input("x", ["batch", 64])
    hidden = graph.node("MatMul", "x", _int8_weight(graph, "eight", 64, 64, axis=1))
    packed = weights(seed, "four", 64 * 32 // 2, dtype=np.uint8).tobytes()
    graph.constant("four", _typed("four", TensorProto.INT4, (64, 32), packed))
    scales = graph.constant("four.scales", np.abs(weights(seed, "four.scales", 2, 32)))
    four = graph.node("DequantizeLinear", "four", scales, axis=0, block_size=32)
    graph.node("MatMul", hidden, four, outputs=["y"])
    graph.output("y", ["batch", 32])
    return Sample(graph.model(), ({"x": images(seed, 3, 64)},))


def many_types(seed: int = 1) -> Sample:
    """Weights of every type that arithmetic has kernels for, and scalars, and nothing at all."""
    graph = Graph("many_types", seed)
    index = graph.input("index", ["n"], INT64)
    for number, dtype in enumerate(
        (np.float32, np.float64, np.int32, np.int64, np.uint8, np.int8, np.uint16, np.int16)
    ):
        table = graph.weight(f"table{number}", 50, 7, dtype=dtype)
        graph.node("Gather", table, index, outputs=[f"y{number}"])
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph.output(f"y{number}", ["n", 7], kind)
    graph.constant("flags", weights(seed, "flags", 50, 7) > 0)
    graph.node("Gather", "flags", index, outputs=["flag"])
    graph.output("flag", ["n", 7], BOOL)
    graph.constant("nothing", np.zeros((0, 7), np.float32))
    graph.node("Concat", "y0", "nothing", axis=0, outputs=["joined"])
    graph.output("joined", None)
    return Sample(graph.model(), ({"index": np.array([0, 49, 7, 7])},))


# --- sub-graphs -----------------------------------------------------------------------------------


def _branch(seed: int, name: str, size: int) -> onnx.GraphProto:
    """A branch whose weight has the same name in each branch, and other values."""
    graph = Graph(name, seed)
    hidden = graph.constant("weight", weights(seed, f"{name}.weight", 64, size))
    hidden = graph.node("MatMul", "x", hidden, name=f"{name}.product")
    other = graph.constant("other", weights(seed, f"{name}.other", size, 32))
    graph.node("MatMul", hidden, other, outputs=[f"{name}.y"], name=f"{name}.last")
    graph.output(f"{name}.y", None)
    return graph.finish()


def branches(seed: int = 1) -> Sample:
    """If, with weights of one name in both branches, and in the graph around it."""
    graph = Graph("branches", seed)
    graph.input("x", ["batch", 64])
    graph.input("which", [], BOOL)
    y = graph.node(
        "If", "which", then_branch=_branch(seed, "then", 48), else_branch=_branch(seed, "else", 80)
    )
    graph.node("MatMul", y, graph.weight("weight_outside", 32, 16), outputs=["y"])
    graph.output("y", None)
    feeds = tuple({"x": images(seed, 2, 64), "which": np.array(which)} for which in (True, False))
    return Sample(graph.model(), feeds)


def constant_branch(seed: int = 1) -> Sample:
    """If on a constant: the optimiser takes the branch out."""
    graph = Graph("constant_branch", seed)
    graph.input("x", ["batch", 64])
    graph.constant("which", np.array(True))
    graph.node(
        "If",
        "which",
        outputs=["y"],
        then_branch=_branch(seed, "then", 48),
        else_branch=_branch(seed, "else", 80),
    )
    graph.output("y", None)
    return Sample(graph.model(), ({"x": images(seed, 2, 64)},))


def _body(seed: int, name: str, inner: onnx.GraphProto | None = None) -> onnx.GraphProto:
    """A loop's body: state times a weight; or an inner loop."""
    graph = Graph(name, seed)
    graph.input(f"{name}.number", [], INT64)
    graph.input(f"{name}.go", [], BOOL)
    state = graph.input(f"{name}.state", None)
    graph.node("Identity", f"{name}.go", outputs=[f"{name}.still"], name=f"{name}.identity")
    if inner is None:
        product = graph.node("MatMul", state, graph.weight("w", 32, 32), name=f"{name}.product")
        graph.node("Tanh", product, outputs=[f"{name}.next"], name=f"{name}.tanh")
    else:
        graph.node(
            "Loop", "times", "", state, body=inner, outputs=[f"{name}.next"], name=f"{name}.loop"
        )
    graph.output(f"{name}.still", [], BOOL)
    graph.output(f"{name}.next", None)
    return graph.finish()


def loop(seed: int = 1) -> Sample:
    """Loops within loops; the innermost has the weight."""
    graph = Graph("loop", seed)
    graph.input("x", ["batch", 32])
    graph.constant("times", np.array(2))
    state = graph.node("MatMul", "x", graph.weight("before", 32, 32))
    body = _body(seed, "outer", _body(seed, "middle", _body(seed, "inner")))
    graph.node("Loop", "times", "", state, body=body, outputs=["y"])
    graph.output("y", None)
    return Sample(graph.model(), ({"x": images(seed, 2, 32)},))


def scan(seed: int = 1) -> Sample:
    """Scan over a sequence with a weight in its body."""
    body = Graph("body", seed)
    body.input("state", [32])
    body.input("row", [32])
    weighted = body.node("MatMul", "state", body.weight("w", 32, 32), name="body.product")
    body.node("Add", weighted, "row", outputs=["next"], name="body.add")
    body.node("Identity", "next", outputs=["out"], name="body.out")
    body.output("next", [32])
    body.output("out", [32])
    graph = Graph("scan", seed)
    graph.input("x", [5, 32])
    graph.node(
        "Scan",
        graph.weight("initial", 32),
        "x",
        body=body.finish(),
        num_scan_inputs=1,
        outputs=["last", "all"],
    )
    graph.output("last", [32])
    graph.output("all", [5, 32])
    return Sample(graph.model(), ({"x": images(seed, 5, 32)},))


def function(seed: int = 1) -> Sample:
    """A function of the model's own domain, called twice."""
    graph = Graph("function", seed)
    graph.input("x", ["batch", 64])
    hidden = graph.node("Layer", "x", graph.weight("first", 64, 64), domain="own")
    graph.node("Layer", hidden, graph.weight("second", 64, 32), domain="own", outputs=["y"])
    graph.output("y", ["batch", 32])
    model = graph.model(domains=[("own", 1)])
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
    ]
    opsets = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("own", "Layer", ["a", "b"], ["d"], nodes, opsets))
    return Sample(model, ({"x": images(seed, 2, 64)},))


# --- other types than tensors ---------------------------------------------------------------------


def sequence(seed: int = 1) -> Sample:
    """Sequences in and out, and inside."""
    graph = Graph("sequence", seed)
    tensors = helper.make_tensor_type_proto(FLOAT, None)
    sequences = helper.make_sequence_type_proto(tensors)
    graph.inputs.append(helper.make_value_info("xs", sequences))
    graph.constant("place", np.array(1))
    row = graph.node("SequenceAt", "xs", "place")
    product = graph.node("MatMul", row, graph.weight("w", 64, 32))
    graph.node("SequenceInsert", "xs", product, outputs=["ys"])
    graph.node("ConcatFromSequence", "xs", axis=0, outputs=["y"])
    graph.outputs.append(helper.make_value_info("ys", sequences))
    graph.output("y", None)
    return Sample(graph.model(), ({"xs": [images(seed + n, 2, 64) for n in range(3)]},))


def optional(seed: int = 1) -> Sample:
    """An optional tensor that is there, and one that is not."""
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, ["n", 64]))
    present, absent = Graph("present", seed), Graph("absent", seed)
    value = present.node("OptionalGetElement", "x", name="present.get")
    weight = present.constant("w", weights(seed, "w", 64, 32))
    present.node("MatMul", value, weight, outputs=["present.y"], name="present.product")
    present.output("present.y", None)
    absent.constant("zeros", np.zeros((1, 32), np.float32))
    absent.node("Identity", "zeros", outputs=["absent.y"], name="absent.identity")
    absent.output("absent.y", None)
    graph = Graph("optional", seed)
    graph.inputs.append(helper.make_value_info("x", kind))
    has = graph.node("OptionalHasElement", "x")
    branches = {"then_branch": present.finish(), "else_branch": absent.finish()}
    graph.node("If", has, outputs=["y"], **branches)
    graph.output("y", None)
    return Sample(graph.model(), ({"x": images(seed, 2, 64)}, {"x": None}))


def strings(seed: int = 1) -> Sample:
    """A table of strings beside one of numbers."""
    graph = Graph("strings", seed)
    index = graph.input("index", ["n"], INT64)
    words = np.array([f"word {n} \N{SNOWMAN}" for n in range(40)], dtype=object)
    graph.constant("words", numpy_helper.from_array(words, "words"))
    graph.input("text", ["n"], STRING)
    word = graph.node("Gather", "words", index)
    graph.node("StringConcat", word, "text", outputs=["y"])
    graph.output("y", ["n"], STRING)
    graph.node("Gather", graph.weight("table", 40, 300), index, outputs=["numbers"])
    graph.output("numbers", ["n", 300])
    feeds = {"index": np.array([3, 0, 39]), "text": np.array(["a", "", "\N{SNOWMAN}"], object)}
    return Sample(graph.model(), (feeds,))


SAMPLES.update(
    {
        maker.__name__: maker
        for maker in (
            quantised_static,
            quantised_dynamic,
            blockwise,
            half,
            brain_float,
            weight_only,
            many_types,
            branches,
            constant_branch,
            loop,
            scan,
            function,
            sequence,
            optional,
            strings,
        )
    }
)
