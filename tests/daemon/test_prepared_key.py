"""Every part of a prepared model's key has a test that fails when it is dropped."""

from __future__ import annotations

import itertools

import pytest
from prepared_models import RECIPE

from trims_shim.daemon.prepared import key as prepared_key
from trims_shim.daemon.prepared.key import entry_key
from trims_shim.daemon.prepared.values import Content
from trims_shim.wire.messages import SessionRecipe

CONTENT = Content("a" * 64, (("w1", "b" * 64), ("w2", "c" * 64)))
OTHERS: dict[str, object] = {
    "runtime": "1.31.2",
    "build": "git-0000000; 123; 457",
    "providers": (("CPUExecutionProvider", "arena_extend_strategy", "kSameAsRequested"),),
    "level": "ORT_ENABLE_BASIC",
    "entries": (("session.intra_op.allow_spinning", "0"),),
    "free_dimensions": (("name", "batch", "1"),),
    "disabled_optimizers": ("ConstantFolding",),
    "is_deterministic": True,
    "prepack": "off",
}


def key(content: Content = CONTENT, recipe: SessionRecipe = RECIPE, cpu: str = "AVX512") -> str:
    return entry_key(content, recipe, cpu=cpu)


@pytest.mark.parametrize("field", SessionRecipe._fields)
def test_every_field_of_the_recipe_counts(field: str) -> None:
    assert key(recipe=RECIPE._replace(**{field: OTHERS[field]})) != key()


def test_the_model_and_its_external_files_count() -> None:
    (first, digest), second = CONTENT.externals
    others = [
        Content("d" * 64, CONTENT.externals),
        Content(CONTENT.digest),
        Content(CONTENT.digest, ((first, digest),)),
        Content(CONTENT.digest, ((first, "d" * 64), second)),
        Content(CONTENT.digest, (("w3", digest), second)),
        Content(CONTENT.digest, (("w1" + digest, ""), second)),
        Content(CONTENT.digest, CONTENT.externals, "here"),
        Content(CONTENT.digest, CONTENT.externals, "there"),
    ]
    keys = [key(each) for each in (CONTENT, *others)]
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_the_order_of_external_files_does_not() -> None:
    assert key(Content(CONTENT.digest, CONTENT.externals[::-1])) == key()


def test_the_processor_and_the_layout_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    assert key(cpu="AVX2") != before
    monkeypatch.setattr(prepared_key, "LAYOUT_VERSION", prepared_key.LAYOUT_VERSION + 1)
    assert key() != before


def test_it_does_not_change_by_accident() -> None:
    """Entries on users' disks are found by it; raise LAYOUT_VERSION when this changes."""
    assert len(key()) == 64
    assert key() == key(Content("a" * 64, CONTENT.externals), RECIPE._replace())
