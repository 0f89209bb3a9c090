"""The objects of the libraries, and what they have here."""

from __future__ import annotations

import pytest

from engine.compat.migrate.known_objects import known_objects


def test_every_thing_is_a_class_of_ours() -> None:
    for name, known in known_objects().items():
        is_described = name == "strategy" or known.library == "transformers"
        assert isinstance(known.engine_class, type) or is_described
        assert known.interop_class is not None or name == "fabric" or is_described


def test_every_public_name_of_lightnings_classes_has_an_answer() -> None:
    """Where neither class has a name, the report says what to use instead."""
    lightning = pytest.importorskip("lightning")
    for kind, cls in (("module", lightning.LightningModule), ("trainer of a module", lightning.Trainer)):
        known = known_objects()[kind]
        names = [
            name for name in dir(cls) if not name.startswith("_") and name != "smart_apply"
        ]  # transformers adds it
        unanswered = [name for name in names if not any(known.members(name)) and name not in known.advice]
        assert unanswered == []


def test_no_name_is_suggested_for_itself() -> None:
    for owner in known_objects().values():
        for name in {
            each for kind in (owner.engine_class, owner.interop_class) if kind is not None for each in dir(kind)
        }:
            assert f"did you mean {name!r}" not in owner.advice_for(name)


def test_what_a_thing_gives_is_a_thing() -> None:
    assert {key for known in known_objects().values() for key in known.known_attributes.values()} <= set(
        known_objects()
    )
