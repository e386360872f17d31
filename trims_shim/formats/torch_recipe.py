"""What the pickle of a plain state dict would build, read without executing it.

Owns the meaning of ``data.pkl`` in a ``torch.save`` archive: dicts, OrderedDicts, lists, tuples and
plain constants holding tensors and parameters. Torch is not imported and nothing in the pickle is
looked up or called: a GLOBAL is a name in a table of five functions, storage classes and dtypes, or
the whole pickle is refused. Reading and building are separate, so that nothing is built from a
pickle that turns out to be refused:

    recipe = read_recipe(pickle)            # FormatError: let torch.load decide
    storages = [... for spec in recipe.storages]
    tensors = [... for spec in recipe.tensors]
    parameters = [... for spec in recipe.parameters]
    result = recipe.assemble(tensors, parameters)

Invariant: the result is what ``torch.load`` returns for the same bytes, with and without
``weights_only``: in types, order, and which objects are the same object. What one of them refuses,
warns about or treats differently is refused here (``torch/_weights_only_unpickler.py``,
``torch/_utils.py`` and ``_load`` of ``torch/serialization.py``, read at 2.15). So is any memo
numbering but the consecutive one that every CPython pickler writes.

A table maps opcodes to actions. Nearly all bytes of a state dict are the same thirty opcodes again
for each tensor, so such runs are recognised whole (:mod:`trims_shim.formats.torch_runs`).
"""

from __future__ import annotations

import reprlib
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trims_shim.errors import CorruptFile, UnsupportedFormat
from trims_shim.formats.torch_layout import (
    ELEMENT_TYPES,
    STORAGE_TYPES,
    UNTYPED_DTYPES,
    ParameterSpec,
    StorageSpec,
    TensorSpec,
    check_view,
)
from trims_shim.formats.torch_runs import (
    HIDDEN,
    METADATA_RUN,
    Global,
    Node,
    TensorRuns,
    ValueNode,
    consecutive,
)

__all__ = ["ParameterSpec", "Recipe", "StorageSpec", "TensorSpec", "read_recipe"]


class Recipe:
    """The objects to build, in this order; :meth:`assemble` puts them together, once."""

    __slots__ = ("_reader", "parameters", "storages", "tensors")

    def __init__(self, reader: _Reader) -> None:
        self.storages: Sequence[StorageSpec] = reader.storages
        self.tensors: Sequence[TensorSpec] = reader.tensors
        self.parameters: Sequence[ParameterSpec] = reader.parameters
        self._reader: _Reader | None = reader

    def assemble(self, tensors: Sequence[Any], parameters: Sequence[Any]) -> Any:
        """The object graph around built tensors and parameters (as many as announced).

        The containers are handed out, not copied: a second call raises RuntimeError.
        """
        reader, self._reader = self._reader, None
        if reader is None:
            raise RuntimeError("a recipe is assembled once")
        if len(tensors) != len(self.tensors) or len(parameters) != len(self.parameters):
            raise ValueError("a recipe needs every tensor and parameter it announces")
        return reader.assemble([*tensors, *reversed(parameters)])


def read_recipe(data: bytes, *, interns_names: bool = False) -> Recipe:
    """The recipe in a pickle (the whole of ``data.pkl``).

    ``interns_names``: names of attributes are interned, as the module pickle does and torch's
    unpickler for ``weights_only`` does not; it shows in what is pickled again with others.
    Raises CorruptFile if it is no pickle, UnsupportedFormat if only torch can tell what it means.
    Time and memory are linear in its length.
    """
    reader = _Reader(data, interns_names=interns_names)
    try:
        reader.run()
    except (IndexError, UnicodeDecodeError) as error:
        raise CorruptFile(f"pickle, before byte {reader.position}: {error}") from error
    return Recipe(reader)


class _Tuple(Node):
    """A tuple that holds nodes. ``is_data``: it may become a part of the result."""

    __slots__ = ("is_data", "items", "value")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.is_data = all(_is_data(item) for item in items)
        self.value: Any = None


class _Storage(Node):
    """A reference to ``storages[index]``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_ORDERED_DICT = Global("collections.OrderedDict")
_ENCODE = Global("_codecs.encode")
_TENSOR_V2 = Global("torch._utils._rebuild_tensor_v2")
_TENSOR_V3 = Global("torch._utils._rebuild_tensor_v3")
_PARAMETER = Global("torch._utils._rebuild_parameter")
_GLOBALS = {
    b"collections\nOrderedDict": _ORDERED_DICT,
    b"_codecs\nencode": _ENCODE,
    b"torch._utils\n_rebuild_tensor_v2": _TENSOR_V2,
    b"torch._utils\n_rebuild_tensor_v3": _TENSOR_V3,
    b"torch._utils\n_rebuild_parameter": _PARAMETER,
    b"torch.storage\nUntypedStorage": Global("UntypedStorage", is_storage=True),
    **{
        b"torch\n" + name.encode(): Global(name, is_storage=True)
        for name in STORAGE_TYPES
        if name != "UntypedStorage"
    },
    **{b"torch\n" + name.encode(): Global(name, is_dtype=True) for name in UNTYPED_DTYPES},
}

_INT4 = struct.Struct("<i")
_COUNT2 = struct.Struct("<H")
_COUNT4 = struct.Struct("<I")
_FLOAT = struct.Struct(">d")
_KEY_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
_MAX_KEY_PARTS = 64
_DICT_TYPES = (dict, OrderedDict)
_CONTAINER_TYPES = frozenset({dict, OrderedDict, list, tuple, _Tuple})


def _is_data(item: object) -> bool:
    if not isinstance(item, Node):
        return True
    return type(item) is ValueNode or (type(item) is _Tuple and item.is_data)


class _Reader:
    """The state of one reading: a stack machine as in ``pickle.Unpickler``.

    Containers are made as they are read. Where a tensor belongs they hold None, and ``_slots`` says
    which tensor goes there (``_tuple_slots`` which tuple around one). ``_waiting``, ``_shared`` and
    ``_hooks`` hold ids of objects that the slots and the memo keep alive.
    """

    __slots__ = (
        "_arguments",
        "_frames",
        "_hooks",
        "_interns_names",
        "_memo",
        "_root",
        "_runs",
        "_shared",
        "_slots",
        "_storage_index",
        "_tuple_slots",
        "_tuples",
        "_waiting",
        "data",
        "parameters",
        "position",
        "stack",
        "storages",
        "tensors",
    )

    def __init__(self, data: bytes, *, interns_names: bool) -> None:
        self.data = data
        self.position = 2
        self._interns_names = interns_names
        self.stack: list[Any] = []
        self.storages: list[StorageSpec] = []
        self.tensors: list[TensorSpec] = []
        self.parameters: list[ParameterSpec] = []
        self._frames: list[list[Any]] = []
        self._memo: list[Any] = []
        self._storage_index: dict[str, int] = {}
        self._slots: list[tuple[Any, Any, int]] = []
        self._tuple_slots: list[tuple[Any, Any, _Tuple]] = []
        self._tuples: list[_Tuple] = []
        self._waiting: set[int] = set()
        self._hooks: dict[int, OrderedDict[Any, Any]] = {}
        self._arguments: dict[int, _Tuple] = {}
        self._shared: set[int] = set()
        self._runs = TensorRuns(
            data, self._memo, self.share_storage, function=_TENSOR_V2, hooks=_ORDERED_DICT
        )
        self._root: Any = None

    def run(self) -> None:
        """Read all of the pickle."""
        data = self.data
        if data[:2] != b"\x80\x02":
            raise UnsupportedFormat(f"pickle begins with {data[:2]!r}: not protocol 2")
        actions = _ACTIONS
        try:
            while (opcode := data[self.position]) != _STOP:
                self.position += 1
                actions[opcode](self)
            self._finish()
        finally:
            # It refers to this reader, which will hold the tensors. Such a cycle would keep a
            # model, its mapping and its lease until the garbage collector runs; if the pickle is
            # refused, it would keep the pickle, which may be large, too.
            del self._runs

    def assemble(self, values: Sequence[Any]) -> Any:
        """The result. ``values``: tensors, then parameters reversed: their indices are negative."""
        for container, key, index in self._slots:
            container[key] = values[index]
        for node in self._tuples:
            node.value = tuple([_resolved(item, values) for item in node.items])
        for container, key, node in self._tuple_slots:
            container[key] = node.value
        return _resolved(self._root, values)

    def share_storage(self, kind: Global, key: Any, location: Any, elements: Any) -> int:
        """Index of the storage of this key; it must be described the same each time."""
        if type(key) is not str or type(location) is not str or type(elements) is not int:
            raise UnsupportedFormat(f"storage {reprlib.repr((key, location, elements))}: not plain")
        element = STORAGE_TYPES[kind.name]
        size_bytes = elements * element.size_bytes
        if not 0 <= size_bytes < 1 << 63:
            raise UnsupportedFormat(f"storage {key!r} of {elements} elements")
        spec = StorageSpec(key, kind.name, element.dtype, location, elements, size_bytes)
        index = self._storage_index.get(key)
        if index is None:
            index = self._storage_index[key] = len(self.storages)
            self.storages.append(spec)
        elif self.storages[index] != spec:
            raise UnsupportedFormat(f"storage {key!r}: described in two ways")
        elif not elements:
            # The tensors share one storage from torch 2.15 on, and have each their own before.
            raise UnsupportedFormat(f"storage {key!r}: empty, and used twice")
        return index

    # Stack machine

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise CorruptFile(f"pickle ends inside an argument of {count} bytes")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _pop_frame(self) -> list[Any]:
        items = self.stack
        self.stack = self._frames.pop()
        return items

    def _refuse_opcode(self) -> NoReturn:
        at = self.position - 1
        raise UnsupportedFormat(f"pickle opcode {self.data[at]:#04x} at byte {at}")

    def _mark(self) -> None:
        self._frames.append(self.stack)
        self.stack = []

    def _get(self, index: int) -> None:
        item = self._memo[index]
        kind = type(item)
        if kind in _CONTAINER_TYPES:
            if id(item) in self._hooks:
                raise UnsupportedFormat("pickle reuses the backward hooks of a tensor")
            if id(item) in self._arguments:
                raise UnsupportedFormat("pickle uses the arguments of a call twice")
            self._shared.add(id(item))
        elif item is HIDDEN:
            raise UnsupportedFormat("pickle reuses an argument of a tensor")
        self.stack.append(item)

    def _binget(self) -> None:
        self._get(self._take(1)[0])

    def _long_binget(self) -> None:
        self._get(_COUNT4.unpack(self._take(4))[0])

    def _put(self, index: int) -> None:
        if index != len(self._memo):
            raise UnsupportedFormat(f"pickle memo {index} follows {len(self._memo) - 1}")
        self._memo.append(self.stack[-1])

    def _binput(self) -> None:
        self._put(self._take(1)[0])

    def _long_binput(self) -> None:
        self._put(_COUNT4.unpack(self._take(4))[0])

    # Constants

    def _unicode(self) -> None:
        if self.tensors and self._take_run():
            return
        text = self._take(_COUNT4.unpack(self._take(4))[0])
        self.stack.append(text.decode("utf-8", "surrogatepass"))

    def _take_run(self) -> bool:
        start = self.position - 1
        end = self._runs.read(start, self.stack, self.tensors)
        if end == start:
            end = self._take_metadata(start)
        self.position = max(end, self.position)
        return end > start

    def _take_metadata(self, start: int) -> int:
        """Entries ``name: {'version': 1}`` of ``_metadata``, one for each module of a model."""
        data, memo = self.data, self._memo
        end = start
        for match in consecutive(METADATA_RUN, data, start):
            length, name, put, _, second, key, number = match.groups()
            first, next_one, index = [
                int.from_bytes(each[1:], "little") for each in (put, second, key)
            ]
            if length[0] != len(name) or (first, next_one) != (len(memo), len(memo) + 1):
                break
            if type(memo[index]) is not str:
                break
            text, inner = name.decode(), {memo[index]: number[0]}
            memo += (text, inner)
            self.stack += (text, inner)
            end = match.end()
        return end

    def _integer1(self) -> None:
        self.stack.append(self._take(1)[0])

    def _integer2(self) -> None:
        self.stack.append(_COUNT2.unpack(self._take(2))[0])

    def _integer4(self) -> None:
        self.stack.append(_INT4.unpack(self._take(4))[0])

    def _long1(self) -> None:
        digits = self._take(self._take(1)[0])
        self.stack.append(int.from_bytes(digits, "little", signed=True))

    def _float(self) -> None:
        self.stack.append(_FLOAT.unpack(self._take(8))[0])

    # Containers

    def _add_tuple(self, items: list[Any]) -> None:
        if any(isinstance(item, Node) for item in items):
            node = _Tuple(items)
            if node.is_data:
                self._tuples.append(node)
            self.stack.append(node)
        else:
            self.stack.append(tuple(items))

    def _tuple(self) -> None:
        self._add_tuple(self._pop_frame())

    def _short_tuple(self) -> None:
        count = self.data[self.position - 1] - 0x84
        if len(self.stack) < count:
            raise CorruptFile("pickle makes a tuple of more than there is")
        items = self.stack[-count:]
        del self.stack[-count:]
        self._add_tuple(items)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self._pop_frame())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise UnsupportedFormat(f"pickle appends to {_described(target)}")
        for item in items:
            if isinstance(item, Node):
                self._defer(target, len(target), item)
                item = None
            target.append(item)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_frame())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICT_TYPES:
            raise UnsupportedFormat(f"pickle sets items of {_described(target)}")
        if len(items) % 2:
            raise CorruptFile("pickle sets a key without a value")
        expected = len(target) + len(items) // 2
        slots = self._slots
        filled = len(slots)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                _check_key(key)
            if type(value) is ValueNode:
                slots.append((target, key, value.index))
                target[key] = None
            elif isinstance(value, Node):
                self._defer(target, key, value)
                target[key] = None
            else:
                target[key] = value
        if len(target) != expected:
            raise UnsupportedFormat("pickle sets a key twice")
        if len(slots) != filled:
            self._waiting.add(id(target))

    def _defer(self, target: Any, key: Any, node: Node) -> None:
        self._waiting.add(id(target))
        if type(node) is ValueNode:
            self._slots.append((target, key, node.index))
        elif type(node) is _Tuple and node.is_data:
            self._tuple_slots.append((target, key, node))
        else:
            raise UnsupportedFormat(f"pickle holds {_described(node)} as data")

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not OrderedDict or type(state) is not dict:
            raise UnsupportedFormat(f"pickle sets the state of {_described(target)}")
        if not all(type(key) is str for key in state):
            raise UnsupportedFormat("pickle sets an attribute whose name is not a string")
        # A pickle would call it with the next state.
        if "__setstate__" in state:
            raise UnsupportedFormat("pickle sets a method as an attribute")
        # The state is copied now: a None that waits for its tensor would stay.
        if id(state) in self._waiting:
            raise UnsupportedFormat("pickle sets a tensor as an attribute")
        if self._interns_names:
            state = {sys.intern(name): value for name, value in state.items()}
        target.__dict__.update(state)

    # Globals, calls and storages

    def _global(self) -> None:
        data, start = self.data, self.position
        middle = data.find(b"\n", start)
        end = data.find(b"\n", middle + 1)
        if middle < 0 or end < 0:
            raise CorruptFile("pickle ends inside the name of a global")
        self.position = end + 1
        known = _GLOBALS.get(data[start:end])
        if known is None:
            raise UnsupportedFormat(f"pickle names {data[start:end][:200]!r}")
        self.stack.append(known)

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        items: Any = arguments.items if type(arguments) is _Tuple else arguments
        if type(arguments) not in (_Tuple, tuple) or type(function) is not Global:
            raise UnsupportedFormat(f"pickle calls {_described(function)}")
        if type(arguments) is _Tuple:
            self._take_arguments(arguments)
        if function is _ORDERED_DICT and items == ():
            self.stack.append(OrderedDict())
        elif function is _TENSOR_V2 and len(items) == 6:
            self._add_tensor(items, None)
        elif function is _TENSOR_V3 and len(items) == 7 and items[6] is not None:
            self._add_tensor(items[:6], items[6])
        elif function is _PARAMETER and len(items) == 3:
            self._add_parameter(*items)
        elif function is _ENCODE and len(items) == 2:
            self._encode(*items)
        else:
            raise UnsupportedFormat(f"pickle calls {function.name} with {len(items)} arguments")

    def _add_tensor(self, arguments: Sequence[Any], dtype: Any) -> None:
        storage, offset, size, stride, requires_grad, hooks = arguments
        if type(storage) is not _Storage or type(requires_grad) is not bool:
            raise UnsupportedFormat("pickle rebuilds a tensor from odd arguments")
        self._take_hooks(hooks)
        spec = self.storages[storage.index]
        is_untyped = spec.storage_type == "UntypedStorage"
        name, elements = spec.dtype, spec.elements
        if dtype is not None:
            if not is_untyped or type(dtype) is not Global or not dtype.is_dtype:
                raise UnsupportedFormat(f"pickle rebuilds a tensor as {_described(dtype)}")
            name = dtype.name
            elements //= UNTYPED_DTYPES[name].size_bytes
        elif is_untyped:
            raise UnsupportedFormat("pickle rebuilds a tensor without a dtype")
        # _v3 makes the tensor require gradients before set_, which torch may then refuse.
        if requires_grad and (dtype is not None or not ELEMENT_TYPES[name].is_differentiable):
            raise UnsupportedFormat(f"pickle rebuilds a tensor of {name} with gradients")
        view = check_view(elements, offset, size, stride)
        self.stack.append(ValueNode(len(self.tensors)))
        self.tensors.append(TensorSpec(storage.index, *view, requires_grad, name))

    def _add_parameter(self, tensor: Any, requires_grad: Any, hooks: Any) -> None:
        if type(tensor) is not ValueNode or tensor.index < 0 or type(requires_grad) is not bool:
            raise UnsupportedFormat("pickle rebuilds a parameter from odd arguments")
        self._take_hooks(hooks)
        name = self.tensors[tensor.index].dtype
        if requires_grad and not ELEMENT_TYPES[name].is_differentiable:
            raise UnsupportedFormat(f"pickle rebuilds a parameter of {name} with gradients")
        self.stack.append(ValueNode(~len(self.parameters)))
        self.parameters.append(ParameterSpec(tensor.index, requires_grad))

    def _take_arguments(self, arguments: _Tuple) -> None:
        """Keep the tuple, so that :meth:`_get` can see whether it is used again.

        It holds the dict of hooks, which two tensors, or a tensor and the data, would share.
        """
        if id(arguments) in self._shared:
            raise UnsupportedFormat("pickle uses the arguments of a call twice")
        self._arguments[id(arguments)] = arguments

    def _take_hooks(self, hooks: Any) -> None:
        """Keep the dict, so that :meth:`_finish` can see whether it was filled later."""
        if type(hooks) is not OrderedDict or id(hooks) in self._shared:
            raise UnsupportedFormat(f"pickle has {_described(hooks)} as backward hooks")
        self._hooks[id(hooks)] = hooks

    def _encode(self, text: Any, encoding: Any) -> None:
        # How pickle writes bytes with protocol 2.
        if type(text) is not str or encoding != "latin1":
            raise UnsupportedFormat("pickle encodes something else than bytes")
        try:
            self.stack.append(text.encode("latin1"))
        except UnicodeEncodeError as error:
            raise UnsupportedFormat("pickle encodes text as bytes") from error

    def _persistent(self) -> None:
        identifier = self.stack.pop()
        if type(identifier) is not _Tuple or len(identifier.items) != 5:
            raise UnsupportedFormat("pickle refers to something else than a storage")
        kind, storage_type, key, location, elements = identifier.items
        if kind != "storage" or type(storage_type) is not Global or not storage_type.is_storage:
            raise UnsupportedFormat("pickle refers to something else than a storage")
        self.stack.append(_Storage(self.share_storage(storage_type, key, location, elements)))

    # End

    def _finish(self) -> None:
        if self.position + 1 != len(self.data):
            raise UnsupportedFormat("pickle is followed by something else")
        if len(self.stack) != 1 or self._frames:
            raise CorruptFile("pickle ends with other than one object")
        self._root = self.stack.pop()
        if not _is_data(self._root):
            raise UnsupportedFormat(f"pickle holds {_described(self._root)} as data")
        if any(hooks or vars(hooks) for hooks in self._hooks.values()):
            raise UnsupportedFormat("pickle has backward hooks")
        if self._shared:
            self._check_acyclic()

    def _check_acyclic(self) -> None:
        """Only an object taken from the memo can be inside itself. Depth first, without recursion:
        a pickle can nest deeper than the interpreter's stack."""
        deferred: dict[int, list[_Tuple]] = {}
        for container, _, node in self._tuple_slots:
            deferred.setdefault(id(container), []).append(node)
        is_open: dict[int, bool] = {}
        pending: list[tuple[Any, bool]] = [(self._root, False)]
        while pending:
            item, is_left = pending.pop()
            if is_left:
                is_open[id(item)] = False
                continue
            if type(item) not in _CONTAINER_TYPES or is_open.get(id(item)) is False:
                continue
            if is_open.get(id(item)):
                raise UnsupportedFormat("pickle holds an object that is inside itself")
            is_open[id(item)] = True
            pending.append((item, True))
            inner = [*_parts(item), *deferred.get(id(item), ())]
            pending.extend([(part, False) for part in inner])


def _parts(item: Any) -> list[Any]:
    if type(item) is _Tuple:
        return item.items
    if type(item) is dict:
        return list(item.values())
    if type(item) is OrderedDict:
        return [*item.values(), *vars(item).values()]
    return list(item)


def _check_key(key: Any) -> None:
    # Only tuples of few constants: hashing walks a tuple each time, and recurses on the C stack.
    parts = key if type(key) is tuple else (key,)
    if len(parts) > _MAX_KEY_PARTS or not {type(part) for part in parts} <= _KEY_TYPES:
        raise UnsupportedFormat(f"pickle has {_described(key)} as a key")


def _resolved(item: Any, values: Sequence[Any]) -> Any:
    if type(item) is ValueNode:
        return values[item.index]
    return item.value if type(item) is _Tuple else item


def _described(item: object) -> str:
    if type(item) is Global:
        return item.name
    return "a tensor" if type(item) is ValueNode else f"a {type(item).__name__.lstrip('_')}"


def _constant(make: Callable[[], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(make())


_STOP = ord(".")
_ACTIONS: list[Callable[[_Reader], None]] = [_Reader._refuse_opcode] * 256
for _opcode, _action in {
    "(": _Reader._mark,
    ")": _constant(tuple),
    "G": _Reader._float,
    "J": _Reader._integer4,
    "K": _Reader._integer1,
    "M": _Reader._integer2,
    "N": _constant(lambda: None),
    "Q": _Reader._persistent,
    "R": _Reader._reduce,
    "X": _Reader._unicode,
    "]": _constant(list),
    "a": _Reader._append,
    "b": _Reader._build,
    "c": _Reader._global,
    "e": _Reader._appends,
    "h": _Reader._binget,
    "j": _Reader._long_binget,
    "q": _Reader._binput,
    "r": _Reader._long_binput,
    "s": _Reader._set_item,
    "t": _Reader._tuple,
    "u": _Reader._set_items,
    "}": _constant(dict),
    "\x85": _Reader._short_tuple,
    "\x86": _Reader._short_tuple,
    "\x87": _Reader._short_tuple,
    "\x88": _constant(lambda: True),
    "\x89": _constant(lambda: False),
    "\x8a": _Reader._long1,
}.items():
    _ACTIONS[ord(_opcode)] = _action
