"""Clients that compute for as long as they are told, while something happens to them or others."""

from __future__ import annotations

from harness import Child

__all__ = ["BUSY_S", "LOOP", "answers", "compute", "kinds", "start"]

BUSY_S = 1.0

# Told for how long, it computes again and again, and says the different answers it got, in order.
LOOP = """\
while True:
    answers, end = {}, time.monotonic() + hear()
    say("busy")
    while not answers or time.monotonic() < end:
        try:
            answers[compute()] = 1
        except Exception as error:
            answers[f"error {getattr(error, 'result', type(error).__name__)}"] = 1
    say(list(answers))
"""
"""The end of a client's script, which has defined ``compute() -> str``."""


def start(*clients: Child) -> None:
    """They compute when this returns."""
    for client in clients:
        client.say(BUSY_S)
    for client in clients:
        assert client.hear(60) == "busy"


def answers(*clients: Child) -> list[list[str]]:
    """Of clients that were started."""
    return [client.hear(60) for client in clients]


def compute(*clients: Child) -> list[list[str]]:
    """Start them, and wait for their answers."""
    start(*clients)
    return answers(*clients)


def kinds(found: list[list[str]], *, right: str) -> list[str]:
    """Of each answer whether it is right or wrong, or the error."""
    flat = [answer for each in found for answer in each]
    return ["right" if a == right else a if a.startswith("error") else "wrong" for a in flat]
