"""The tensors in the pickle of a TorchScript module, and the pickle with some of them empty.

``data.pkl`` of a ``torch.jit.save`` archive is written by torch's C++ pickler
(``torch/csrc/jit/serialization/pickler.cpp``): nested objects, each with a dictionary of its
attributes. Python's unpickler reads it with stand-ins for all that it names, so nothing of the file
is imported or called. A tensor is found if it is an attribute of the module, of an attribute of it,
and so on; those in lists, dictionaries and tuples are torch's.

Theory of operation. The numbers of a tensor are looked for as that pickler writes them, all at
once, behind the key of its storage. Only where they are found once, and are the numbers that were
unpickled, can the tensor be emptied. An archive that is made to deceive this gets an error from
torch, or a tensor that is not empty: either is noticed. Knows nothing of torch.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trims_shim import diagnostics
from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.torch_layout import STORAGE_TYPES, check_view

__all__ = ["ScriptPickle", "ScriptTensor", "read_script_pickle"]

_MAX_DEPTH = 256
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x08.{8})"
_TEXT = re.compile(
    rb"X(?P<length>.{4})(?P<key>\d+)(?:q(?P<memo>.)|r(?P<memo_wide>.{4}))", re.DOTALL
)
_TENSOR = re.compile(
    # The key may have been written before, as the name of an attribute.
    rb"(?:X(?P<length>.{4})(?P<key>\d+)(?:q.|r.{4})?|h(?P<memo>.)|j(?P<memo_wide>.{4}))"
    rb"(?:X\x03\0\0\0cpu(?:q.|r.{4})?|h.|j.{4})"  # location
    rb"(?P<elements>%(number)s)tQ(?:q.|r.{4})?(?P<offset>%(number)s)"
    rb"(?P<size>\(%(number)s*t)(?P<stride>\(%(number)s*t)[\x88\x89]" % {b"number": _NUMBER},
    re.DOTALL,
)
_EMPTY = (b"K\x00", b"K\x00", b"(K\x00t", b"(K\x01t")
"""Number of elements, offset, size and stride of an empty tensor."""


class ScriptTensor(NamedTuple):
    """A tensor over a record of its own; offset, size and stride in elements."""

    path: tuple[str, ...]
    """The attributes that lead to it."""
    key: str
    dtype: str
    storage_bytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    """Of the number of elements, offset, size and stride in the pickle."""

    @property
    def name(self) -> str:
        """Of its record."""
        return f"data/{self.key}"


class ScriptPickle:
    """What was found; tensors that share a record with others are not among :attr:`tensors`."""

    def __init__(self, data: bytes, tensors: list[ScriptTensor]) -> None:
        self._data = data
        self.tensors = tensors

    def emptied(self, tensors: Iterable[ScriptTensor]) -> bytes:
        """Return the pickle with these of its tensors empty; they need no records then."""
        edits = sorted(
            (place, new)
            for tensor in tensors
            for place, new in zip(tensor.places, _EMPTY, strict=True)
        )
        parts, position = [], 0
        for (start, end), new in edits:
            parts += [self._data[position:start], new]
            position = end
        return b"".join([*parts, self._data[position:]])


def read_script_pickle(data: bytes) -> ScriptPickle:
    """Read the whole of ``data.pkl``. Raises CorruptFile or UnsupportedFormat."""
    unpickler = _Unpickler(data)
    try:
        root = unpickler.load()
    except UnsupportedFormat:
        raise
    # Border: whatever Python's unpickler raises for bytes that are no pickle.
    except Exception as error:
        diagnostics.pass_on(error)
        raise CorruptFile(f"pickle: {type(error).__name__}: {error}") from error
    if not isinstance(root, _Object):
        raise UnsupportedFormat("the pickle is not of a module")
    places = _places(data)
    found = [
        described
        for path, tensor in _tensors(root)
        if unpickler.uses[tensor.storage.key] == 1
        and (described := _described(path, tensor, data, places)) is not None
    ]
    return ScriptPickle(data, found)


def _tensors(root: _Object) -> Iterator[tuple[tuple[str, ...], _Tensor]]:
    """The tensors below an object, once each, with the attributes that lead there."""
    seen: set[int] = set()
    todo: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(path) > _MAX_DEPTH:
            raise UnsupportedFormat(f"attributes at a depth of {len(path)}")
        if isinstance(value, _Object):
            todo += [((*path, name), each) for name, each in value.state.items()]
        elif isinstance(value, _Tensor):
            yield path, value


def _places(data: bytes) -> dict[str, tuple[tuple[int, int], ...]]:
    """By key of a storage, where the numbers of its only tensor are."""
    texts = {_memo(match): _text(match) for match in _TEXT.finditer(data)}
    found: dict[bytes, list[re.Match[bytes]]] = {}
    for match in _TENSOR.finditer(data):
        key = texts.get(_memo(match)) if match["key"] is None else _text(match)
        if key is not None:
            found.setdefault(key, []).append(match)
    return {
        key.decode(): tuple(match.span(name) for name in ("elements", "offset", "size", "stride"))
        for key, (match, *others) in found.items()
        if not others
    }


def _memo(match: re.Match[bytes]) -> int:
    return int.from_bytes(match["memo"] or match["memo_wide"] or b"", "little")


def _text(match: re.Match[bytes]) -> bytes | None:
    is_whole = int.from_bytes(match["length"], "little") == len(match["key"])
    return match["key"] if is_whole else None


def _described(
    path: tuple[str, ...],
    tensor: _Tensor,
    data: bytes,
    places: dict[str, tuple[tuple[int, int], ...]],
) -> ScriptTensor | None:
    """Describe a tensor; None for one that is left to torch."""
    storage, offset, size, stride = tensor
    element = STORAGE_TYPES.get(storage.kind)
    spans = places.get(storage.key)
    if element is None or storage.location != "cpu" or spans is None:
        return None
    written = b"".join([data[start:end] for start, end in spans])
    if pickle.loads(b"\x80\x02(%bt." % written) != (storage.elements, offset, size, stride):
        return None
    check_view(storage.elements, offset, size, stride)
    storage_bytes = storage.elements * element.size_bytes
    return ScriptTensor(
        path, storage.key, element.dtype, storage_bytes, offset, size, stride, spans
    )


# --- what stands in for what the pickle names -----------------------------------------------------


class _Object:
    """An object of the script; ``state``: its attributes, if it was written with them."""

    state: dict[str, Any]

    def __new__(cls, *_: Any) -> _Object:
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if type(state) is dict:
            self.state = {name: each for name, each in state.items() if type(name) is str}


class _Storage(NamedTuple):
    key: str
    kind: str
    location: str
    elements: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: Any
    size: Any
    stride: Any


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.uses: Counter[str] = Counter()
        """How many tensors use the storage of a key."""

    def find_class(self, module: str, name: str) -> Any:
        # The memo keeps what is returned: methods of this object would make a cycle.
        if module.startswith("__torch__.torch.classes"):
            raise UnsupportedFormat(f"class {module}.{name}: only torch can restore it")
        if module.startswith("__torch__"):
            return _Object
        if module == "torch":
            return name
        is_tensor = (module, name) == ("torch._utils", "_rebuild_tensor_v2")
        return functools.partial(_made if is_tensor else _other, self.uses)

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, location, elements = pid
        return _Storage(key, kind, location, elements)


def _made(
    uses: Counter[str],
    storage: _Storage,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any,
    _hooks: Any,
    *metadata: Any,
) -> _Tensor | None:
    uses[storage.key] += 1
    # Of a conjugate or negated view: what is laid over its bytes would be neither.
    return None if metadata else _Tensor(storage, offset, size, stride)


def _other(uses: Counter[str], *arguments: Any) -> None:
    """Stand in for a function whose result is left to torch."""
    uses.update(each.key for each in arguments if isinstance(each, _Storage))
