"""``__all__`` is sorted, and is exactly what a module defines under a public name."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import trims_shim

ROOT = Path(trims_shim.__file__).parent
# Modules with extra public names by contract: a table read by name, or names behind PEP 562.
OPTIONAL = {"torch", "safetensors", "rich", "numpy", "cupy", "cuda", "onnxruntime"}


def modules() -> list[str]:
    found = ["trims_shim"]
    for each in pkgutil.walk_packages([str(ROOT)], "trims_shim."):
        if not each.name.endswith(("__main__", "_native")) and "_bootstrap" not in each.name:
            found.append(each.name)
    return found


def tree_of(name: str) -> ast.Module:
    path = ROOT.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def defined_names(tree: ast.Module) -> set[str]:
    """Public functions and classes of the module itself."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {each.name for each in tree.body if isinstance(each, kinds) and each.name[0] != "_"}


def exported(tree: ast.Module) -> list[str] | None:
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(each.value)
            return names
    return None


def problem_of(tree: ast.Module) -> str:
    """What is wrong with a module's ``__all__``; empty where nothing is."""
    names = exported(tree)
    if missing := defined_names(tree) - set(names or []):
        return f"{sorted(missing)} are public: export them or add an underscore"
    if names is None:
        return ""
    # As ruff sorts (RUF022): constants, classes, then the rest.
    order = sorted(names, key=lambda each: (not each.isupper(), not each[0].isupper(), each))
    if names not in (order, sorted(names)):
        return "is not sorted"
    return "names one twice" if len(set(names)) < len(names) else ""


def test_exports() -> None:
    problems = {name: problem_of(tree_of(name)) for name in modules()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_exports_exist() -> None:
    missing = []
    for name in modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in OPTIONAL:
                continue
            raise
        for each in getattr(module, "__all__", ()):
            is_there = each in vars(module) or getattr(module, each, None) is not None
            if each not in dir(module) or not is_there:
                missing.append(f"{name}.{each}")
    assert missing == []


def test_the_package_shows_what_it_exports() -> None:
    assert dir(trims_shim) == sorted(trims_shim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trims_shim.nothing
