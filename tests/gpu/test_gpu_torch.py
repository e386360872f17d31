"""Programs that load onto the device behave the same with the shim as without, byte for byte."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forking import Server, server
from gpu.conftest import GpuWorld

MODULE = "tests.gpu.cases"
SERVED_FRACTION = 0.95
CASES = tuple(
    node.name
    for node in ast.parse(Path(__file__).with_name("cases.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
    if any(isinstance(each, ast.Name) and each.id == "case" for each in node.decorator_list)
)
NEEDS = {
    "triton_kernel": "triton",
    "torch_compile": "triton",
    "transformers_from_pretrained": "accelerate",
    "transformers_in_another_dtype": "accelerate",
    "transformers_experts": "accelerate",
    "merge_adapters_layer_by_layer": "peft",
}
UNSHARED = {"load_with_a_function"}
"""The program's own function copies: there is nothing to share."""


@pytest.fixture(scope="module")
def servers(
    torch_device: str, machine: dict[str, str], device: str
) -> Iterator[tuple[Server, Server, str]]:
    """A server without the shim, one with it, and the directory of the files."""
    world = GpuWorld(machine, device, enabled="1", min_bytes="64K")
    try:
        plain_environment = {"TRIMS_ENABLED": "0"}
        with server(MODULE, plain_environment) as plain:
            plain.run("files", directory=world.root)
            with server(MODULE, world.environment()) as shared:
                yield plain, shared, world.root
    finally:
        world.close()


def public(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if not name.startswith("_")}


@pytest.mark.parametrize("case", CASES)
def test_same_with_and_without(
    servers: tuple[Server, Server, str], record: Callable[..., None], case: str
) -> None:
    library = NEEDS.get(case)
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    plain, shared, directory = servers
    expected = plain.run("run", name=case, directory=directory)
    answer = shared.run("run", name=case, directory=directory)
    part = answer.get("_shared")
    is_same = public(answer) == public(expected)
    record("same" if is_same else "different", shared=part, events=answer["_events"])
    assert public(answer) == public(expected)
    if part is not None and case not in UNSHARED:
        assert part >= SERVED_FRACTION, answer["_events"]


def test_handles_keep_their_promises(
    servers: tuple[Server, Server, str], record: Callable[..., None]
) -> None:
    _, shared, directory = servers
    found = shared.run("handles", directory=directory)
    record("kept" if all(v is not False for v in found.values()) else "broken", **found)
    assert set(found.values()) <= {True, None}, found
    assert [name for name, value in found.items() if value is None] in ([], ["cupy"])
