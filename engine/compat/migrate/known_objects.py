"""The objects that a source sees: its own classes with a base of the libraries, and what the libraries hand to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.compat.lightning.names import DATA, MODULE, OF_CHECKPOINTS, OF_STRATEGIES, REPLACED, VIEW
from engine.compat.migrate.counterparts import counterpart
from engine.compat.migrate.imports import Api, ClassInfo
from engine.compat.migrate.signatures import Member, member
from engine.compat.migrate.stand_ins import stand_in
from engine.compat.names import ATTRIBUTES
from engine.utils.errors import nearest

MADE = {"Trainer": "trainer", "Accelerator": "accelerator", "Fabric": "fabric"}
"""Classes whose objects are followed, and what they are."""
KINDS = {"LightningModule": "module", "LightningDataModule": "data", "Callback": "callback"}
PASSED = {"trainer": "trainer of a callback", "pl_module": "module"}
"""Arguments by their names in classes of Lightning: the thing that each one is."""


@dataclass(frozen=True)
class Thing:
    """An object of the libraries as a source sees it."""

    label: str
    """Name of the thing in the report."""
    plain: type | None = None
    """The class of ``engine`` in its place."""
    translated: type | None = None
    """The class of ``engine.interop`` in its place."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Attributes that neither has: what to use instead."""
    uncalled: Mapping[str, str] = field(default_factory=dict)
    """Methods that a class of the sources may define and that nothing calls: what to do instead."""
    gives: Mapping[str, str] = field(default_factory=dict)
    """Attributes that are things themselves, with their key in :func:`things`."""
    differing: tuple[str, ...] = ()
    """Attributes that mean something else in ``plain``."""
    library: str = "lightning"
    is_trainer: bool = False
    """The object may be one of a subclass of ``Trainer`` in the sources, which has attributes of its own."""
    closed: bool = True
    """Whether an attribute that neither class has can only be the library's; an object of a user's class may have its own."""

    def members(self, name: str) -> tuple[Member | None, Member | None]:
        """The attribute of the plain and of the translated class."""
        plain = None if self.plain is None or name in self.differing else member(self.plain, name)
        return plain, None if self.translated is None else member(self.translated, name)

    def answer(self, name: str) -> str:
        """The sentence about an attribute that neither has."""
        if name in self.answers:
            return self.answers[name]
        public = [
            name for cls in (self.plain, self.translated) if cls is not None for name in dir(cls) if name[0] != "_"
        ]
        return f"there is no {name!r} here{nearest(name, public)}"

    def has_as_module(self, name: str) -> bool:
        """Whether the object is an ``nn.Module``, and every ``nn.Module`` has the attribute."""
        return self._is_a("torch.nn.Module") and member(stand_in("torch.nn.Module"), name) is not None

    def logs(self, name: str) -> bool:
        """Whether the attribute is a method that logs into a run."""
        return name in ("log", "log_dict") and self._is_a("engine.TrainModule", "engine.Callback")

    def _is_a(self, *names: str) -> bool:
        return self.plain is not None and issubclass(self.plain, tuple(map(stand_in, names)))


@dataclass(frozen=True)
class Known:
    """An object that an expression gives: a thing of a library, of the user's class ``cls`` if it has one."""

    thing: Thing
    cls: ClassInfo | None = None


PLAIN = Thing("object", closed=False)
"""An object of a class without a base of the libraries: only what it keeps is of interest."""
CHECKPOINT = Thing("checkpoint", closed=False)
"""The dict that ``on_save_checkpoint`` and ``on_load_checkpoint`` get."""
_UNCALLED = {name: f"it is never called: define {hooks}" for name, hooks in REPLACED.items()}
_OF_CLASSES = {
    "Trainer": Thing(
        "Trainer", gives={"lightning_module": "module", "model": "module", "strategy": "strategy"}, is_trainer=True
    ),
    "ModelCheckpoint": Thing(
        "ModelCheckpoint",
        uncalled={name: f"it is never called: {sentence}" for name, sentence in OF_CHECKPOINTS.items()},
    ),
}
"""Facts about a class besides its counterparts."""


def kind_of(cls: ClassInfo) -> str:
    """``"module"``, ``"data"``, ``"callback"``, ``"other"`` (of the libraries) or an empty string (none of theirs)."""
    for base in cls.foreign:
        if base.name in KINDS:
            return KINDS[base.name]
        if base.path.startswith("callbacks."):
            return "callback"
    return "other" if cls.foreign else ""


def thing_of(cls: ClassInfo) -> Thing | None:
    """The thing that an object of the user's class is."""
    kind = kind_of(cls)
    if not kind:
        return None
    base = next((base for base in cls.foreign if KINDS.get(base.name) == kind), None) or cls.foreign[0]
    if KINDS.get(base.name) == kind:
        return things()[kind]
    thing = of_class(base, closed=False)
    if kind == "callback" and thing.plain is None and thing.translated is None:
        return things()[kind]
    return replace(thing, library="lightning") if base.library == "fabric" else thing  # as the rest of such a class


def of_class(api: Api, *, closed: bool = True) -> Thing:
    """An object of a class of the libraries, or the class itself."""
    match = counterpart(api)
    plain, translated = (cls if isinstance(cls, type) else None for cls in (match.plain, match.translated))
    more = _OF_CLASSES.get(api.name, Thing(api.name))
    return replace(more, label=api.name, plain=plain, translated=translated, library=api.library, closed=closed)


@functools.cache
def things() -> Mapping[str, Thing]:
    """The objects that a source may see, by what they are to it."""
    library = Api("lightning", "")
    module, data, callback, trainer = (
        of_class(replace(library, path=name))
        for name in ("LightningModule", "LightningDataModule", "Callback", "Trainer")
    )
    view = replace(trainer, label="trainer", plain=stand_in("engine.TrainerView"))
    run = replace(trainer, label="trainer", plain=stand_in("engine.Run"))
    engine = ATTRIBUTES["Engine"]
    gives = {"trainer": "trainer of a module"}
    return {
        "module": replace(module, answers=_UNCALLED | MODULE, uncalled=_UNCALLED, gives=gives, closed=False),
        "data": replace(data, answers=DATA, gives=gives, closed=False),
        "callback": replace(callback, answers=_UNCALLED, uncalled=_UNCALLED, closed=False),
        "trainer of a module": replace(view, answers=ATTRIBUTES["Run"] | VIEW),
        "trainer of a callback": replace(run, answers=ATTRIBUTES["Run"]),
        "trainer": replace(trainer, answers=ATTRIBUTES["Fit"]),
        "strategy": Thing("trainer.strategy", answers=OF_STRATEGIES, closed=False),
        "accelerator": replace(of_class(Api("accelerate", "Accelerator")), answers=engine, differing=("step",)),
        "fabric": replace(of_class(Api("fabric", "Fabric")), answers=engine, library="lightning"),
    }
