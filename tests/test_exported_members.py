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


@pytest.mark.parametrize("name", modules())
def test_exports(name: str) -> None:
    tree = tree_of(name)
    names = exported(tree)
    missing = defined_names(tree) - set(names or [])
    assert not missing, "public names that are in no __all__; export them or add an underscore"
    if names is None:
        return
    # As ruff sorts (RUF022): constants, classes, then the rest.
    order = sorted(names, key=lambda each: (not each.isupper(), not each[0].isupper(), each))
    assert names in (order, sorted(names)), "__all__ is not sorted"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", modules())
def test_exports_exist(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise
    assert set(getattr(module, "__all__", ())) <= set(dir(module))
    for each in getattr(module, "__all__", ()):
        assert getattr(module, each) is not None or each in vars(module)


def test_the_package_shows_what_it_exports() -> None:
    assert dir(trims_shim) == sorted(trims_shim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trims_shim.nothing
