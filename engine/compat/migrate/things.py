"""The objects that a source sees: its own classes with a base of the libraries, and what the libraries hand to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.compat.lightning.names import DATA, MODULE, REPLACED, VIEW
from engine.compat.migrate.counterparts import counterpart, translated
from engine.compat.migrate.imports import Api, ClassInfo
from engine.compat.migrate.signatures import Member, member
from engine.compat.migrate.stand_ins import stand_in
from engine.compat.names import ATTRIBUTES
from engine.utils.errors import nearest

MADE = {"Trainer": "trainer", "Accelerator": "accelerator", "Fabric": "fabric"}
"""Classes whose objects are followed, and what they are."""
KINDS = {"LightningModule": "module", "LightningDataModule": "data", "Callback": "callback"}
PASSED = {"trainer": "trainer of a callback", "pl_module": "module"}
"""What the names of arguments stand for in classes of Lightning."""


@dataclass(frozen=True)
class Thing:
    """An object of the libraries as a source sees it.

    ``plain``: the class of ``engine`` in its place; ``translated``: that of ``engine.interop``. ``answers``: what to use instead of an attribute
    that neither has. ``closed``: an attribute that neither has is theirs, not one of the user's own class.
    """

    label: str
    plain: type | None
    translated: type | None
    answers: Mapping[str, str] = field(default_factory=dict)
    closed: bool = True

    def has(self, name: str) -> tuple[Member | None, Member | None]:
        """The attribute of the plain and of the translated class."""
        return tuple(None if each is None else member(each, name) for each in (self.plain, self.translated))  # type: ignore[return-value]

    def instead(self, name: str) -> str:
        """What to do about an attribute that neither has."""
        if name in self.answers:
            return self.answers[name]
        known = [each for owner in (self.plain, self.translated) if owner is not None for each in dir(owner)]
        return f"there is no {name!r} here{nearest(name, [each for each in known if each[0] != '_'])}"


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


def _interop_class(library: str, name: str) -> type | None:
    found = translated(Api(library, name))[0]
    return found if inspect.isclass(found) else None


@functools.cache
def things() -> Mapping[str, Thing]:
    """The objects that a source may see, by what they are to it."""
    of_module = {**REPLACED_TEXTS, **MODULE}
    trainer = _interop_class("lightning", "Trainer")
    return {
        "module": Thing(
            "LightningModule",
            stand_in("engine.TrainModule"),
            _interop_class("lightning", "LightningModule"),
            of_module,
            False,
        ),
        "data": Thing(
            "LightningDataModule",
            stand_in("engine.DataModule"),
            _interop_class("lightning", "LightningDataModule"),
            DATA,
            False,
        ),
        "callback": Thing(
            "Callback", stand_in("engine.Callback"), _interop_class("lightning", "Callback"), REPLACED_TEXTS, False
        ),
        "trainer of a module": Thing("trainer", stand_in("engine.TrainerView"), trainer, {**ATTRIBUTES["Run"], **VIEW}),
        "trainer of a callback": Thing("trainer", stand_in("engine.Run"), trainer, ATTRIBUTES["Run"]),
        "trainer": Thing("Trainer", stand_in("engine.Fit"), trainer, ATTRIBUTES["Fit"]),
        "accelerator": Thing(
            "Accelerator", stand_in("engine.Engine"), _interop_class("accelerate", "Accelerator"), ATTRIBUTES["Engine"]
        ),
        "fabric": Thing("Fabric", stand_in("engine.Engine"), None, ATTRIBUTES["Engine"]),
    }


REPLACED_TEXTS = {name: f"it is never called: define {instead}" for name, instead in REPLACED.items()}


def of_nn_module(name: str) -> bool:
    """Whether every ``nn.Module`` has the attribute."""
    return member(stand_in("torch.nn.Module"), name) is not None
