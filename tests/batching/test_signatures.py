"""What mypy is told about batchers (it checks tests/typed) is what they are when they run."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from pathlib import Path
from types import ModuleType

import pytest

import trims_shim.batching
from trims_shim.batching import Batcher
from trims_shim.batching.flex.batcher import FlexBatcher

FOLDER = Path(__file__).parents[1] / "typed"
STUB = Path(trims_shim.batching.__file__).with_name("signatures.pyi")


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("typing_extensions")
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("user_code")


CHECKS = ["functions", "ways_to_call", "methods", "batchers", "annotations"]


@pytest.mark.parametrize("check", CHECKS)
def test_types_are_what_comes(code: ModuleType, check: str) -> None:
    getattr(code, f"check_{check}")()


def test_all_checks_are_run(code: ModuleType) -> None:
    assert [f"check_{each}" for each in CHECKS] == [
        name for name in vars(code) if name.startswith("check_")
    ]


@pytest.mark.parametrize("kind", [Batcher, FlexBatcher])
def test_annotations_can_be_evaluated(kind: type) -> None:
    """As FastAPI does with what an endpoint depends on."""
    for function in filter(inspect.isfunction, vars(kind).values()):
        assert typing.get_type_hints(function).keys() == function.__annotations__.keys()


def test_options_are_those_of_a_batcher() -> None:
    options = {
        name: each.annotation.replace('"', "'")  # as unparsed
        for name, each in inspect.signature(Batcher.__init__).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    found = {
        ast.unparse(line.target): ast.unparse(line.annotation)
        for each in ast.parse(STUB.read_text()).body
        if isinstance(each, ast.ClassDef) and each.name in ("_MostOptions", "AllOptions")
        for line in each.body
        if isinstance(line, ast.AnnAssign)
    }
    assert found == options
