"""``trims stage profile``: cut a model into stages, measure each, and say what they are good for.

Runs the model in this process, with items that the user names or random tensors of a shape.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trims_shim.batching.drivers.lanes import Lane, lane_of
from trims_shim.batching.profiles.profile_store import machine_text
from trims_shim.batching.profiles.profiling import measure
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.profiles.diversity import stretch_gain
from trims_shim.batching.staged.profiles.profile_files import SavedStages, save_staged_profile
from trims_shim.batching.staged.profiles.profiling import (
    MAX_TRIES,
    StagePasses,
    StagesTry,
    best_try,
    try_stages,
)
from trims_shim.batching.staged.profiles.stage_profile import WIDE
from trims_shim.batching.staged.profiles.width import measure_width
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.stage_target import StageTarget
from trims_shim.cli.targets import (
    import_from_here,
    measuring,
    on_device,
    running,
    sizes_of,
)
from trims_shim.cli.text import counted, print_json, table
from trims_shim.errors import ConfigError, StagingError

__all__ = ["profile"]

_NS_PER_S = 1_000_000_000
_SHARE_OF_TRIES = 0.4
"""Of the time limit; the rest is for measuring the model as it was cut."""
_BUSY = 0.2
"""Unsteadiness of a busy machine; without other work it is some per cent."""
_SIZES_TO_TRY = 3
_REPEATS_OF_TRIES = 10
_SOME = 0.3
"""Below this width the second lane is hardly ever used (docs/decisions/0011)."""


def profile(arguments: argparse.Namespace) -> Exit:
    """Cut, measure, print what was found, and save it if asked to."""
    import_from_here()
    end_ns = time.perf_counter_ns() + round(arguments.limit_s * _NS_PER_S)
    with measuring():
        target = StageTarget.of(arguments)
        sizes = sizes_of(arguments, target.max_batch_size)
        model, tries = _cut(target, sizes, arguments, end_ns)
        saved = _measured(target, model, sizes, arguments, end_ns)
    if arguments.output:
        save_staged_profile(arguments.output, saved)
    if arguments.json:
        print_json(_described(saved, tries))
    else:
        print(_table(saved))
        print("\n" + "\n".join(_findings(saved, tries)))
        if arguments.output:
            cut = f"{target.cut_by}(..., {len(model)})" if target.cut_by else "model"
            print(f"saved: Batcher({cut}, profile={arguments.output!r})")
    return Exit.OK


# --- cutting --------------------------------------------------------------------------------------


def _cut(
    target: StageTarget, sizes: Sequence[int], arguments: argparse.Namespace, end_ns: int
) -> tuple[StagedModel, list[StagesTry]]:
    """The model in stages; numbers of stages are tried if neither it nor the user gives one."""
    if target.model is not None:
        if arguments.stages:
            raise ConfigError(
                f"{arguments.model} has its stages already ({len(target.model)}): leave --stages "
                "out, or name the model that it was made of"
            )
        return target.model, []
    if arguments.stages:
        model = target.slice_into(arguments.stages)
        if len(model) < arguments.stages:
            raise StagingError(
                f"{arguments.model} can be cut into {len(model)} stages at most, not "
                f"{arguments.stages}: take a smaller --stages"
            )
        return model, []
    tell = _Teller(arguments.json)
    tries = try_stages(
        target.slice_into,
        target.make_batch(target.lengths[-1]),
        _some(sizes),
        clock=time.perf_counter_ns,
        limit_ns=round(_SHARE_OF_TRIES * (end_ns - time.perf_counter_ns())),
        repeats=_REPEATS_OF_TRIES,
        lane=_lane(arguments),
        on_try=tell.tried,
    )
    return best_try(tries).model, tries


def _lane(arguments: argparse.Namespace) -> Lane:
    with on_device(arguments.device):
        return lane_of(arguments.device)


def _some(sizes: Sequence[int]) -> list[int]:
    """The smallest, the largest, and one between."""
    if len(sizes) <= _SIZES_TO_TRY:
        return list(sizes)
    return [sizes[0], sizes[len(sizes) // 2], sizes[-1]]


# --- measuring ------------------------------------------------------------------------------------


def _measured(
    target: StageTarget,
    model: StagedModel,
    sizes: Sequence[int],
    arguments: argparse.Namespace,
    end_ns: int,
) -> SavedStages:
    tell = _Teller(arguments.json)
    latencies_ns = {}
    for number, length in enumerate(target.lengths):
        left_ns = max(0, end_ns - time.perf_counter_ns())
        passes = StagePasses(
            model,
            target.make_batch(length),
            clock=time.perf_counter_ns,
            lane=_lane(arguments),
        )

        def run(size: int, passes: StagePasses = passes) -> None:
            with running(arguments.model, arguments, size):
                passes.run(size)

        measure(
            tell.runs(run, length, sizes),
            sizes,
            repeats=arguments.repeats,
            clock=time.perf_counter_ns,
            limit_ns=left_ns // (len(target.lengths) - number + arguments.lanes),
        )
        tell.steadiness(passes.unsteadiness)
        latencies_ns[length] = passes.median_ns()
        _check_reached(arguments.model, latencies_ns[length])
    return SavedStages(
        latencies_ns,
        max_batch_size=max(max(stages[0]) for stages in latencies_ns.values()),
        stages=tuple(_name(stage) for stage in model),
        name=arguments.model,
        machine=machine_text(),
        note="made by `trims stage profile`",
        width=_width(target, model, sizes, arguments, end_ns) if arguments.lanes else None,
    )


def _width(
    target: StageTarget,
    model: StagedModel,
    sizes: Sequence[int],
    arguments: argparse.Namespace,
    end_ns: int,
) -> float:
    """The width, measured with the longest items."""
    return measure_width(
        model,
        target.make_batch(target.lengths[-1]),
        sizes,
        lanes=[_lane(arguments) for _ in range(2)],
        clock=time.perf_counter_ns,
        repeats=arguments.repeats,
        limit_ns=max(0, end_ns - time.perf_counter_ns()),
    )


def _check_reached(name: str, latencies_ns: Sequence[dict[int, int]]) -> None:
    for number, stage in enumerate(latencies_ns):
        if not stage:
            raise StagingError(
                f"the item is finished before stage {number} of {name}: measure one that goes "
                "through all stages"
            )


def _name(stage: Any) -> str:
    stage = getattr(stage, "func", stage)  # of a partial
    name = getattr(stage, "name", None) or getattr(stage, "__name__", None)
    return name if isinstance(name, str) else type(stage).__name__.lstrip("_")


class _Teller:
    """Reports progress on stderr, unless it is to be quiet."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._tries = 0

    def tried(self, found: StagesTry) -> None:
        """One more number of stages has been tried."""
        self._tries += 1
        size = max(found.total_ns)
        self._print(
            f"[{self._tries}/{MAX_TRIES}] {counted(len(found.model), 'stage')}: batch of {size} in "
            f"{found.total_ns[size] / 1e6:.3g} ms, its longest stage in "
            f"{found.longest_ns[size] / 1e6:.3g} ms"
        )

    def runs(
        self, run: Callable[[int], None], length: int | None, sizes: Sequence[int]
    ) -> Callable[[int], None]:
        """``run``, but a size is reported after its second run."""
        runs: Counter[int] = Counter()
        items = "" if length is None else f" items of {length}"

        def told(size: int) -> None:
            run(size)
            runs[size] += 1
            if runs[size] == 2:
                self._print(f"[{len(runs)}/{len(sizes)}] batch of {size}{items}")

        return told

    def steadiness(self, unsteadiness: float) -> None:
        """Warn of times that vary as on a busy machine."""
        if unsteadiness > _BUSY:
            self._print(
                f"the same batch takes {unsteadiness:.0%} longer than at its best: something else "
                "runs here, and figures are as unsure; measure again when it does not"
            )

    def _print(self, text: str) -> None:
        if not self._is_quiet:
            say(text)


# --- what was found -------------------------------------------------------------------------------


def _table(saved: SavedStages) -> str:
    """Milliseconds by stage and batch size, of the longest items."""
    stages_ns = list(saved.latencies_ns.values())[-1]
    sizes = sorted(stages_ns[0])
    whole_ns = {
        size: sum(each[size] for each in stages_ns)
        for size in sizes
        if all(size in each for each in stages_ns)
    }
    titles = ("STAGE", *(f"MS({size})" for size in sizes), "PREFERS")
    rows = [
        (f"{number} {saved.stages[number]}", *_cells(each, sizes), str(prefers))
        for number, (each, prefers) in enumerate(
            zip(stages_ns, saved.profile.preferred, strict=True)
        )
    ]
    rows.append(("all", *_cells(whole_ns, sizes), ""))
    return table(titles, rows, right=titles[1:])


def _cells(latencies_ns: Mapping[int, float], sizes: Sequence[int]) -> list[str]:
    """Measured times; ``-`` for a stage that ran with other sizes, behind an early exit."""
    return [f"{latencies_ns[size] / 1e6:.3f}" if size in latencies_ns else "-" for size in sizes]


def _findings(saved: SavedStages, tries: Sequence[StagesTry]) -> list[str]:
    diversity, profile = saved.diversity, saved.profile
    smallest, largest = min(profile.preferred), max(profile.preferred)
    prefers = f"batches of {largest}"
    if smallest < largest:
        prefers = f"batches of {smallest} to {largest}"
        if not diversity.operators:
            prefers += ", but not large ones early, or it makes little difference"
    gain = stretch_gain(profile)
    tried = ", ".join(str(len(each.model)) for each in tries)
    inputs = {
        None: "not looked at; name several --lengths",
        True: "yes: batch short and long items apart",
        False: "no: all lengths cost about the same",
    }
    return [
        f"stages: {len(profile.stages)}" + (f", of {tried} that were tried" if tries else ""),
        f"input diversity: {inputs[diversity.inputs]}",
        f"operator diversity: {_yes(diversity.operators)}: stages prefer {prefers}",
        f"load diversity: {_yes(diversity.load)}: catching up saves {max(0.0, gain):.0%}",
        *_lanes_found(profile.width),
    ]


def _lanes_found(width: float | None) -> list[str]:
    if width is None:
        return []
    gains = "always" if width >= WIDE else "at low load" if width >= _SOME else "hardly"
    return [f"two at once: {gains} of use; {width:.0%} of what one batch leaves is another's"]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _described(saved: SavedStages, tries: Sequence[StagesTry]) -> dict[str, Any]:
    return {
        "stages": list(saved.stages),
        "max_batch_size": saved.max_batch_size,
        "inputs": [
            {
                "length": length,
                "latencies_ns": [
                    {str(size): taken_ns for size, taken_ns in stage.items()} for stage in stages
                ],
                "preferred": list(profile.preferred),
            }
            for (length, stages), profile in zip(
                saved.latencies_ns.items(), saved.profiles(), strict=True
            )
        ],
        "diversity": asdict(saved.diversity),
        "width": saved.width,
        "stretch_gain": stretch_gain(saved.profile),
        "tries": [
            {
                "stages": len(each.model),
                "total_ns": {str(size): taken_ns for size, taken_ns in each.total_ns.items()},
                "longest_ns": {str(size): taken_ns for size, taken_ns in each.longest_ns.items()},
                "whole_ns": {str(size): taken_ns for size, taken_ns in each.whole_ns.items()},
                "cost": each.cost,
            }
            for each in tries
        ],
    }
