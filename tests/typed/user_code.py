"""What users write, as mypy has to see it (strict, with the package), and what then happens.

Each ``assert_type`` is checked by mypy, each ``type: ignore`` has to be needed, and the functions
named ``check_...`` are run by tests/batching/test_signatures.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import assert_type

import trims_shim
from trims_shim.batching import Batcher, BatchFuture, FlexBatcher, Pad, Padded, batched
from trims_shim.batching.staged import Loop, StagedModel, Stepped

# --- functions ------------------------------------------------------------------------------------


@batched
def bare(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(slo_ms=10_000, max_batch_size=8, collate="list")
def length(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(slo_ms=10_000)
async def half(numbers: list[int]) -> list[float]:
    return [number / 2 for number in numbers]


@batched
def letters(texts: list[str]) -> Iterator[list[bytes]]:
    for index in range(2):
        yield [text[index].encode() for text in texts]


@batched
def more_letters(texts: list[str]) -> Generator[list[bytes], None, None]:
    yield from letters.function(texts)


@batched
async def slow_letters(texts: list[str]) -> AsyncIterator[list[bytes]]:
    for index in range(2):
        yield [text[index].encode() for text in texts]


@batched(slo_ms=10_000)
def double(images: torch.Tensor) -> torch.Tensor:
    return images * 2


@batched
def sums(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    total: np.ndarray[Any, Any] = images.sum(axis=1)
    return total


@batched
def both(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return images, images


@batched
def named(texts: list[str]) -> Mapping[str, list[int]]:
    return {"length": [len(text) for text in texts]}


@batched
def numbered(texts: list[str]) -> dict[int, list[int]]:
    return {0: [len(text) for text in texts]}


@batched
def joined(texts: list[str], numbers: list[int]) -> list[str]:
    return [text * number for text, number in zip(texts, numbers, strict=True)]


@batched(collate="concatenate")
def concatenated(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@batched(collate=Pad())
def padded(tokens: Padded) -> list[int]:
    return list(tokens.lengths)


@batched(collate=["list", "list"])
def by_argument(texts: list[str], numbers: list[int]) -> list[str]:
    return joined.function(texts, numbers)  # type: ignore[no-any-return]


assert_type(bare, Batcher[str, int])
assert_type(length, Batcher[str, int])
assert_type(half, Batcher[int, float])
assert_type(letters, Batcher[str, list[bytes], bytes])
assert_type(more_letters, Batcher[str, list[bytes], bytes])
assert_type(slow_letters, Batcher[str, list[bytes], bytes])
assert_type(double, Batcher[Any, torch.Tensor])
assert_type(sums, Batcher[Any, Any])
assert_type(both, Batcher)
assert_type(named, Batcher)
assert_type(numbered, Batcher)
assert_type(concatenated, Batcher)
assert_type(by_argument, Batcher)


def check_functions() -> None:
    assert assert_type(bare("ab"), int) == 2
    assert assert_type(length("ab", deadline_ms=5000, priority=1), int) == 2
    assert assert_type(half(3), float) == 1.5
    assert assert_type(letters("ab"), list[bytes]) == [b"a", b"b"]
    assert assert_type(list(letters.stream("ab")), list[bytes]) == [b"a", b"b"]
    assert assert_type(more_letters("ab"), list[bytes]) == [b"a", b"b"]
    assert torch.equal(assert_type(double(torch.ones(2)), torch.Tensor), 2 * torch.ones(2))
    assert type(sums(np.ones(2))) is np.float64
    assert type(both(torch.ones(2))) is tuple
    assert named("ab") == {"length": 2}
    assert numbered("ab") == {0: 2}
    assert assert_type(joined("ab", 2), str) == "abab"
    assert concatenated(["ab", "c"]) == [2, 1]
    assert padded([1, 2]) == 2
    assert by_argument("ab", 2) == "abab"


def check_ways_to_call() -> None:
    future = assert_type(length.submit("ab"), BatchFuture[int])
    assert assert_type(future.result(), int) == 2
    assert list(assert_type(length.map(["a", "bc"]), Iterator[int])) == [1, 2]
    outcomes = length.map(["a"], return_exceptions=True)
    assert list(assert_type(outcomes, Iterator[int | BaseException])) == [1]
    assert list(joined.map(["a", "b"], [1, 2])) == ["a", "bb"]
    asyncio.run(_await_all())


async def _await_all() -> None:
    assert assert_type(await length.aio("ab"), int) == 2
    assert assert_type(await half.aio(3), float) == 1.5
    async for piece in slow_letters.astream("ab"):
        assert assert_type(piece, bytes) in (b"a", b"b")


# --- methods --------------------------------------------------------------------------------------


class HasLength(Protocol):
    def length(self, text: str, /) -> int: ...


class Abstract(ABC):
    @abstractmethod
    def length(self, text: str, /) -> int: ...


class Service(Abstract):
    @batched(slo_ms=10_000)
    def length(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @batched
    async def half(self, numbers: list[int]) -> list[float]:
        return [number / 2 for number in numbers]

    @batched
    def letters(self, texts: list[str]) -> Iterator[list[bytes]]:
        yield from letters.function(texts)

    @batched
    def double(self, images: torch.Tensor) -> torch.Tensor:
        return images * 2

    @batched
    def joined(self, texts: list[str], numbers: list[int]) -> list[str]:
        return [text * number for text, number in zip(texts, numbers, strict=True)]

    @batched(slo_ms=10_000)
    @classmethod
    def of_class(cls, texts: list[str]) -> list[str]:
        return [text + cls.__name__ for text in texts]

    @staticmethod
    @batched
    def outer_static(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    @batched
    @staticmethod
    def inner_static(texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


class Longer(Service):
    @batched
    def length(self, texts: list[str]) -> list[int]:
        return [super(Longer, self).length(text) + 1 for text in texts]


@dataclasses.dataclass
class Holder:
    measure: Batcher[str, int]


class OfInstances:
    def __init__(self) -> None:
        self.measure = batched(slo_ms=10_000)(self._measure)
        self.measure_too = Batcher(self._measure)

    def _measure(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


def check_methods() -> None:
    service = Service()
    assert_type(service.length, Batcher[str, int])
    assert_type(service.letters, Batcher[str, list[bytes], bytes])
    assert assert_type(service.length("ab"), int) == 2
    assert assert_type(Service.length(service, "ab"), int) == 2
    assert assert_type(service.half(3), float) == 1.5
    assert assert_type(list(service.letters.stream("ab")), list[bytes]) == [b"a", b"b"]
    assert type(assert_type(service.double(torch.ones(2)), torch.Tensor)) is torch.Tensor
    assert assert_type(service.joined("ab", 2), str) == "abab"
    assert assert_type(service.of_class("a"), str) == assert_type(Service.of_class("a"), str)
    assert assert_type(service.outer_static("ab"), int) == 2
    assert assert_type(service.inner_static("ab"), int) == 2
    assert assert_type(Longer().length("ab"), int) == 3
    found: HasLength = service
    assert found.length("ab") == 2
    assert assert_type(Holder(length).measure("ab"), int) == 2
    assert assert_type(OfInstances().measure("ab"), int) == 2
    assert assert_type(OfInstances().measure_too("ab"), int) == 2


# --- batchers -------------------------------------------------------------------------------------


def _lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def _step(state: torch.Tensor) -> Stepped:
    return Stepped(state, list(state), [True] * len(state))


def check_batchers() -> None:
    assert_type(Batcher(_lengths, slo_ms=10_000), Batcher[str, int])
    assert_type(Batcher(_lengths, collate="concatenate"), Batcher)
    assert assert_type(Batcher(lambda texts: texts)("ab"), Any) == "ab"
    with Batcher(letters.function) as of_any, assert_type(length, Batcher[str, int]):
        assert assert_type(of_any("ab"), Any) == [b"a", b"b"]
    staged = StagedModel([_lengths])
    assert assert_type(Batcher(staged), Batcher)("ab") == 2
    in_stages = batched(model=staged, policy="dvabatch")(_lengths)
    assert assert_type(in_stages, Batcher[str, int])("ab") == 2
    looping = Batcher(StagedModel([Loop(_step)]))
    assert [float(piece) for piece in looping.stream(torch.ones(()))] == [1.0]
    flex = FlexBatcher({"length": [_lengths]}, slo_ms=10_000)
    assert flex("length", "ab") == 2
    assert list(flex.map("length", ["ab"])) == [2]


def check_annotations() -> None:
    wider: Batcher[str, float] = bare
    anything: Batcher = joined
    narrower: Batcher[bool, float] = half
    assert (wider("ab"), anything("ab", 2), narrower(True)) == (2, "abab", 0.5)
    assert str(Batcher[str, int]).endswith("Batcher[str, int]")
    assert str(BatchFuture[int]).endswith("BatchFuture[int]")
    future: BatchFuture = bare.submit("ab")
    assert future.result() == 2


# --- mistakes -------------------------------------------------------------------------------------


def mistakes() -> None:
    """Each is seen."""
    bare(3)  # type: ignore[arg-type]
    bare()  # type: ignore[call-arg]
    bare(text="ab")  # type: ignore[call-arg]
    bare("ab", deadline=3)  # type: ignore[call-arg]
    bare.submit(3)  # type: ignore[arg-type]
    bare.map([3])  # type: ignore[list-item]
    Service().length(3)  # type: ignore[arg-type]
    batched(slo_m=100)  # type: ignore[call-overload]
    batched(slo_ms="100")  # type: ignore[call-overload]
    batched(100)  # type: ignore[call-overload]
    Batcher(_lengths, when_full="wiat")  # type: ignore[call-overload]
    FlexBatcher({})(1, "ab")  # type: ignore[arg-type]
    trims_shim.open("model", access="write")  # type: ignore[call-overload]
