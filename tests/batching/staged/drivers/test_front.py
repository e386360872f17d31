"""Models in stages behind the same front as functions: nothing but the speed tells them apart."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from typing import Any

import pytest

from tests.batching.staged.rules import joining
from tests.batching.waiting import LONG_S, join, start
from trims_shim.batching import Batcher, Pad, batched, staged
from trims_shim.batching.drivers.lanes import CpuLane
from trims_shim.batching.policies.window import Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged import Loop, StagedModel, StagedProfile, Stepped
from trims_shim.batching.staged.drivers import front
from trims_shim.batching.staged.policies import STAGED_POLICIES
from trims_shim.batching.staged.profiles.profile_files import SavedStages, save_staged_profile
from trims_shim.batching.staged.scheduler import StagedBatching
from trims_shim.errors import BadBatch

plain = functools.partial(Batcher, collate="list")
windowed = functools.partial(plain, policy=functools.partial(Window, wait_ms=20))


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def model(stages: int = 3) -> StagedModel:
    return StagedModel([double] * stages)


# --- one front ------------------------------------------------------------------------------------


def test_all_ways_to_ask() -> None:
    async def ask(batcher: Batcher) -> list[Any]:
        return [await batcher.aio(1), *[piece async for piece in batcher.astream(1)]]

    with plain(model()) as batcher:
        assert batcher(1) == 8
        assert batcher.submit(1).result(LONG_S) == 8
        assert list(batcher.map([1, 2])) == [8, 16]
        assert list(batcher.stream(1)) == [8]
        assert asyncio.run(ask(batcher)) == [8, 8]
        batcher.drain(LONG_S)
        assert batcher.stats().answered == 7


def test_several_arguments() -> None:
    first = lambda ones, others: [a + b for a, b in zip(ones, others, strict=True)]  # noqa: E731
    with plain(StagedModel([first, double])) as batcher:
        assert batcher(1, 2) == 6
        assert list(batcher.map([1, 2], [3, 4])) == [8, 12]


def test_a_stage_may_ask_its_own_batcher() -> None:
    """It runs at once, in that thread, as the whole."""

    def last(items: list[int]) -> list[int]:
        return [item + batcher(1) if item == 10 else item for item in items]

    with plain(StagedModel([double, last])) as batcher:
        assert batcher(5) == 10 + 2


@pytest.mark.parametrize("policy", [*STAGED_POLICIES, "auto", "window", "clockwork", joining])
def test_policies_of_both_tables_and_makers(policy: Any) -> None:
    with plain(model(), policy=policy) as batcher:
        assert list(batcher.map(range(20))) == [8 * item for item in range(20)]


def test_the_default_policy() -> None:
    with plain(model()) as batcher:
        batcher(1)
        dispatch: Any = batcher._engine.threads()
        assert isinstance(dispatch._policy, StagedBatching)
        assert type(dispatch._policy.rules[None]) is STAGED_POLICIES["dvabatch"]


def test_one_stage_runs_as_any_function() -> None:
    """Between its stages nothing can happen; so batches of it may run side by side."""
    meeting = threading.Barrier(2)

    def meet(items: list[int]) -> list[int]:
        meeting.wait(LONG_S)
        return items

    with plain(StagedModel([meet]), devices=2, max_batch_size=1) as batcher:
        assert [each.result(LONG_S) for each in [batcher.submit(1), batcher.submit(2)]] == [1, 2]
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
        assert (stats.batches, stats.stretches, stats.splits) == (2, 0, 0)
        assert stats.stages[0].batch_sizes == {1: 2}
        assert isinstance(batcher.profile, StagedProfile)


def test_statistics_of_stages() -> None:
    with plain(model()) as batcher:
        assert [each.runs for each in batcher.stage_stats().stages] == [0, 0, 0]
        batcher(1)
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
        assert [each.batch_sizes for each in stats.stages] == [{1: 1}] * 3
        assert all(each.busy_s > 0 for each in stats.stages)
    with plain(double) as batcher, pytest.raises(TypeError, match="has no stages"):
        batcher.stage_stats()


def test_warm_measures_each_stage() -> None:
    with plain(model(), max_batch_size=4) as batcher:
        profile = batcher.warm(1, repeats=1)
        assert isinstance(profile, StagedProfile)
        assert len(profile.stages) == 3
        assert profile.max_batch_size == 4
        assert batcher(1) == 8


def test_a_profile_may_be_of_stages_or_of_the_whole() -> None:
    known = StagedProfile([LatencyProfile([1e6, 2e6]), LatencyProfile([3e6, 3e6])])
    assert plain(StagedModel([double] * 2), profile=known, max_batch_size=2).profile == known
    whole = plain(StagedModel([double] * 2), profile=LatencyProfile([2e6]), max_batch_size=1)
    assert isinstance(whole.profile, StagedProfile)
    assert whole.profile.stages[0].latency_ns(1) == 1e6
    with pytest.raises(ValueError, match="a profile of 2 stages for a model of 3"):
        plain(model(), profile=known)


def test_each_bucket_starts_from_the_profile_of_its_length(tmp_path: Any) -> None:
    """That of the next length that was measured; of the longest where there is none."""
    latencies_ns = {length: [{1: length * 1e6}] * 2 for length in (2, 6)}
    path = tmp_path / "stages.json"
    save_staged_profile(path, SavedStages(latencies_ns, 4))
    whole = StagedModel([double, lambda items: [sum(item) for item in items]])
    buckets = Pad(buckets=(2, 4, 8), mask=None)
    for collate, arguments in ((buckets, 1), ([buckets, "list"], 2), ({"ids": buckets}, 1)):
        batcher = Batcher(whole, profile=path, collate=collate, max_batch_size=4)
        learning, key = batcher._engine.options.learning, batcher._engine.function.key
        found = []
        for length in (1, 2, 3, 4, 5, 8):
            item: Any = {"ids": [1] * length} if isinstance(collate, dict) else [1] * length
            profile = learning.profile(key((item, None)[:arguments]))
            assert isinstance(profile, StagedProfile)
            found.append(profile.stage_ns(1, 1) // 10**6)
        assert found == [2, 2, 6, 6, 6, 6]
        assert batcher.profile.latency_ns(1) == 2 * 2e6  # of the first key
    assert plain(whole, profile=path, max_batch_size=4).profile.latency_ns(1) == 2 * 6e6


def test_warming_measures_what_a_second_lane_gains() -> None:
    with plain(model(), max_batch_size=4, devices=2) as batcher:
        assert getattr(batcher.profile, "width", 0) is None  # not known: used, as it was asked for
        profile = batcher.warm(1, repeats=1)
        assert isinstance(profile, StagedProfile)
        assert profile.width is not None
        assert list(batcher.map(range(20))) == [8 * item for item in range(20)]
    with plain(model(), max_batch_size=4) as batcher:
        assert getattr(batcher.warm(1, repeats=1), "width", 0) is None


def test_the_size_of_batches_can_be_changed() -> None:
    full = functools.partial(Window, wait_ms=LONG_S * 1e3)
    with plain(model(), policy=full, max_batch_size=2) as batcher:
        assert list(batcher.map(range(2))) == [0, 8]
        batcher.update(max_batch_size=8)
        assert list(batcher.map(range(8))) == [8 * item for item in range(8)]
        batcher.drain(LONG_S)
        assert max(batcher.stage_stats().stages[0].batch_sizes) > 2
        assert batcher.profile.max_batch_size == 8


def test_names() -> None:
    assert plain(StagedModel([double], name="bert")).name == "bert"
    assert plain(StagedModel([double], name="bert"), name="other").name == "other"
    assert "at most 32" in repr(plain(model()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "nothing"}, "no policy 'nothing'"),
        ({"devices": 0}, "devices is 0"),
        ({"devices": ["tpu"]}, "device 'tpu'"),
        ({"buffer_pairs": 0}, "buffer_pairs is 0"),
        ({"max_active": 0}, "max_active is 0"),
        ({"collate": "concatenate"}, "is a batch itself"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batcher(model(), **options)


@pytest.mark.parametrize(
    "collate", [Pad(unpad=True), {"x": Pad(unpad=["y"])}, [Pad(), Pad(unpad=True)]]
)
def test_pieces_of_a_loop_are_not_cut(collate: Any) -> None:
    looping = StagedModel([double, Loop(lambda state: Stepped(state, state, [True] * len(state)))])
    with pytest.raises(ValueError, match="`unpad` cuts"):
        Batcher(looping, collate=collate)
    Batcher(looping, collate=Pad())
    Batcher(looping, collate=["auto", Pad()])
    Batcher(model(), collate=collate)


def test_options_for_stages_only() -> None:
    with pytest.raises(TypeError, match="model="):
        Batcher(double, devices=["cpu"])
    with pytest.raises(TypeError, match="model="):
        Batcher(double, max_active=3)
    with pytest.raises(ValueError, match="for models in stages: give one with model="):
        Batcher(double, policy="dvabatch")
    with pytest.raises(TypeError, match="not two models"):
        Batcher(model(), model=model())
    with pytest.raises(TypeError, match="give a StagedModel"):
        Batcher(double, model=[double])  # type: ignore[arg-type]


def test_a_bound_of_active_requests() -> None:
    seen: list[int] = []

    def watch(items: list[int]) -> list[int]:
        seen.append(batcher.stats().running)
        return items

    with plain(StagedModel([watch, watch]), policy=joining, max_active=3) as batcher:
        assert list(batcher.map(range(30))) == list(range(30))
    assert 0 < max(seen) <= 3


# --- a function and its model ---------------------------------------------------------------------


def of_model(items: list[int]) -> list[int]:
    return [8 * item for item in items]


def test_a_function_is_answered_by_its_stages() -> None:
    calls: list[int] = []

    @batched(model=model(), policy="dvabatch", collate="list")
    def eightfold(items: list[int]) -> list[int]:
        calls.append(len(items))
        return of_model(items)

    with eightfold:
        assert eightfold.model is not None
        assert eightfold.name.endswith("eightfold")
        assert [eightfold(item) for item in range(5)] == [0, 8, 16, 24, 32]
        # Both ways the first time, and nobody is answered by the function afterwards.
        assert calls == [1]
        eightfold.drain(LONG_S)
        assert eightfold.stage_stats().stages[2].runs == 4


def test_a_function_that_does_more_answers_itself(caplog: pytest.LogCaptureFixture) -> None:
    def more(items: list[int]) -> list[int]:
        return [8 * item + 1 for item in items]

    with plain(more, model=model()) as batcher:
        assert [batcher(item) for item in range(5)] == [1, 9, 17, 25, 33]
        assert list(batcher.map(range(20))) == more(list(range(20)))
    (record,) = caplog.records
    assert "different results" in record.getMessage()


def test_a_function_whose_results_cannot_be_compared_answers_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numpy = pytest.importorskip("numpy")

    class Answer:
        def __eq__(self, other: object) -> Any:
            return numpy.zeros(2) == 0  # as that of a data frame

        __hash__ = None  # type: ignore[assignment]

    def last(items: list[int]) -> list[Answer]:
        return [Answer() for _ in items]

    with plain(last, model=StagedModel([double, last])) as batcher:
        assert all(isinstance(each, Answer) for each in batcher.map(range(3)))
    (record,) = caplog.records
    assert "cannot be compared" in record.getMessage()


def test_rounding_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    numpy = pytest.importorskip("numpy")
    staged = StagedModel([lambda batch: batch * 1.00001, lambda batch: batch * 2])
    with Batcher(lambda batch: batch * 2, model=staged) as batcher:
        for _ in range(3):
            batcher(numpy.arange(4.0))
        batcher.drain(LONG_S)
        assert batcher.stage_stats().stages[1].runs == 2
    assert not caplog.records


def test_each_key_is_compared() -> None:
    numpy = pytest.importorskip("numpy")

    def function(batch: Any) -> Any:
        return batch + (batch.shape[1] == 3)

    staged = StagedModel([lambda batch: batch, lambda batch: batch])
    with Batcher(function, model=staged) as batcher:
        for _ in range(2):
            assert batcher(numpy.zeros(2)).sum() == 0
        assert batcher(numpy.zeros(3)).sum() == 3
        assert batcher(numpy.zeros(3)).sum() == 3
        assert batcher(numpy.zeros(2)).sum() == 0


def test_failures_are_the_functions() -> None:
    def function(items: list[int]) -> list[int]:
        if 3 in items:
            raise ValueError("three")
        return items

    staged = StagedModel([lambda items: items, function])
    with windowed(function, model=staged) as batcher:
        batcher(1)
        futures = [batcher.submit(item) for item in range(6)]
        assert [isinstance(each.exception(LONG_S), ValueError) for each in futures] == [
            item == 3 for item in range(6)
        ]


def test_a_function_of_a_loop_is_compared_and_streams() -> None:
    def step(state: list[int]) -> Stepped:
        return Stepped([n - 1 for n in state], list(state), [n == 1 for n in state])

    def count(items: list[int]) -> list[list[int]]:
        return [list(range(item, 0, -1)) for item in items]

    staged = StagedModel([lambda items: items, Loop(step)])
    with plain(count, model=staged) as batcher:
        assert list(batcher.stream(3)) == [3, 2, 1]  # the first batch: compared
        assert list(batcher.stream(2)) == [2, 1]
        assert batcher(3) == [3, 2, 1]


def test_a_loop_whose_result_fails_where_the_function_answers_is_none_of_its_function(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def result(pieces: list[int]) -> list[int]:
        if 2 in pieces:
            raise ValueError("two")
        return pieces

    loop = Loop(lambda state: Stepped(state, state, [True] * len(state)), result=result)
    staged = StagedModel([lambda items: items, loop])
    window = functools.partial(Window, wait_ms=1e6)  # all three in a batch
    with plain(
        lambda items: [[item] for item in items], model=staged, policy=window, max_batch_size=3
    ) as batcher:
        for _ in range(2):
            assert list(batcher.map([1, 2, 3])) == [[1], [2], [3]]
    (record,) = caplog.records
    assert "different results" in record.getMessage()


@pytest.mark.parametrize("stages", [[double], [double, Loop(lambda state: Stepped(state, state))]])
def test_without_threads_a_plain_call_is_advised_only_where_it_needs_none(
    stages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    with plain(StagedModel(stages)) as batcher, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        error = batcher.submit(1).exception(LONG_S)
    assert "needs a thread" in str(error)
    assert ("a plain call" in str(error)) is (len(stages) == 1)


def test_functions_that_cannot_have_a_model() -> None:
    async def awaited(items: list[int]) -> list[int]:
        return items

    def generator(items: list[int]) -> Any:
        yield items

    for function in (awaited, generator):
        with pytest.raises(TypeError, match="one plain call"):
            Batcher(function, model=model())


def test_a_method_has_no_model() -> None:
    class Holder:
        @batched(model=model(), collate="list")
        def method(self, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="is a method"):
        Holder().method(1)


def test_a_wrong_number_of_results_is_the_functions_mistake() -> None:
    staged = StagedModel([double, lambda items: items[1:]])
    with plain(staged) as batcher, pytest.raises(BadBatch, match="0 results"):
        batcher(1)


@batched(model=model(), collate="list")
def module_level(items: list[int]) -> list[int]:
    """In another process it is found under its name."""
    return of_model(items)


def test_pickling() -> None:
    assert pickle.loads(pickle.dumps(module_level)) is module_level


# --- tensors --------------------------------------------------------------------------------------


def test_stages_of_tensors_have_no_graph_whoever_asks() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2)
    )
    flags: list[tuple[bool, bool]] = []

    def watched(batch: Any) -> Any:
        flags.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return network[0](batch)

    item = torch.randn(4)
    with Batcher(StagedModel([watched, network[1], network[2]])) as batcher:
        with torch.inference_mode():
            found = [batcher(item)]
        found.append(batcher(item))
        found.append(batcher.submit(item).result(LONG_S))
    assert torch.is_grad_enabled()
    assert flags == [(False, False)] * 3
    for each in found:
        assert not each.requires_grad
        assert not each.is_inference()
        assert torch.equal(each, network(item[None])[0])


def test_many_threads_with_tensors() -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False) for _ in range(3)]
    for layer in layers:
        layer.weight.copy_(torch.randint(-3, 4, (8, 8)))  # sums of whole numbers are exact
        layer.bias.zero_()
    wrong: list[int] = []
    with Batcher(StagedModel(layers), policy=joining, max_batch_size=8) as batcher:

        def ask(number: int) -> None:
            for _ in range(20):
                item = torch.full((8,), float(number), dtype=torch.float64)
                if not torch.equal(batcher(item), layers[2](layers[1](layers[0](item)))):
                    wrong.append(number)

        join(*[start(functools.partial(ask, number)) for number in range(6)])
        batcher.drain(LONG_S)
        stats = batcher.stage_stats()
    assert wrong == []
    assert stats.failures == 0


def test_only_lanes_of_a_processor_run_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call returns before a GPU is done."""
    for lane, expected in ((CpuLane(), True), (object(), False)):
        monkeypatch.setattr(front, "_lanes", lambda *_, lane=lane: [lane])
        kind = front.staged_kind(
            model(), has_function=False, policy=None, profile=None, devices=None, pairs=2,
            max_active=None,
        )  # fmt: skip
        made: Any = kind.learning
        assert made.keywords["batching"].keywords["may_run_whole"] is expected


@pytest.mark.parametrize("slice_it", ["slice_model", "slice_blocks"])
def test_stages_that_were_cut_have_the_lanes_of_their_device(
    slice_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    network = torch.nn.Sequential(layers).eval()
    cut = getattr(staged, slice_it)(network, torch.rand(2, 4), 2)
    made: list[str] = []
    monkeypatch.setattr(front, "lane_of", made.append)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "device", "cuda:0")
    front._lanes(cut, None)
    assert made == ["cuda:0"] * 2
