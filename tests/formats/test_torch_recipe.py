"""The reader of a state dict's pickle.

Promise: a recipe builds exactly what ``torch.load`` returns, with and without ``weights_only``;
what it cannot promise that for it refuses with a FormatError; it never runs, imports or allocates
what the pickle names.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trims_shim.errors import CorruptFile, FormatError, UnsupportedFormat
from trims_shim.formats import StorageSpec, TensorSpec, read_recipe
from trims_shim.formats.torch_layout import ELEMENT_TYPES, STORAGE_TYPES, UNTYPED_DTYPES

_FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def _shared_tensor() -> Any:
    tensor = _tensor(2, 3)
    return {"a": tensor, "b": tensor, "view": tensor[1:], "transposed": tensor.t()}


def _shared_parameter() -> Any:
    parameter = torch.nn.Parameter(_tensor(4))
    return [parameter, {"again": parameter}, parameter.data]


def _shared_containers() -> Any:
    inner = [1, _tensor(2)]
    values = {"inner": inner}
    pair = (inner, _tensor(1))
    return {"a": inner, "b": [inner, values], "c": values, "d": pair, "e": (pair, pair)}


def _ordered_with_attributes() -> Any:
    state = OrderedDict(weight=_tensor(2))
    state.note = {"version": 1, "of": [1, 2]}  # type: ignore[attr-defined]
    return state


def _long_model() -> Any:
    # More than one batch of SETITEMS (1000), memo indices of one and of four bytes.
    return {f"layers.{i}.proj.weight": _tensor(i % 3 + 1, 2) for i in range(1203)}


def _odd_names() -> Any:
    names = [
        "",
        "q",
        "naïve",
        "名前",
        "a" * 255,
        "b" * 256,
        "c" * 70000,
        "x\x00y",
        "\ud800",
        "X\n.",
    ]
    return {name: _tensor(2) for name in names}


def _wide_numbers() -> Any:
    base = torch.zeros(70000)
    return {
        "big": base,
        "offset": base[300:310],
        "offset2": base[66000:66002],
        "stride": base.as_strided((2, 3), (34000, 300), 5),
        "expanded": base[:1].expand(5, 4),
        "dims": _tensor(1, 2, 1, 2, 1, 2),
        "empty_dim": torch.zeros(3, 0, 2),
    }


_VALUES: dict[str, Any] = {
    "empty": dict,
    "tensor": lambda: _tensor(2, 3),
    "parameter": lambda: torch.nn.Parameter(_tensor(2)),
    "frozen parameter": lambda: torch.nn.Parameter(_tensor(2), requires_grad=False),
    "integer parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "requires_grad": lambda: [_tensor(2).requires_grad_(), _tensor(2)],
    "parameters": lambda: dict(torch.nn.Linear(3, 4).named_parameters()),
    "scalars": lambda: [torch.tensor(1.5), torch.tensor(2), torch.tensor(True)],
    "constants": lambda: [
        *(0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, -(2**40), 2**300, 10**90),
        *(0.0, -0.0, 1.5, float("nan"), float("inf"), True, False, None, "", "ä\ud83d", b"abc\xff"),
        *((), (1,), (1, "a"), (1, 2, 3), (1, 2, 3, 4), [], [[]], {}, OrderedDict()),
    ],
    "keys": lambda: {1: "a", 2.5: "b", None: "c", (1, "x"): "d", b"k": "e", False: "f", "": 0},
    "tuples of tensors": lambda: ((_tensor(1), (_tensor(2), "a")), {"x": (_tensor(3), [])}),
    "no elements": lambda: [torch.zeros(0), torch.zeros(0, 3), torch.zeros(2, 0).t()],
    "shared tensor": _shared_tensor,
    "shared parameter": _shared_parameter,
    "shared containers": _shared_containers,
    "attributes": _ordered_with_attributes,
    "long": _long_model,
    "odd names": _odd_names,
    "wide numbers": _wide_numbers,
    "optimizer": lambda: {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": _tensor(2)}, 1: {}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1]}],
    },
}


def _assert_as_torch(data: bytes, tools: Any, assert_same: Any) -> None:
    ours = tools.build(data)
    for weights_only in (True, False):
        theirs = torch.load(io.BytesIO(data), weights_only=weights_only)
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", _VALUES)
def test_the_result_is_that_of_torch_load(name: str, tools: Any, assert_same: Any) -> None:
    _assert_as_torch(tools.save(_VALUES[name]()), tools, assert_same)


@pytest.mark.parametrize("weights_only", [True, False])
def test_names_of_attributes_are_interned_where_pickle_does(weights_only: bool, tools: Any) -> None:
    data = tools.save(_ordered_with_attributes())
    theirs = torch.load(io.BytesIO(data), weights_only=weights_only)
    ours = tools.build(data, interns_names=not weights_only)
    found = [[name is sys.intern(name) for name in vars(each)] for each in (ours, theirs)]
    assert found == [[not weights_only] * len(vars(theirs))] * 2


@pytest.mark.parametrize("dtype", sorted(ELEMENT_TYPES))
def test_every_dtype(dtype: str, tools: Any, assert_same: Any) -> None:
    tensor = torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3)
    data = tools.save({"a": tensor, "b": tensor[1:], "c": tensor.clone()})
    _assert_as_torch(data, tools, assert_same)
    assert tensor.element_size() == ELEMENT_TYPES[dtype].size_bytes
    assert (
        tensor.dtype.is_floating_point
        or tensor.is_complex()
        or not (ELEMENT_TYPES[dtype].is_differentiable)
    )


def test_the_tables_name_what_torch_has() -> None:
    for name, element in STORAGE_TYPES.items():
        if name != "UntypedStorage":
            assert torch.serialization.StorageType(name).dtype is getattr(torch, element.dtype)
    for dtype in UNTYPED_DTYPES:
        assert getattr(torch, dtype) in torch.storage._new_dtypes()


def test_a_modules_state_dict(model_state: Any, tools: Any, assert_same: Any) -> None:
    data = tools.save(model_state)
    _assert_as_torch(data, tools, assert_same)
    assert tools.build(data)._metadata == model_state._metadata


def test_runs_take_nearly_all_entries(
    model_state: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut is used, and without it the result is the same."""
    pickled = tools.pickle_of(tools.save(model_state))
    by_opcodes = 0
    reader = read_recipe.__globals__["_Reader"]
    slow = reader._add_tensor

    def counted(self: Any, arguments: Any, dtype: Any) -> None:
        nonlocal by_opcodes
        by_opcodes += 1
        slow(self, arguments, dtype)

    monkeypatch.setattr(reader, "_add_tensor", counted)
    fast = read_recipe(pickled)
    assert by_opcodes <= 4
    monkeypatch.setattr(reader, "_take_run", lambda self: False)
    plain = read_recipe(pickled)
    assert by_opcodes >= len(plain.tensors) > 50
    assert fast.storages == plain.storages
    assert fast.tensors == plain.tensors
    values = list(range(len(fast.tensors)))
    one, other = fast.assemble(values, []), plain.assemble(values, [])
    assert list(one.items()) == list(other.items())
    assert vars(one) == vars(other)


def test_what_a_recipe_says(tools: Any) -> None:
    base = _tensor(2, 3)
    recipe = read_recipe(tools.pickle_of(tools.save([base, torch.nn.Parameter(base[1:])])))
    assert list(recipe.storages) == [StorageSpec("0", "FloatStorage", "float32", "cpu", 6, 24)]
    assert list(recipe.tensors) == [
        TensorSpec(0, 0, (2, 3), (3, 1), False, "float32"),
        TensorSpec(0, 3, (1, 3), (3, 1), False, "float32"),
    ]
    assert list(recipe.parameters) == [(1, True)]
    assert recipe.assemble(["a", "b"], ["c"]) == ["a", "c"]


def test_a_recipe_is_assembled_once_and_whole(tools: Any) -> None:
    pickled = tools.pickle_of(tools.save([_tensor(1)]))
    with pytest.raises(ValueError, match="every tensor"):
        read_recipe(pickled).assemble([], [])
    recipe = read_recipe(pickled)
    recipe.assemble([1], [])
    with pytest.raises(RuntimeError, match="once"):
        recipe.assemble([1], [])


def test_torch_is_not_imported() -> None:
    code = "import sys, trims_shim.formats; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "TRIMS_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


# What is left to torch


class _Plain:
    """Pickled by reference to this module."""


def _recursive() -> Any:
    values: list[Any] = [1]
    values.append(values)
    return values


def _recursive_through_tuple() -> Any:
    values: dict[str, Any] = {}
    values["x"] = ([values], _tensor(1))
    return values


def _shared_without_elements() -> Any:
    tensor = torch.zeros(0)
    return [tensor, tensor.view(0, 3)]


def _tensor_attribute() -> Any:
    state = OrderedDict(a=1)
    state.extra = _tensor(1)  # type: ignore[attr-defined]
    return state


def _tuple_attribute() -> Any:
    state = OrderedDict(a=1)
    state.extra = (_tensor(1),)  # type: ignore[attr-defined]
    return state


def _python_attribute() -> Any:
    tensor = _tensor(2)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


_REFUSED: dict[str, Any] = {
    "object": _Plain,
    "counter": lambda: Counter("ab"),
    "set": lambda: {1, 2},
    "complex": lambda: 1 + 2j,
    "bytearray": lambda: bytearray(b"x"),
    "no bytes": lambda: b"",
    "size": lambda: torch.Size([1, 2]),
    "dtype": lambda: torch.float16,
    "new dtype": lambda: torch.float8_e5m2,
    "device": lambda: torch.device("cpu"),
    "storage": lambda: _tensor(3).untyped_storage(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 1, torch.qint8),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.empty(2, device="meta"),
    "module": lambda: torch.nn.Linear(1, 1),
    "python attribute": _python_attribute,
    "recursion": _recursive,
    "recursion through a tuple": _recursive_through_tuple,
    "tensor attribute": _tensor_attribute,
    "shared storage without elements": _shared_without_elements,
    "tensor in an attribute": _tuple_attribute,
    "huge integer": lambda: 1 << 3000,
    "nested key": lambda: {((1,),): 2},
    "function": lambda: os.getcwd,
}


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_only_torch_can_tell(name: str, tools: Any) -> None:
    with pytest.raises(UnsupportedFormat):
        read_recipe(tools.pickle_of(tools.save(_REFUSED[name]())))


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_protocols(protocol: int) -> None:
    with pytest.raises(UnsupportedFormat, match="not protocol 2"):
        read_recipe(pickle.dumps({"a": 1}, protocol=protocol))


def _put(index: int) -> bytes:
    return b"q" + bytes([index])


_STORAGE = b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu%stQ%s%s%s%s"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_HOOKS = b"ccollections\nOrderedDict\n)R"


def _one_tensor(
    *,
    elements: bytes = b"K\x06",
    offset: bytes = b"K\x00",
    size: bytes = b"K\x02K\x03\x86",
    stride: bytes = b"K\x03K\x01\x86",
    rest: bytes = b"\x89" + _HOOKS + b"tR",
) -> bytes:
    fields = _STORAGE % (elements, offset, size, stride, rest)
    return b"\x80\x02" + _REBUILD + fields + b"."


def test_the_template_of_the_next_test_is_fine() -> None:
    assert read_recipe(_one_tensor()).tensors[0].size == (2, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"elements": b"K\x05"},
        {"elements": b"J\xff\xff\xff\xff"},
        {"elements": b"\x88"},
        {"elements": b"G" + struct.pack(">d", 6.0)},
        {"elements": b"\x8a\x08" + struct.pack("<q", 2**62)},
        {"offset": b"K\x01"},
        {"offset": b"J\xff\xff\xff\xff"},
        {"offset": b"\x89"},
        {"offset": b"N"},
        {"size": b"K\x02K\x04\x86"},
        {"size": b"K\x02\x85"},
        {"size": b"]"},
        {"size": b"K\x06"},
        {"size": b"K\x02\x88\x86"},
        {"size": b"J\xff\xff\xff\xffK\x03\x86"},
        {"stride": b"J\xff\xff\xff\xffK\x01\x86"},
        {"stride": b"K\x04K\x01\x86"},
        {"stride": b"](K\x03K\x01e"},
        {"size": b"(" + b"K\x01" * 65 + b"t", "stride": b"(" + b"K\x01" * 65 + b"t"},
        {"stride": b"\x8a\x09" + struct.pack("<qB", 0, 1) + b"K\x01\x86"},
        {
            "size": b"\x8a\x08" + struct.pack("<q", 2**62) + b"K\x03\x86",
            "stride": b"K\x00K\x00\x86",
        },
        {"rest": b"K\x00" + _HOOKS + b"tR"},
        {"rest": b"\x89NtR"},
        {"rest": b"\x89}tR"},
        {"rest": b"\x89" + _HOOKS + b"K\x01K\x02stR"},
        {"rest": b"\x89" + _HOOKS + b"}tR"},
        {"rest": b"\x89" + _HOOKS + b"q\x00tRh\x00\x86"},
        {"rest": b"\x89" + _HOOKS + b"q\x00tRh\x00K\x01K\x02s\x86"},
    ],
)
def test_tensors_that_torch_would_refuse_or_treat_differently(fields: dict[str, bytes]) -> None:
    with pytest.raises(UnsupportedFormat):
        read_recipe(_one_tensor(**fields))


def test_an_untyped_storage_tells_no_dtype() -> None:
    pickled = _one_tensor().replace(b"ctorch\nFloatStorage", b"ctorch.storage\nUntypedStorage")
    with pytest.raises(UnsupportedFormat, match="without a dtype"):
        read_recipe(pickled)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (b"", CorruptFile),
        (b".", CorruptFile),
        (b"N", CorruptFile),
        (b"NN.", CorruptFile),
        (b"(N.", CorruptFile),
        (b"N.N", UnsupportedFormat),
        (b"N\x80\x02.", UnsupportedFormat),
        (b"0.", UnsupportedFormat),
        (b"h\x00.", CorruptFile),
        (b"Nq\x01.", UnsupportedFormat),
        (b"Nr\xff\xff\xff\x7f.", UnsupportedFormat),
        (b"Nq\x00Nq\x00.", UnsupportedFormat),
        (b"q\x00.", CorruptFile),
        (b"X\xff\xff\xff\xff.", CorruptFile),
        (b"X\x01\0\0\0\xff.", CorruptFile),
        (b"\x8a\xff.", CorruptFile),
        (b"J\x00.", CorruptFile),
        (b"G\x00.", CorruptFile),
        (b"cos\n", CorruptFile),
        (b"cos\nsystem\n.", UnsupportedFormat),
        (b"cos\nsystem\nX\x02\0\0\0ls\x85R.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\nN\x85R.", UnsupportedFormat),
        (b"NN\x87.", CorruptFile),
        (b"t.", CorruptFile),
        (b"Na.", CorruptFile),
        (b"NNa.", UnsupportedFormat),
        (b"}(Nu.", CorruptFile),
        (b"](NNu.", UnsupportedFormat),
        (b"N}b.", UnsupportedFormat),
        (b"}}b.", UnsupportedFormat),
        (b"}(K\x01NK\x01Nu.", UnsupportedFormat),
        (b"}(K\x01N\x88Nu.", UnsupportedFormat),
        (b"}]Ns.", UnsupportedFormat),
        (b"}]\x85Ns.", UnsupportedFormat),
        (b"NQ.", UnsupportedFormat),
        (b"K\x01N\x86Q.", UnsupportedFormat),
        (b"NR.", CorruptFile),
        (b"N)R.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n)RN}K\x01Nsb.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n)R}K\x01Nsb.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n)R}X\x0c\0\0\0__setstate__Nsb.", UnsupportedFormat),
        (b"c_codecs\nencode\nX\x02\0\0\0\xc4\x80X\x06\0\0\0latin1\x86R.", UnsupportedFormat),
        (b"c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0utf-8\x86R.", UnsupportedFormat),
        (b"]q\x00h\x00a.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n\x85.", UnsupportedFormat),
        (b"ccollections\nOrderedDict\n\x85\x85.", UnsupportedFormat),
        (b"]ccollections\nOrderedDict\n\x85a.", UnsupportedFormat),
        (
            b"ctorch._utils\n_rebuild_parameter\nN\x89ccollections\nOrderedDict\n)R\x87R.",
            UnsupportedFormat,
        ),
        (b"c_codecs\nencode\n](X\x01\0\0\0aX\x06\0\0\0latin1eR.", UnsupportedFormat),
    ],
)
def test_odd_pickles(code: bytes, error: type[FormatError]) -> None:
    with pytest.raises(error):
        read_recipe(b"\x80\x02" + code)


def test_a_refused_pickle_is_not_kept() -> None:
    """A program may have the collector off, and a pickle with arrays in it is large."""
    data = pickle.dumps({"a": "x" * 1000, "b": {1, 2}}, protocol=2)
    gc.disable()
    try:
        before = sys.getrefcount(data)
        with pytest.raises(UnsupportedFormat):
            read_recipe(data)
        assert sys.getrefcount(data) == before
    finally:
        gc.enable()


_UNTYPED, _TYPED = b"ctorch.storage\nUntypedStorage\n", b"ctorch\nDoubleStorage\n"


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        (_UNTYPED, b"N"),
        (_UNTYPED, b"ctorch\nDoubleStorage\n"),
        (_TYPED, b"ctorch\nuint16\n"),
        (_TYPED, b"N"),  # to torch no double, but its default dtype
    ],
)
def test_a_dtype_is_given_to_untyped_storages_only(
    storage: bytes, dtype: bytes, tools: Any
) -> None:
    pickled = tools.pickle_of(tools.save(_tensor(2, dtype=torch.uint16)))
    odd = pickled.replace(_UNTYPED, storage).replace(b"ctorch\nuint16\n", dtype)
    assert odd != pickled
    with pytest.raises(UnsupportedFormat):
        read_recipe(odd)


def test_a_parameter_of_integers_has_no_gradient(tools: Any) -> None:
    parameter = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    before, _, after = tools.pickle_of(tools.save(parameter)).rpartition(b"\x89")
    with pytest.raises(UnsupportedFormat, match="with gradients"):
        read_recipe(before + b"\x88" + after)


def test_hooks_are_no_part_of_the_result() -> None:
    tensor = _one_tensor(rest=b"\x89h\x00tR")[2:-1]
    with pytest.raises(UnsupportedFormat, match="backward hooks"):
        read_recipe(b"\x80\x02" + _HOOKS + b"q\x00" + tensor + b"\x86.")


_AS_PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
_ARGUMENTS = _one_tensor()[2:-1] + b"\x88" + _HOOKS + b"\x87q\x00"


@pytest.mark.parametrize(
    "code",
    [
        _one_tensor(rest=b"\x89" + _HOOKS + b"tq\x00R" + _REBUILD + b"h\x00R\x86")[2:],
        _AS_PARAMETER + _ARGUMENTS + b"R" + _AS_PARAMETER + b"h\x00R\x86.",
        _AS_PARAMETER + _ARGUMENTS + b"Rh\x00\x86.",
        _ARGUMENTS + b"\x85" + _AS_PARAMETER + b"h\x00R\x86.",
    ],
)
def test_arguments_with_hooks_in_two_places(code: bytes) -> None:
    """In what torch builds they are the same hooks."""
    with pytest.raises(UnsupportedFormat, match="arguments of a call twice"):
        read_recipe(b"\x80\x02" + code)


def test_one_storage_described_in_two_ways(tools: Any) -> None:
    pickled = tools.pickle_of(tools.save([_tensor(2), _tensor(3)]))
    both = pickled.replace(b"X\x01\0\0\x001q", b"X\x01\0\0\x000q")
    assert both != pickled
    with pytest.raises(UnsupportedFormat, match="described in two ways"):
        read_recipe(both)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"X\x03\0\0\x0011N", b"X\x02\0\0\x0011N"), (b"X\x02\0\0\x0011q", b"X\x01\0\0\x0011q")],
)
def test_a_name_is_as_long_as_it_says_also_in_a_run(old: bytes, new: bytes, tools: Any) -> None:
    pickled = tools.pickle_of(tools.save({f"{i}N": _tensor(2) for i in range(12)}))
    assert pickled.count(old) == 1
    with pytest.raises(FormatError):
        read_recipe(pickled.replace(old, new))


@pytest.mark.parametrize("offset", [1, 10], ids=["length", "memo"])
def test_an_odd_entry_of_metadata_is_not_taken_for_one_of_a_run(
    offset: int, model_state: Any, tools: Any
) -> None:
    pickled = tools.pickle_of(tools.save(model_state))
    place = pickled.index(b"X\x04\0\0\x0011.0r") + offset
    odd = pickled[:place] + bytes([(pickled[place] - 1) % 256]) + pickled[place + 1 :]
    with pytest.raises(FormatError):
        read_recipe(odd)


@pytest.mark.parametrize("count", [12, 50])
def test_memo_numbers_are_consecutive_also_in_a_run(count: int, tools: Any) -> None:
    pickled = tools.pickle_of(tools.save({f"{i}N": _tensor(2) for i in range(count)}))
    place = pickled.index(f"{count - 1}N".encode()) + 4
    assert pickled[place - 1 : place] == (b"q" if count == 12 else b"r")
    with pytest.raises(UnsupportedFormat, match="memo"):
        read_recipe(pickled[:place] + bytes([pickled[place] + 1]) + pickled[place + 1 :])


@pytest.mark.parametrize("is_size_missing", [True, False])
def test_a_size_needs_a_stride_also_in_a_run(is_size_missing: bool, tools: Any) -> None:
    pickled = tools.pickle_of(tools.save({f"{i}N": _tensor(2) for i in range(3)}))
    before, size, numbers = pickled.rpartition(
        b"K\x02\x85q\x19" if is_size_missing else b"K\x01\x85q\x1a"
    )
    for number in range(size[-1] + 1, 30):
        numbers = numbers.replace(b"q%c" % number, b"q%c" % (number - 1))
    with pytest.raises(UnsupportedFormat, match="dimensions"):
        read_recipe(before + b")" + numbers)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"h\x02(", b"h\x04("),  # the function
        (b"(h\x03", b"(h\x06"),  # "storage"
        (b"h\x04X", b"h\x06X"),  # the storage's type
        (b"h\x04X", b"h\x02X"),
        (b"h\x06K", b"h\x04K"),  # its location
        (b"h\x06K", b"h\xffK"),
        (b"h\n)R", b"h\x02)R"),  # what makes the hooks
        (b"K\x02t", b"J\xff\xff\xff\xfft"),  # its elements
        (b"K\x02K\x01\x86", b"K\x02K\x01\x85"),  # the tensor's size
        (b"K\x01K\x01\x86", b"K\x01K\x01\x85"),  # its stride
        (b"\x89", b"\x88"),  # requires_grad
    ],
)
def test_an_odd_entry_is_not_taken_for_one_of_a_run(old: bytes, new: bytes, tools: Any) -> None:
    """The others of its run are fine; so is a run's first entry, which is read by opcodes."""
    state = {f"{i}N": _tensor(2, 1, dtype=torch.int64) for i in range(3)}
    before, found, after = tools.pickle_of(tools.save(state)).rpartition(old)
    assert found
    with pytest.raises(FormatError):
        read_recipe(before + new + after)


def test_deep_nesting_ends_in_an_answer() -> None:
    depth = 100_000
    recipe = read_recipe(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert type(recipe.assemble([], [])) is list
    shared = b"\x80\x02]q\x00" + b"]" * depth + b"h\x00a" + b"a" * depth + b"."
    with pytest.raises(UnsupportedFormat, match="inside itself"):
        read_recipe(shared)


@pytest.mark.parametrize("place", ["value", "attribute", "neither"])
def test_an_ordered_dict_that_is_inside_itself(place: str) -> None:
    state: Any = OrderedDict(one=[1])
    state.note = state["one"]
    if place == "value":
        state["itself"] = state
    if place == "attribute":
        state.note = [state]
    pickled = pickle.dumps(state, protocol=2)
    if place == "neither":
        assert read_recipe(pickled).assemble([], []).note == [1]
        return
    with pytest.raises(UnsupportedFormat, match="inside itself"):
        read_recipe(pickled)


@pytest.mark.parametrize(
    "fields",
    [
        {"elements": b")" + b"\x85" * 100_000},
        {"offset": b")" + b"\x85" * 100_000},
        {"size": b")" + b"\x85" * 100_000},
        {"size": b")" + b"\x85" * 100_000 + b"K\x01\x86"},
        {"rest": b"\x89" + _HOOKS + b"tR" + b"\x85" * 100_000 + b"Q"},
        {"rest": b"\x89" + _HOOKS + b"tR" + b"\x85" * 100_000 + b"}q\x00h\x00Ns\x86"},
    ],
)
def test_deep_nesting_is_not_walked_recursively(fields: dict[str, bytes]) -> None:
    with pytest.raises(UnsupportedFormat):
        read_recipe(_one_tensor(**fields))


def test_deep_tuples_around_a_tensor() -> None:
    recipe = read_recipe(_one_tensor(rest=b"\x89" + _HOOKS + b"tR" + b"\x85" * 100_000))
    result = recipe.assemble(["tensor"], [])
    for _ in range(100_000):
        (result,) = result
    assert result == "tensor"


def test_keys_are_short_and_flat() -> None:
    for key in (b"(" + b"N" * 65 + b"t", b")" + b"\x85" * 100_000, b")\x85"):
        with pytest.raises(UnsupportedFormat, match="as a key"):
            read_recipe(b"\x80\x02}" + key + b"Ns.")


# Anything at all


@pytest.fixture(scope="module")
def small(tools: Any) -> list[tuple[dict[str, bytes], bytes]]:
    """Records and pickles, to be mutated."""
    originals = []
    for name in ("shared tensor", "shared containers", "parameters", "attributes", "optimizer"):
        originals.append(tools.save(_VALUES[name]()))
    originals.append(tools.save(torch.nn.BatchNorm1d(3).state_dict()))
    originals.append(tools.save({f"m.{i}.w": _tensor(2, 3) for i in range(45)}))
    result = []
    for data in originals:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        records = {name: reader.get_record(name) for name in reader.get_all_records()}
        result.append((records, records["data.pkl"]))
    return result


_OPCODES = b"()GJKMNQRX]abchjqrstu}\x85\x86\x87\x88\x89\x8a.0\x80\x00\x01\x02\x03\x04\x05\xff"


def _mutated(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    mutated = bytearray(data)
    for kind, position, value in edits:
        at = 2 + position % (len(mutated) - 2)
        if kind == "set":
            mutated[at] = _OPCODES[value % len(_OPCODES)]
        elif kind == "add":
            mutated[at] = (mutated[at] + value % 3 - 1) % 256
        elif kind == "insert":
            mutated.insert(at, _OPCODES[value % len(_OPCODES)])
        elif len(mutated) > 8:
            del mutated[at]
    return bytes(mutated)


_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "add", "insert", "delete"]),
        st.integers(0, 1 << 14),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
)


@_FUZZ
@given(which=st.integers(0, 6), edits=_EDITS)
@pytest.mark.filterwarnings("ignore")
def test_mutated_pickles(
    which: int, edits: list[tuple[str, int, int]], small: Any, tools: Any, assert_same: Any
) -> None:
    records, pickled = small[which]
    pickled = _mutated(pickled, edits)
    try:
        recipe = read_recipe(pickled)
    except FormatError:
        return
    for spec in recipe.storages:
        # The archive reader's part: a record of that name and size.
        record = records.get(f"data/{spec.key}")
        if record is None or len(record) != spec.size_bytes or spec.location != "cpu":
            return
    _assert_as_torch(tools.archive_of({**records, "data.pkl": pickled}), tools, assert_same)


@_FUZZ
@given(data=st.lists(st.sampled_from(list(_OPCODES)), max_size=60).map(bytes))
def test_arbitrary_opcodes(data: bytes, tools: Any, assert_same: Any) -> None:
    pickled = b"\x80\x02" + data + b"."
    try:
        read_recipe(pickled)
    except FormatError:
        return
    _assert_as_torch(tools.archive_of({"data.pkl": pickled, "version": b"3"}), tools, assert_same)


_PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(min_size=1)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)
_SHAPES = st.lists(st.integers(0, 4), max_size=4)


@_FUZZ
@given(plain=_PLAIN, shapes=st.lists(_SHAPES, max_size=8), names=st.lists(st.text(), max_size=8))
def test_arbitrary_state(
    plain: Any, shapes: list[list[int]], names: list[str], tools: Any, assert_same: Any
) -> None:
    tensors = [_tensor(*shape) for shape in shapes]
    state = {
        "plain": plain,
        "model": dict(zip(names, tensors, strict=False)),
        "list": tensors[::-1],
        "more": {f"layer.{i}": tensor.clone() for i, tensor in enumerate(tensors)},
    }
    _assert_as_torch(tools.save(state), tools, assert_same)
