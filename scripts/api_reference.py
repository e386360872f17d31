"""Make docs/api.md, the reference of the public Python API, from signatures and docstrings.

Public is what ``__all__`` of the modules below names. ``scripts/check_docs.py`` checks that the
page is up to date, and writes it with ``--write``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

Item = griffe.Object | griffe.Alias

MODULES = {
    "trims_shim": "`import trims_shim` patches the loaders ([quick start](quickstart.md#use-it)).",
    "trims_shim.errors": "",
    "trims_shim.testing": "[More](quickstart.md#in-a-test-suite).",
    "trims_shim.batching": "[Guide](batching.md).",
    "trims_shim.batching.staged": "[Guide](stages.md).",
    "trims_shim.batching.prometheus": "[More](batching.md#watching).",
    "trims_shim.planner": "[Guide](planning.md).",
    "trims_shim.ensemble": "[Guide](ensembles.md).",
    "trims_shim.cluster": "[Guide](cluster.md).",
}
"""The public modules, each with what the page says of it besides its docstring."""

ERRORS = "trims_shim.errors"  # its docstring has the tree of all of them

HEAD = """# Python API

Everything public, by module, as the docstrings say it. What is not here may change without notice.

"""
WIDTH = 100
ROLE = re.compile(r":(\w+):`(~|\.[\w.]*\.|\.)?([\w.]+)`")
PARAMETER = re.compile(r"``\*{0,2}\w+``(?:(?:,| and) ``\*{0,2}\w+``)*:")
INHERITED = re.compile(r"See :class:`[\w.]+`\.")  # the whole docstring of a method
NOT_CALLED = {"BatchFuture", "DeviceHandle", "Handle", "Service"}
"""Classes whose objects only the package makes."""
HIDDEN = {
    *(f"BatchFuture.{name}" for name in ("attach", "orphan", "requeue")),
    *(
        f"LatencyProfile.{name}"
        for name in ("beyond_ns", "check_knows", "or_one_more_ns", "taken_ns")
    ),
    *(
        f"Pad.{name}"
        for name in ("has_length", "padded_length", "splits_in_its_way", "with_classes")
    ),
    *(f"Serving.{name}" for name in ("find_hosts", "hosted", "next_deadline_ns", "on_event")),
}
"""Members without an underscore that only other modules of the package use."""
PLAIN = {
    "_Access": 'Literal["shared", "private"]',
    "_ClassMethod": "classmethod",
    "_Exported": "Batcher | FlexBatcher",
    "_NumpyArray": "numpy.ndarray",
    "_TorchDevice": "torch.device",
    "_TorchTensor": "torch.Tensor",
    "Unpack[tuple[Item, Unpack[tuple[Any, ...]]]]": "Item",
}
"""What signatures have for the type checker alone, and what the page says instead."""


def page(root: Path) -> str:
    """The text of docs/api.md for the checkout at ``root``."""
    package = griffe.load("trims_shim", search_paths=[str(root)], resolve_aliases=True)
    modules = {name: _find(package, name) for name in MODULES}
    anchors: dict[tuple[str, str], str] = {}
    for name, module in modules.items():
        for exported in _exports(module):
            same = sum(other == exported for of, other in anchors if of != ERRORS)
            anchor = f"{exported.lower()}-{same}" if same else exported.lower()
            anchors[name, exported] = _anchor(name) if name == ERRORS else anchor
    contents = (f"- [`{name}`](#{_anchor(name)})\n" for name in modules)
    text = HEAD + "".join(contents)
    everywhere = {exported: anchor for (_, exported), anchor in reversed(anchors.items())}
    for name, module in modules.items():
        own = {exported: anchor for (of, exported), anchor in anchors.items() if of == name}
        text += _module(name, module, everywhere | own)
    return text


def _find(package: Item, name: str) -> Item:
    path = name.split(".")[1:]
    return package[path] if path else package


def _exports(module: Item) -> list[str]:
    return [str(name) for name in module.exports or () if not str(name).startswith("_")]


def _anchor(module: str) -> str:
    return module.replace(".", "")


def _module(name: str, module: Item, anchors: Mapping[str, str]) -> str:
    parts = [f"## `{name}`", MODULES[name]]
    if "." in name:
        parts.insert(1, _markdown(_docstring(module), anchors))
    if name != ERRORS:
        for exported in _exports(module):
            parts += [f"### `{exported}`", *_described(module[exported], anchors)]
    return "\n" + "\n\n".join(filter(None, parts)) + "\n"


def _described(item: Item, anchors: Mapping[str, str]) -> Iterator[str]:
    """A function, class or alias: its signature, its docstring, its members."""
    if item.is_function:
        shown = _call(item, item.name)
    elif item.is_class:
        shown = _made(item)
    else:
        shown = f"{item.name} = {item.value}"
    yield f"```python\n{shown}\n```"
    yield _markdown(_docstring(item), anchors)
    if item.is_class:
        bases = [base.name for base in item.mro() if base.name in anchors]
        members = [
            f"- **`{_short(member)}`**\\\n{_indented(_markdown(_docstring(member), anchors))}"
            for member in _documented(item, is_whole=not bases)
        ]
        if bases and members:
            yield f"As [`{bases[0]}`](#{anchors[bases[0]]}), and:"
        yield "\n".join(members)


def _made(item: Item) -> str:
    """How an object of a class is made; only its name where that is not for users."""
    if item.name in NOT_CALLED:
        return f"class {item.name}"
    if "dataclass" in item.labels:
        fields = [_typed(field) for field in item.members.values() if _is_field(field)]
        return _broken(f"class {item.name}", fields, "")
    made = item.members.get("__init__")
    return f"class {item.name}" if made is None else _call(made, f"class {item.name}", skip=1)


def _is_field(member: Item) -> bool:
    is_plain = member.is_attribute and "property" not in member.labels
    return is_plain and member.annotation is not None and not member.name.startswith("_")


def _documented(item: Item, *, is_whole: bool) -> Iterator[Item]:
    """The members of a class that have a docstring; those of its bases, too, if ``is_whole``."""
    for name, member in (item.all_members if is_whole else item.members).items():
        text = _docstring(member)
        is_hidden = name.startswith("_") or f"{item.name}.{name}" in HIDDEN
        if text and not is_hidden and not INHERITED.fullmatch(text):
            yield member


def _short(member: Item) -> str:
    if not member.is_function:
        return _typed(member)
    is_static = "staticmethod" in member.labels
    return " ".join(_call(member, member.name, skip=0 if is_static else 1, width=10**6).split())


def _typed(member: Item) -> str:
    if member.annotation is None:
        return member.name
    has_default = member.value is not None and "class-attribute" in member.labels
    default = f" = {member.value}" if has_default else ""
    return f"{member.name}: {_plain(member.annotation)}{default}"


def _call(function: Item, name: str, *, skip: int = 0, width: int = WIDTH) -> str:
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    arguments: list[str] = []
    before = None
    for parameter in list(function.parameters)[skip:]:
        kind = parameter.kind
        if before is kinds.positional_only and kind is not before:
            arguments.append("/")
        if kind is kinds.keyword_only and before not in (kind, kinds.var_positional):
            arguments.append("*")
        before = kind
        shown = stars.get(kind, "") + parameter.name
        if parameter.annotation is not None:
            shown += f": {_plain(parameter.annotation)}"
        if parameter.default is not None and kind not in stars:
            shown += f" = {parameter.default}"
        arguments.append(shown)
    returned = "" if function.name == "__init__" else f" -> {_plain(function.returns)}"
    if any(str(decorator.value).endswith("contextmanager") for decorator in function.decorators):
        returned = re.sub(r"Iterator\[(.*)\]", r"AbstractContextManager[\1]", returned)
    return _broken(name, arguments, returned, width)


def _plain(annotation: object) -> str:
    text = str(annotation)
    for private, shown in PLAIN.items():
        text = text.replace(private, shown)
    return text


def _broken(name: str, arguments: list[str], returned: str, width: int = WIDTH) -> str:
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) <= width:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returned}"


def _docstring(item: Item) -> str:
    return item.docstring.value if item.docstring else ""


def _markdown(text: str, anchors: Mapping[str, str]) -> str:
    """A docstring as Markdown: a list for what it says of parameters, links for what it names."""

    def named(match: re.Match[str]) -> str:
        last = match[3].rpartition(".")[2]
        shown = last if match[2] else match[3]
        is_linked = last in anchors and match[1] != "meth"
        return f"[`{shown}`](#{anchors[last]})" if is_linked else f"`{shown}`"

    lines: list[str] = []
    is_listed = False
    for line in text.splitlines():
        if line.strip() == "::":
            continue
        if PARAMETER.match(line):
            if lines and lines[-1] and not is_listed:
                lines.append("")
            is_listed = True
            lines.append(f"- {line}")
        else:
            is_listed = is_listed and bool(line)
            lines.append(f"  {line}" if is_listed else line)
    joined = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    return ROLE.sub(named, re.sub(r"``(.+?)``", r"`\1`", joined, flags=re.DOTALL))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())
