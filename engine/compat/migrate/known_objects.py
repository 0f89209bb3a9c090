"""Objects of Lightning and Accelerate that a source handles: instances of its own subclasses, and what the libraries pass to their hooks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.compat.lightning.names import DATA, MODULE, OF_CHECKPOINTS, OF_STRATEGIES, REPLACED, VIEW
from engine.compat.migrate.counterparts import counterpart
from engine.compat.migrate.imports import TRANSFORMERS, Api, ClassInfo
from engine.compat.migrate.signatures import Member, member
from engine.compat.migrate.stand_ins import stand_in
from engine.compat.names import ATTRIBUTES
from engine.compat.transformers.names import CONTROL, EVENTS, METHODS, STATE
from engine.utils.errors import nearest

FOLLOWED = {"Trainer": "trainer", "Accelerator": "accelerator", "Fabric": "fabric"}
"""Library classes whose instances the walk follows -> the key of the instance in :func:`known_objects`."""
KINDS = {"LightningModule": "module", "LightningDataModule": "data", "Callback": "callback"}
"""Base class -> the kind of a user's subclass, which is also its key in :func:`known_objects`."""
HOOK_ARGUMENTS = {"trainer": "trainer of a callback", "pl_module": "module"}
"""Names of arguments in methods of Lightning's classes -> the key of the argument's object in :func:`known_objects`."""
EVENT_ARGUMENTS = {"state": "state of transformers", "control": "control of transformers"}
"""Names of arguments in events of transformers' ``TrainerCallback`` -> the key of the argument's object in :func:`known_objects`."""


@dataclass(frozen=True)
class KnownObject:
    """An object of a library, or of a user's subclass, with the classes that it has here."""

    label: str
    """Name of the object in the report."""
    engine_class: type | None = None
    """The class of ``engine`` that replaces the object's class."""
    interop_class: type | None = None
    """The class of ``engine.interop`` that replaces the object's class."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """Attributes that neither class has -> what to use instead."""
    uncalled: Mapping[str, str] = field(default_factory=dict)
    """Methods that a user's subclass may define but that nothing calls here -> what to do instead."""
    known_attributes: Mapping[str, str] = field(default_factory=dict)
    """Attributes whose values are known objects as well -> their keys in :func:`known_objects`."""
    differs_in_engine: tuple[str, ...] = ()
    """Attributes that mean something else in ``engine_class``."""
    library: str = "lightning"
    is_trainer: bool = False
    """Whether the object may be an instance of a user's subclass of ``Trainer``, which may define more attributes."""
    all_names_known: bool = True
    """Whether the object has the library's attributes only; an instance of a user's class may define others."""

    def members(self, name: str) -> tuple[Member | None, Member | None]:
        """The attribute ``name`` of ``engine_class`` and of ``interop_class``; ``None`` for a class that lacks it."""
        engine_class = (
            None if self.engine_class is None or name in self.differs_in_engine else member(self.engine_class, name)
        )
        return engine_class, None if self.interop_class is None else member(self.interop_class, name)

    def advice_for(self, name: str) -> str:
        """Say what to use instead of an attribute that neither class has."""
        if name in self.advice:
            return self.advice[name]
        public = [
            name
            for cls in (self.engine_class, self.interop_class)
            if cls is not None
            for name in dir(cls)
            if name[0] != "_"
        ]
        return f"there is no {name!r} here{nearest(name, public)}"

    def has_as_module(self, name: str) -> bool:
        """Whether ``name`` is an attribute that the object inherits from ``nn.Module``."""
        return self._is_a("torch.nn.Module") and member(stand_in("torch.nn.Module"), name) is not None

    def logs(self, name: str) -> bool:
        """Whether ``name`` is the object's ``log`` or ``log_dict``, which logs to the run."""
        return name in ("log", "log_dict") and self._is_a("engine.TrainModule", "engine.Callback")

    def _is_a(self, *names: str) -> bool:
        return self.engine_class is not None and issubclass(self.engine_class, tuple(map(stand_in, names)))


@dataclass(frozen=True)
class Value:
    """The value of an expression, if it is a known object; ``cls``: the user's class that it is an instance of, if any."""

    known_object: KnownObject
    cls: ClassInfo | None = None


PLAIN_OBJECT = KnownObject("object", all_names_known=False)
"""An instance of a user's class without a base of the libraries; only the known objects among its attributes matter."""
CHECKPOINT = KnownObject("checkpoint", all_names_known=False)
"""The dict that ``on_save_checkpoint`` and ``on_load_checkpoint`` receive."""
_PRIVATE = dict.fromkeys(
    (
        *(
            "_hparams",
            "_to_hparams_dict",
            "_log_hyperparams",
            "_strict_loading",
            "_automatic_optimization",
            "_current_fx_name",
        ),
        *(
            "_apply_batch_transfer_handler",
            "_on_before_batch_transfer",
            "_call_batch_hook",
            "_example_input_array",
            "_metric_attributes",
        ),
        *("_param_requires_grad_state", "_fabric", "_fabric_optimizers", "_verify_is_manual_optimization"),
    ),
    "it is private in Lightning, and not there: save_hyperparameters(mapping) sets hyperparameters, self.run is the run",
)
"""Private attributes of Lightning's module, which published packages use -> what to do."""
_UNCALLED = {name: f"it is never called: define {hooks}" for name, hooks in REPLACED.items()}
_CLASS_FACTS = {
    "Trainer": KnownObject(
        "Trainer",
        known_attributes={"lightning_module": "module", "model": "module", "strategy": "strategy"},
        is_trainer=True,
    ),
    "ModelCheckpoint": KnownObject(
        "ModelCheckpoint",
        uncalled={name: f"it is never called: {sentence}" for name, sentence in OF_CHECKPOINTS.items()},
    ),
}
"""Facts about instances of a library class that its counterparts do not tell."""


def followed(api: Api) -> KnownObject | None:
    """Facts about an instance of a library class; ``None`` if instances of this class are not followed."""
    if api.library == TRANSFORMERS:
        return _of_transformers(api) if api.name.endswith("Trainer") else None
    return known_objects()[FOLLOWED[api.name]] if api.name in FOLLOWED else None


def calls_with_trainer(method: str) -> bool:
    """Whether Lightning calls this method of a callback with ``(trainer, pl_module, ...)``."""
    engine_member = known_objects()["callback"].members(method)[0]
    parameters = () if engine_member is None or engine_member.call is None else engine_member.call.parameters
    return [*parameters][:2] == ["run", "module"]


def _of_transformers(api: Api) -> KnownObject:
    """Facts about an instance of a class of transformers that belongs to its ``Trainer``."""
    roles = {
        "Trainer": "trainer of transformers",
        "Callback": "callback of transformers",
        **{f"Trainer{part.capitalize()}": role for part, role in EVENT_ARGUMENTS.items()},
    }
    role = next((role for ending, role in roles.items() if api.name.endswith(ending)), None)
    return known_objects()[role] if role else KnownObject(api.name, library=TRANSFORMERS, all_names_known=False)


def kind_of(cls: ClassInfo) -> str:
    """The kind of a user's class by its library bases: ``"module"``, ``"data"``, ``"callback"``, ``"other"``; an empty string if it has none."""
    for base in cls.library_bases:
        if base.name in KINDS:
            return KINDS[base.name]
        if base.path.startswith("callbacks."):
            return "callback"
    return "other" if cls.library_bases else ""


def object_of_user_class(cls: ClassInfo) -> KnownObject | None:
    """Facts about instances of the user's class: which class here replaces its library base, and which attributes it has.

    A class that extends a module, a data module or a callback directly has the facts of that kind, another class those of its library base.
    ``None``: it has no base of the libraries.
    """
    kind = kind_of(cls)
    if not kind:
        return None
    base = next((base for base in cls.library_bases if KINDS.get(base.name) == kind), None) or cls.library_bases[0]
    if base.library == TRANSFORMERS:
        return _of_transformers(base)
    if KINDS.get(base.name) == kind:
        return known_objects()[kind]
    known_object = object_of_library(base, all_names_known=False)
    # A library's callback without a counterpart here is treated as a plain callback.
    if kind == "callback" and known_object.engine_class is None and known_object.interop_class is None:
        return known_objects()[kind]
    # The other uses of a class from Fabric count as Lightning's, too.
    return replace(known_object, library="lightning") if base.library == "fabric" else known_object


def object_of_library(api: Api, *, all_names_known: bool = True) -> KnownObject:
    """Describe an instance of a library class, or the class itself; ``all_names_known``: see :attr:`KnownObject.all_names_known`."""
    if api.library == TRANSFORMERS:
        return _of_transformers(api)
    match = counterpart(api)
    engine_class, interop_class = (
        cls if isinstance(cls, type) else None for cls in (match.engine_object, match.interop_object)
    )
    facts = _CLASS_FACTS.get(api.name, KnownObject(api.name))
    return replace(
        facts,
        label=api.name,
        engine_class=engine_class,
        interop_class=interop_class,
        library=api.library,
        all_names_known=all_names_known,
    )


@functools.cache
def known_objects() -> Mapping[str, KnownObject]:
    """The objects that a source may handle, by their role."""
    library = Api("lightning", "")
    module, data, callback, trainer = (
        object_of_library(replace(library, path=name))
        for name in ("LightningModule", "LightningDataModule", "Callback", "Trainer")
    )
    view = replace(trainer, label="trainer", engine_class=stand_in("engine.TrainerView"))
    run = replace(trainer, label="trainer", engine_class=stand_in("engine.Run"))
    engine_advice = ATTRIBUTES["Engine"]
    trainer_attribute = {"trainer": "trainer of a module"}
    return {
        "module": replace(
            module,
            advice=_UNCALLED | _PRIVATE | MODULE,
            uncalled=_UNCALLED,
            known_attributes=trainer_attribute,
            all_names_known=False,
        ),
        "data": replace(data, advice=DATA, known_attributes=trainer_attribute, all_names_known=False),
        "callback": replace(callback, advice=_UNCALLED, uncalled=_UNCALLED, all_names_known=False),
        "trainer of a module": replace(view, advice=ATTRIBUTES["Run"] | VIEW),
        "trainer of a callback": replace(run, advice=ATTRIBUTES["Run"]),
        "trainer": replace(trainer, advice=ATTRIBUTES["Fit"]),
        "strategy": KnownObject("trainer.strategy", advice=OF_STRATEGIES, all_names_known=False),
        "accelerator": replace(
            object_of_library(Api("accelerate", "Accelerator")), advice=engine_advice, differs_in_engine=("step",)
        ),
        "trainer of transformers": KnownObject(
            "Trainer", advice=METHODS, uncalled=METHODS, library=TRANSFORMERS, all_names_known=False
        ),
        "callback of transformers": KnownObject(
            "TrainerCallback", advice=EVENTS, uncalled=EVENTS, library=TRANSFORMERS, all_names_known=False
        ),
        "control of transformers": KnownObject("control", advice=CONTROL, library=TRANSFORMERS),
        "state of transformers": KnownObject("state", advice=STATE, library=TRANSFORMERS),
        "fabric": replace(object_of_library(Api("fabric", "Fabric")), advice=engine_advice, library="lightning"),
    }
