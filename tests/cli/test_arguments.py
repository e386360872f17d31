"""Options of commands: one that has no effect beside another is refused, not ignored."""

from __future__ import annotations

import pytest

from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("batch simulate --line 2,20 --trace t --cv 3", "--cv has no effect with --trace"),
        (
            "batch simulate --line 2,20 --trace t --arrivals uniform --cv 3",
            "--arrivals, --cv have no effect with --trace",
        ),
        ("batch plot latency --line 2,20 --trace t --cv 3 --json", "--cv has no effect with"),
        ("batch plot latency --line 2,20 --loads 1,2 --json", "--loads has no effect on `plot lat"),
        ("batch plot load --line 2,20 --load 0.5 --json", "--load has no effect on `plot load`"),
        ("batch plot profile --line 2,20 --policy auto --json", "--policy has no effect on `plot"),
        ("batch plot profile --line 2,20 --json -o p.png", "--output has no effect with --json"),
        (
            "batch profile os:getcwd --item os:sep --dtype int64",
            "--dtype has no effect with",
        ),
        (
            "batch profile os:getcwd --item os:sep --dtype float32",  # which is the default
            "--dtype has no effect with",
        ),
        ("batch profile os:getcwd --item os:sep --device cuda", "--device has no effect with"),
        ("stage plot nosuch --json -o p.png", "--output has no effect with --json"),
        ("plan simulate nosuch --trace a=b --seconds 3", "--seconds has no effect with --trace"),
        ("plan simulate nosuch --trace a=b --cv 3", "--cv has no effect with --trace"),
        ("plan simulate nosuch --load-s 3", "--load-s has no effect without --replan"),
        ("plan simulate nosuch --period-s 3", "--period-s has no effect without --replan"),
        ("plan ensemble p.json --dtype int64", "--dtype has no effect with p.json, which was mea"),
        ("top --once --interval 3", "--interval has no effect with --json or --once"),
    ],
)
def test_what_has_no_effect_is_refused(
    words: str, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == Exit.USAGE
    printed = capsys.readouterr()
    assert printed.err.startswith(f"trims: {refused}")
    assert not printed.out
