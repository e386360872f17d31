"""The tensors in the pickle of a TorchScript module, and the pickle with some of them empty.

``data.pkl`` of a ``torch.jit.save`` archive is written by torch's C++ pickler
(``torch/csrc/jit/serialization/pickler.cpp``): nested objects, each with a dictionary of its
attributes. Nothing is looked up or called here. A tensor is found if it is an attribute of the
module, of an attribute of it, and so on; those in lists, dictionaries and tuples are torch's.

Theory of operation. Only a tensor whose arguments are written as that pickler writes them can be
emptied: then each number has one place in the pickle, and :meth:`ScriptPickle.emptied` puts others
there. All else is copied.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.torch_layout import STORAGE_TYPES, ElementType, check_view

__all__ = ["ScriptPickle", "ScriptTensor", "read_script_pickle"]

_MAX_DEPTH = 256
_EMPTY = (b"K\x00", b"K\x00", b"(K\x00t", b"(K\x01t")
"""Number of elements, offset, size and stride of an empty tensor."""


class _Item(NamedTuple):
    """A value on the stack, and where in the pickle it begins."""

    value: Any
    start: int


class _Tuple(NamedTuple):
    items: list[_Item]
    end: int

    def values(self) -> list[Any]:
        return [each.value for each in self.items]


class _Tensor(NamedTuple):
    """``arguments``: storage, offset, size, stride, requires_grad, hooks."""

    arguments: _Tuple


class _Global(NamedTuple):
    name: bytes


class _Object:
    """An instance of a class of the script; ``state``: its attributes, if it is a dictionary."""

    def __init__(self) -> None:
        self.state: Mapping[str, Any] = {}


class _Storage(NamedTuple):
    key: str
    element: ElementType
    elements: int
    place: tuple[int, int]
    """Of the number of elements."""


class _Opaque:
    """A value that is left to torch."""


class ScriptTensor(NamedTuple):
    """A tensor over the record ``data/<key>``; offset, size and stride in elements."""

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
    machine = _Machine(data)
    try:
        root = machine.run()
    except (AttributeError, LookupError, struct.error, TypeError, ValueError) as error:
        raise CorruptFile(f"pickle, before byte {machine.position}: {error!r}") from error
    if not isinstance(root, _Object):
        raise UnsupportedFormat("the pickle is not of a module")
    found = [
        tensor
        for path, each in _tensors(root)
        if (tensor := _described(data, path, each.arguments, machine.uses)) is not None
    ]
    return ScriptPickle(data, found)


def _tensors(root: _Object) -> Iterable[tuple[tuple[str, ...], _Tensor]]:
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


def _described(
    data: bytes, path: tuple[str, ...], arguments: _Tuple, uses: Counter[str]
) -> ScriptTensor | None:
    """Describe a tensor; None for one that is left to torch."""
    storage, offset, size, stride, *_ = arguments.values()
    if not isinstance(storage, _Storage) or uses[storage.key] != 1:
        return None
    shape, steps = [each.values() if isinstance(each, _Tuple) else [] for each in (size, stride)]
    _, *starts, _ = [each.start for each in arguments.items]
    places = [storage.place, *itertools.pairwise(starts)]
    numbers = [storage.elements, offset, shape, steps]
    if [data[start:end] for start, end in places] != list(map(_pickled, numbers)):
        return None
    check_view(storage.elements, offset, tuple(shape), tuple(steps))
    return ScriptTensor(
        path=path,
        key=storage.key,
        dtype=storage.element.dtype,
        storage_bytes=storage.elements * storage.element.size_bytes,
        offset=offset,
        size=tuple(shape),
        stride=tuple(steps),
        places=tuple(places),
    )


def _pickled(value: int | list[int]) -> bytes:
    """A number, or a tuple of numbers, as torch's pickler writes it."""
    if isinstance(value, list):
        return b"(" + b"".join(map(_pickled, value)) + b"t"
    for opcode, form, limit in ((b"K", "<B", 1 << 8), (b"M", "<H", 1 << 16), (b"J", "<i", 1 << 31)):
        if type(value) is int and 0 <= value < limit:
            return opcode + struct.pack(form, value)
    return b"\x8a\x08" + struct.pack("<q", value)


# --- the stack machine ----------------------------------------------------------------------------


class _Machine:
    """As ``pickle.Unpickler``, for the opcodes that torch's pickler writes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.uses: Counter[str] = Counter()
        """How often each storage is referred to."""
        self._start = 0
        self._stack: list[_Item] = []
        self._frames: list[tuple[list[_Item], int]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            self._start = self.position
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            action = _ACTIONS.get(opcode)
            if action is None:
                raise UnsupportedFormat(f"pickle opcode {opcode!r} at byte {self._start}")
            action(self)

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise CorruptFile(f"pickle ends inside an argument of {count} bytes")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any, start: int | None = None) -> None:
        self._stack.append(_Item(value, self._start if start is None else start))

    def _pop(self) -> Any:
        return self._stack.pop().value

    def _pop_frame(self) -> tuple[list[_Item], int]:
        items = self._stack
        self._stack, start = self._frames.pop()
        return items, start

    def _mark(self) -> None:
        self._frames.append((self._stack, self._start))
        self._stack = []

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1].value

    def _get(self, index: int) -> None:
        value = self._memo[index]
        if isinstance(value, _Storage):
            self.uses[value.key] += 1
        self._push(value)

    def _text(self) -> None:
        self._push(self._take(self._number("<I")).decode("utf-8", "surrogatepass"))

    def _global(self) -> None:
        end = self.data.index(b"\n", self.data.index(b"\n", self.position) + 1)
        name = self._take(end - self.position)
        self._take(1)
        if name.startswith(b"__torch__.torch.classes"):
            raise UnsupportedFormat(f"class {name!r}: only torch can restore it")
        self._push(_Global(name))

    def _tuple(self) -> None:
        items, start = self._pop_frame()
        self._push(_Tuple(items, self._start), start)

    def _tuple_of(self, count: int) -> None:
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        self._push(_Tuple(items, self._start), items[0].start if items else None)

    def _list(self) -> None:
        self._push(_Opaque())

    def _appends(self) -> None:
        self._pop_frame()

    def _items(self) -> None:
        items, _ = self._pop_frame()
        values = [each.value for each in items]
        attributes = self._stack[-1].value
        if isinstance(attributes, dict):
            pairs = zip(values[::2], values[1::2], strict=True)
            attributes.update({name: each for name, each in pairs if type(name) is str})

    def _new(self) -> None:
        self._stack.pop()
        start = self._stack.pop().start
        self._push(_Object(), start)

    def _build(self) -> None:
        state = self._pop()
        instance = self._stack[-1].value
        if isinstance(instance, _Object) and isinstance(state, dict):
            instance.state = state

    def _persistent(self) -> None:
        argument = self._stack.pop()
        _, kind, key, location, elements = argument.value.values()
        element = STORAGE_TYPES.get(kind.name.partition(b"\n")[2].decode())
        value: Any = _Opaque()
        if element is not None and location == "cpu" and type(key) is str and elements > 0:
            place = argument.value.items[-1].start, argument.value.end
            value = _Storage(key, element, elements, place)
        self.uses[key] += 1
        self._push(value, argument.start)

    def _call(self) -> None:
        arguments = self._pop()
        function = self._stack.pop()
        is_tensor = function.value == _TENSOR and len(arguments.items) == 6
        self._push(_Tensor(arguments) if is_tensor else _Opaque(), function.start)


_TENSOR = _Global(b"torch._utils\n_rebuild_tensor_v2")
_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda machine: _refuse_protocol(machine._take(1)),
    b"c": _Machine._global,
    b"q": lambda machine: machine._put(machine._take(1)[0]),
    b"r": lambda machine: machine._put(machine._number("<I")),
    b"h": lambda machine: machine._get(machine._take(1)[0]),
    b"j": lambda machine: machine._get(machine._number("<I")),
    b"(": _Machine._mark,
    b")": lambda machine: machine._tuple_of(0),
    b"\x85": lambda machine: machine._tuple_of(1),
    b"\x86": lambda machine: machine._tuple_of(2),
    b"\x87": lambda machine: machine._tuple_of(3),
    b"t": _Machine._tuple,
    b"]": _Machine._list,
    b"e": _Machine._appends,
    b"a": lambda machine: machine._stack.pop() and None,
    b"}": lambda machine: machine._push({}),
    b"u": _Machine._items,
    b"\x81": _Machine._new,
    b"b": _Machine._build,
    b"R": _Machine._call,
    b"Q": _Machine._persistent,
    b"N": lambda machine: machine._push(None),
    b"\x88": lambda machine: machine._push(True),
    b"\x89": lambda machine: machine._push(False),
    b"K": lambda machine: machine._push(machine._number("<B")),
    b"M": lambda machine: machine._push(machine._number("<H")),
    b"J": lambda machine: machine._push(machine._number("<i")),
    b"G": lambda machine: machine._push(machine._number(">d")),
    b"X": _Machine._text,
    b"\x8a": lambda machine: machine._push(
        int.from_bytes(machine._take(machine._take(1)[0]), "little", signed=True)
    ),
}


def _refuse_protocol(version: bytes) -> None:
    if version != b"\x02":
        raise UnsupportedFormat(f"pickle of protocol {version!r}")
