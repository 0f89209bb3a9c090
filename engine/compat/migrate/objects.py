"""The objects that a source sees: its own classes with a base of the libraries, and what the libraries hand to it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.compat.migrate.counterparts import Thing, counterpart, things
from engine.compat.migrate.imports import ClassInfo

MADE = {"Trainer": "trainer", "Accelerator": "accelerator", "Fabric": "fabric"}
"""Classes whose objects are followed, and what they are."""
KINDS = {"LightningModule": "module", "LightningDataModule": "data", "Callback": "callback"}
PASSED = {"trainer": "trainer of a callback", "pl_module": "module"}
"""What the names of arguments stand for in classes of Lightning."""
PLAIN = Thing("object", None, None, closed=False)
"""An object of a class without a base of the libraries: only what it keeps is of interest."""


@dataclass(frozen=True)
class Known:
    """An object that an expression gives: a thing of a library, of the user's class ``cls`` if it has one."""

    thing: Thing
    cls: ClassInfo | None = None


def kind_of(cls: ClassInfo) -> str:
    """``"module"``, ``"data"``, ``"callback"``, ``"other"`` (of the libraries) or an empty string (none of theirs)."""
    for base in cls.foreign:
        if base.name in KINDS:
            return KINDS[base.name]
        if base.path.startswith("callbacks."):
            return "callback"
    return "other" if cls.foreign else ""


def thing_of(cls: ClassInfo) -> Thing | None:
    """What an object of the user's class is."""
    kind = kind_of(cls)
    if not kind:
        return None
    base = next((each for each in cls.foreign if KINDS.get(each.name) == kind), None) or cls.foreign[0]
    if KINDS.get(base.name) == kind:
        return things()[kind]
    found = counterpart(base)
    plain, translated = (each if isinstance(each, type) else None for each in (found.plain, found.translated))
    if plain is None and translated is None and kind == "callback":
        return things()[kind]
    return Thing(base.name, plain, translated, closed=False)
