"""An ONNX graph as a line of nodes that can be cut: what crosses a cut, and the model of a piece.

Works on graphs without their weights: initializers of any size stay where they are, and a piece
refers to the same bytes of the same file. Knows nothing of sessions. Needs the package ``onnx``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trims_shim.errors import StagingError

__all__ = ["OnnxGraph", "onnx_package"]

_ONNXRUNTIME = (1, 21)
"""The oldest that reads the weights of a model given as bytes from a folder that it is told."""
_OF_SHAPE = frozenset(["Shape", "Size"])
"""Operators that look at shapes only."""
_SHAPED_BY_ALL = frozenset({
    "BeamSearch", "BlackmanWindow", "ConstantOfShape", "DynamicTimeWarping", "GreedySearch",
    "HammingWindow", "HannWindow", "If", "ImageDecoder", "Loop", "MelWeightMatrix",
    "NonMaxSuppression", "NonZero", "Range", "Sampling", "Scan", "SequenceMap", "StringNormalizer",
    "StringSplit", "Tokenizer", "Unique", "WhisperBeamSearch",
})  # fmt: skip
"""Operators whose results have shapes that depend on the contents of their inputs."""
_SHAPED_BY_LATER = frozenset({
    "AffineGrid", "BifurcationDetector", "CenterCropPad", "Col2Im", "Compress",
    "ConvTransposeWithDynamicPads", "CropAndResize", "DFT", "Expand", "ExpandDims", "MaxUnpool",
    "OneHot", "Pad", "Reshape", "Resize", "STFT", "SequenceAt", "SequenceErase", "SequenceInsert",
    "Slice", "Split", "SplitToSequence", "Tile", "TopK", "Upsample",
})  # fmt: skip
"""Those where only inputs after the first do so."""
_GRAPH, _GRAPHS = 5, 10
"""AttributeProto.AttributeType"""


def onnx_package() -> Any:
    """The package ``onnx``. Raises StagingError where it, or onnxruntime 1.21, is not installed."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise StagingError(_needs(str(error))) from error
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < _ONNXRUNTIME:
        raise StagingError(_needs(f"this is onnxruntime {onnxruntime.__version__}"))
    return onnx


def _needs(found: str) -> str:
    oldest = ".".join(map(str, _ONNXRUNTIME))
    return (
        f"slicing an ONNX model needs the packages onnx and onnxruntime, {oldest} or later: run "
        f"`pip install 'trims-shim[onnx]'` ({found})"
    )


class OnnxGraph:
    """The nodes of a model, each after those that it needs. Raises StagingError."""

    def __init__(self, path: str) -> None:
        self._onnx = onnx = onnx_package()
        model = onnx.load(path, load_external_data=False)
        graph = model.graph
        self.nodes = _sorted(graph.node)
        self._initializers = {each.name: each for each in graph.initializer}
        if graph.sparse_initializer:
            raise StagingError("the model has sparse initializers, which cannot be cut")
        self.inputs = [each.name for each in graph.input if each.name not in self._initializers]
        self.outputs = [each.name for each in graph.output]
        for number, node in enumerate(self.nodes):
            node.name = f"{number}:{node.name}"  # unique, for the profile
        self._declared = {each.name: each for each in (*graph.input, *graph.output)}
        self._rest = onnx.ModelProto()
        """All but the graph's content."""
        self._rest.CopyFrom(model)
        for part in ("node", "initializer", "input", "output", "value_info"):
            self._rest.graph.ClearField(part)
        self._made = dict.fromkeys(self.inputs, -1)
        self._last_use = dict.fromkeys(self.outputs, len(self.nodes))
        self._of_content = set(self.inputs)
        self._shaped_by_content: set[str] = set()
        self._trace()

    def _trace(self) -> None:
        for number, node in enumerate(self.nodes):
            used = set(_used_by(node))
            for name in used:
                self._last_use[name] = max(number, self._last_use.get(name, -1))
            made = [name for name in node.output if name]
            self._made |= dict.fromkeys(made, number)
            if self._is_shaped_by_content(node, used):
                self._shaped_by_content.update(made)
            looks_at = self._shaped_by_content if node.op_type in _OF_SHAPE else self._of_content
            if not looks_at.isdisjoint(used):
                self._of_content.update(made)

    def _is_shaped_by_content(self, node: Any, used: Collection[str]) -> bool:
        if node.op_type in _OF_SHAPE:
            return False
        shaping: Collection[str] = ()
        if node.op_type in _SHAPED_BY_ALL:
            shaping = used
        elif node.op_type in _SHAPED_BY_LATER:
            shaping = node.input[1:]
        return not (
            self._shaped_by_content.isdisjoint(used) and self._of_content.isdisjoint(shaping)
        )

    def depends_on_content(self, name: str) -> bool:
        """Whether a value depends on the contents of the inputs, not only on their shapes."""
        return name in self._of_content

    def crossing(self, position: int) -> list[str]:
        """The values made, or given, before the node at ``position`` and used there or later."""
        return [
            name
            for name, made in self._made.items()
            if made < position <= self._last_use.get(name, -1)
        ]

    def needed(self, start: int, end: int, given: Sequence[str]) -> list[str]:
        """The ``given`` values that the nodes from ``start`` to before ``end`` use."""
        used = {name for node in self.nodes[start:end] for name in _used_by(node)}
        return [name for name in given if name in used]

    def with_outputs(self, names: Collection[str]) -> bytes:
        """The whole model, which returns these values as well."""
        outputs = [*self.outputs, *(name for name in names if name not in self.outputs)]
        return self.piece(0, len(self.nodes), dict.fromkeys(self.inputs), outputs)

    def piece(
        self, start: int, end: int, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> bytes:
        """A model of the nodes from ``start`` to before ``end``.

        ``inputs`` are arrays by name, with the types of the piece's inputs. Inputs of the whole
        model need none.
        """
        model = self._onnx.ModelProto()
        model.CopyFrom(self._rest)
        graph = model.graph
        graph.node.extend(self.nodes[start:end])
        used = {name for node in graph.node for name in _used_by(node)}.union(outputs)
        graph.initializer.extend(
            self._initializers[name] for name in self._initializers if name in used
        )
        graph.input.extend(
            self._declared.get(name) or self._like(name, array) for name, array in inputs.items()
        )
        # onnxruntime finds the types of values that are not declared.
        nothing = self._onnx.ValueInfoProto
        graph.output.extend(self._declared.get(name) or nothing(name=name) for name in outputs)
        content: bytes = model.SerializeToString()
        return content

    def _like(self, name: str, array: Any) -> Any:
        element = self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self._onnx.helper.make_tensor_value_info(name, element, [None] * array.ndim)


def _sorted(nodes: Sequence[Any]) -> list[Any]:
    """The nodes, each after those that it needs: onnxruntime runs files in any order, too."""
    makers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    needs = [[makers[name] for name in _used_by(node) if name in makers] for node in nodes]
    order: dict[int, None] = {}
    waiting = list(reversed(range(len(nodes))))
    while waiting:
        number = waiting[-1]
        missing = [each for each in needs[number] if each not in order]
        waiting += reversed(missing)
        if not missing:
            order.setdefault(waiting.pop())
    return [nodes[number] for number in order]


def _used_by(node: Any) -> Iterator[str]:
    """Values of the graph that a node needs; also those that only its sub-graphs need."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for graph in (
            [attribute.g, *attribute.graphs] if attribute.type in (_GRAPH, _GRAPHS) else ()
        ):
            own = {each.name for each in (*graph.input, *graph.initializer)}
            own.update(name for each in graph.node for name in each.output)
            for each in graph.node:
                yield from (name for name in _used_by(each) if name not in own)
            yield from (each.name for each in graph.output if each.name not in own)
