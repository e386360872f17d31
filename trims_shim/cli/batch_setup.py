"""What ``trims batch simulate`` and ``plot`` try: a device, policies, and the requests they get."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from trims_shim.batching.policies import POLICIES, rule_maker
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.batching.profiles.profile_store import load_profile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import (
    Outcome,
    bursty,
    gamma,
    merged,
    poisson,
    read_trace,
    requests,
    simulate,
    uniform,
)
from trims_shim.batching.single import Batching
from trims_shim.errors import ConfigError, FormatError
from trims_shim.naming import naming

__all__ = ["Setup", "made_up", "policies", "rate_of", "read_requests", "slo_ns_of", "trace"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_DEFAULT_SLO_MS = 100.0
_DEFAULT_MAX_BATCH_SIZE = 32
_DEFAULT_REQUESTS = 20_000
_GIVEN = ("profile", "max_batch_size")
"""Arguments of every rule; the rest are its options."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Devices of one kind in virtual time. Two runs of a policy on the same requests are equal."""

    profile: LatencyProfile
    devices: int
    jitter_ns: float
    """Mean of the exponential distribution by which timers are late and batches take longer."""
    spread: float
    """Standard deviation of the logarithm of how long a batch takes."""
    seed: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Setup:
        """From the command line. Raises ConfigError, or FormatError for a file of another kind."""
        return cls(
            profile=_profile_of(arguments),
            devices=arguments.devices,
            jitter_ns=arguments.jitter_ms * _NS_PER_MS,
            spread=arguments.spread,
            seed=arguments.seed,
        )

    def run(self, make_rule: RuleMaker, requests: Sequence[Request]) -> Outcome:
        """Simulate ``requests``, sorted by arrival."""
        profile, random = self.profile, Random(self.seed)
        policy = Batching(
            lambda key: make_rule(profile, max_batch_size=profile.max_batch_size),
            devices=self.devices,
        )
        jitter_ns, sigma = self.jitter_ns, self.spread

        def late_ns() -> int:
            return round(random.expovariate(1 / jitter_ns)) if jitter_ns else 0

        def service_ns(device: int, batch: Sequence[Request]) -> int:
            factor = random.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0
            return max(1, round(profile.taken_ns(len(batch)) * factor)) + late_ns()

        return simulate(policy, requests, service_ns=service_ns, lateness_ns=late_ns)

    def capacity_qps(self, slo_ns: int) -> float:
        """The highest rate that all devices answer, in batches of no longer than ``slo_ns``.

        Raises ConfigError if not even a single request is answered in that time.
        """
        largest = self.profile.largest_within(slo_ns, self.profile.max_batch_size)
        if not largest:
            raise ConfigError(
                f"a batch of one takes {self.profile.latency_ns(1) / _NS_PER_MS:g} ms, more than "
                f"the SLO of {slo_ns / _NS_PER_MS:g} ms: every answer would be late"
            )
        return self.devices * _NS_PER_S * self.profile.best_rate(largest)


def _profile_of(arguments: argparse.Namespace) -> LatencyProfile:
    """The profile of a file, or of a line; up to ``--max-batch-size``."""
    limit = arguments.max_batch_size
    if limit is not None and limit > LARGEST_SIZE:
        raise ConfigError(f"--max-batch-size {limit} is more than {LARGEST_SIZE}")
    if arguments.line:
        alpha_ms, beta_ms = arguments.line
        return LatencyProfile.linear(
            alpha_ms, beta_ms, max_batch_size=limit or _DEFAULT_MAX_BATCH_SIZE
        )
    profile = load_profile(arguments.profile)
    if limit is None:
        return profile
    if limit > profile.max_batch_size:
        raise ConfigError(
            f"{arguments.profile} knows batches of up to {profile.max_batch_size}, not of {limit}: "
            "run `trims batch profile` with a larger --max-batch-size"
        )
    return profile.limited(limit)


# --- policies -------------------------------------------------------------------------------------


def policies(words: Sequence[str] | None, profile: LatencyProfile) -> dict[str, RuleMaker]:
    """All policies, or those written: ``auto``, ``window:wait_ms=5``. Raises ConfigError."""
    return {word: _policy(word, profile) for word in words or POLICIES}


def _policy(word: str, profile: LatencyProfile) -> RuleMaker:
    name, _, rest = word.partition(":")
    options: dict[str, Any] = dict(_option(part, word) for part in rest.split(",")) if rest else {}
    try:
        make = rule_maker(name)
        _check_options(word, options, make)
        maker: RuleMaker = functools.partial(make, **options)
        maker(profile, max_batch_size=profile.max_batch_size)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--policy {word}: {error}") from None
    return maker


def _check_options(word: str, options: Mapping[str, Any], make: RuleMaker) -> None:
    known = [each for each in inspect.signature(make).parameters if each not in _GIVEN]
    for name in options:
        if name not in known:
            has = ", ".join(known) or "none"
            raise ConfigError(f"--policy {word}: there is no option {name!r}; there are {has}")


def _option(text: str, word: str) -> tuple[str, float | int | str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--policy {word}: {text!r} is not OPTION=VALUE")
    for parse in (int, float):
        with contextlib.suppress(ValueError):
            return name, parse(value)
    return name, value


# --- requests -------------------------------------------------------------------------------------


def slo_ns_of(arguments: argparse.Namespace) -> int:
    """The SLO of made-up arrivals."""
    return round((arguments.slo_ms or _DEFAULT_SLO_MS) * _NS_PER_MS)


def rate_of(arguments: argparse.Namespace, setup: Setup) -> float:
    """The rate of made-up arrivals, in requests per second."""
    rate: float | None = arguments.rate
    return rate or arguments.load * setup.capacity_qps(slo_ns_of(arguments))


def made_up(arguments: argparse.Namespace, rate_qps: float) -> list[Request]:
    """Requests of the arrival process that was asked for."""
    times_ns = _times_ns(arguments, rate_qps)
    count = arguments.requests or _DEFAULT_REQUESTS
    found = list(requests(times_ns, slo_ms=arguments.slo_ms or _DEFAULT_SLO_MS, count=count))
    if not found:
        raise ConfigError(f"at {rate_qps:g} requests per second not one comes: give a higher rate")
    return found


def _times_ns(arguments: argparse.Namespace, rate_qps: float) -> Iterator[int]:
    random = Random(arguments.seed)
    kind = arguments.arrivals or ("poisson" if arguments.cv is None else "gamma")
    if arguments.cv is not None and kind != "gamma":
        raise ConfigError(f"--cv is of gamma arrivals; {kind} ones have their own")
    if kind == "gamma":
        return gamma(rate_qps, arguments.cv or 1.0, random)
    if kind == "uniform":
        return uniform(rate_qps)
    return {"poisson": poisson, "bursty": bursty}[kind](rate_qps, random)


def trace(arguments: argparse.Namespace) -> list[Request]:
    """The requests of the files, merged.

    Raises FormatError for a file that is no trace, ConfigError for one without objectives.
    """
    found = list(
        merged(*(read_requests(path, slo_ms=arguments.slo_ms) for path in arguments.trace))
    )
    if not found:
        raise FormatError(f"{', '.join(arguments.trace)}: there is no request in it")
    if any(request.deadline_ns == NEVER_NS for request in found):
        raise ConfigError("the trace has no objective for some requests: give one with --slo-ms")
    return found[: arguments.requests]


def read_requests(path: str, *, slo_ms: float | None = None, key: Hashable = None) -> list[Request]:
    """The requests of one file. Raises OSError, and FormatError for a file that is no trace."""
    with naming(path), open(path, encoding="utf-8") as file:
        try:
            return list(read_trace(file, slo_ms=slo_ms, key=key))
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from None
