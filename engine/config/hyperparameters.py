"""Hyperparameters: the constructor arguments of an object."""

from __future__ import annotations

import inspect
import re
import typing
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, Protocol

from engine.config.typed_values import converted, hints
from engine.utils.errors import nearest


class HParams(dict[str, Any]):
    """A dict whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter {name!r}; there are: {', '.join(map(str, self)) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


class Owner(Protocol):
    """A module or a data module, which has hyperparameters."""

    hparams_name: str | None

    @property
    def hparams(self) -> HParams: ...


def save(
    owner: Owner, names_or_object: Sequence[Any], ignore: str | Iterable[str] | None, logger: bool, frame: Any
) -> None:
    """Add the hyperparameters of a call of ``save_hyperparameters`` to ``owner.hparams``.

    Args:
        names_or_object: names of constructor arguments, one object with all hyperparameters, or nothing for all arguments.
        ignore: names of hyperparameters to leave out.
        logger: whether loggers get these hyperparameters.
        frame: the caller's frame, inside the constructor.

    Raises:
        TypeError, ValueError: ``names_or_object`` is none of these, or has a name that is not an argument.
    """
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    arguments = init_arguments(owner, frame)
    objects = [item for item in names_or_object if not isinstance(item, str)]
    if objects:
        if len(names_or_object) > 1:
            raise TypeError(
                f"save_hyperparameters got {len(names_or_object)} arguments: give names, or one object with all hyperparameters"
            )
        entries = _entries(objects[0])
        owner.hparams_name = next((name for name, value in arguments.items() if value is objects[0]), None)
    elif absent := [name for name in names_or_object if name not in arguments]:
        has = ", ".join(arguments)
        raise ValueError(
            f"save_hyperparameters({absent[0]!r}): {type(owner).__name__}.__init__ has no such argument; it has {has}"
        )
    else:
        entries = {name: arguments[name] for name in names_or_object or arguments}
    entries = {name: value for name, value in entries.items() if name not in ignored}
    for name in ignored:
        owner.hparams.pop(name, None)  # a base class may have saved it
    owner.hparams.update(entries)
    attributes = vars(owner)
    attributes["_hparams_initial"] = {name: _copied(value) for name, value in owner.hparams.items()}
    attributes["_hparams_unlogged"] = (attributes.get("_hparams_unlogged", set()) - set(entries)) | (
        set() if logger else set(entries)
    )


def saved_by(owner: object) -> HParams:
    """The hyperparameters of a module or a data module; empty if its constructor has not begun yet."""
    hparams: HParams = vars(owner).setdefault("_hparams", HParams())
    return hparams


def initial(owner: object) -> HParams:
    """A copy of the hyperparameters as they were when ``save_hyperparameters`` was last called."""
    return HParams({name: _copied(value) for name, value in vars(owner).get("_hparams_initial", {}).items()})


def for_loggers(owner: object) -> dict[str, Any]:
    """The hyperparameters, except those that were saved with ``logger=False``."""
    unlogged = getattr(owner, "_hparams_unlogged", ())
    return {name: value for name, value in getattr(owner, "hparams", {}).items() if name not in unlogged}


def _entries(source: Any) -> dict[str, Any]:
    """The hyperparameters that one object holds, by name."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, Namespace):
        return dict(vars(source))
    if is_dataclass(source) and not isinstance(source, type):
        return {field.name: getattr(source, field.name) for field in fields(source)}
    raise TypeError(
        f"save_hyperparameters got {type(source).__name__}: give names of arguments, or a dict, an argparse.Namespace or a dataclass object"
    )


def _copied(value: Any) -> Any:
    """Copy nested lists, tuples, sets and dicts; the objects in them are shared, not copied."""
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    return type(value)({k: _copied(v) for k, v in value.items()}) if type(value) in (dict, HParams) else value


def as_data(value: Any) -> Any:
    """Convert configuration objects (dataclasses, ``Namespace``, other mappings and sequences) to dicts and lists; any other value is returned
    unchanged."""
    if isinstance(value, Namespace) or (is_dataclass(value) and not isinstance(value, type)):
        value = _entries(value)
    if isinstance(value, Mapping) and type(value).__module__ != "collections":
        return {key: as_data(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(as_data, value))
    is_builtin = isinstance(value, (str, bytes, bytearray, tuple)) or type(value).__module__ == "builtins"
    return [as_data(item) for item in value] if isinstance(value, Sequence) and not is_builtin else value


def _as_annotated(hint: Any, value: Any, name: str) -> Any:
    """Reverse :func:`as_data`, as far as a constructor's annotation ``hint`` tells the type; other dicts become :class:`HParams`."""
    if not isinstance(value, Mapping):
        return value
    kinds = [*typing.get_args(hint), hint]
    if Namespace in kinds:
        return Namespace(**value)
    if any(is_dataclass(kind) for kind in kinds):
        return converted(hint, value, name)
    return (
        HParams({key: _as_annotated(Any, item, name) for key, item in value.items()})
        if type(value) in (dict, HParams)
        else value
    )


def init_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the constructors of ``owner`` that are running in ``frame`` and its callers (a subclass's ``__init__`` calls its base's)."""
    init_values: dict[str, Any] = {}
    while frame is not None:
        arguments = inspect.getargvalues(frame)
        # Between two constructors there may be a decorator, and before the first a helper method that saves the hyperparameters.
        if frame.f_code.co_name == "__init__" and arguments.args and arguments.locals.get(arguments.args[0]) is owner:
            values = {name: arguments.locals[name] for name in arguments.args[1:] if name in arguments.locals}
            first = frame.f_code.co_argcount
            keyword_only = frame.f_code.co_varnames[first : first + frame.f_code.co_kwonlyargcount]
            values.update({name: arguments.locals[name] for name in keyword_only if name in arguments.locals})
            if arguments.keywords:
                values.update(arguments.locals.get(arguments.keywords, {}))
            init_values.update(values)
        frame = frame.f_back
    init_values.pop("__class__", None)
    return init_values


def arguments_from_saved(
    cls: Callable[..., Any], saved: Mapping[str, Any], argument_for_all: str | None = None
) -> dict[str, Any]:
    """The arguments for ``cls``, by name, that saved hyperparameters provide; parameters as in :func:`constructor_arguments`."""
    parameters = inspect.signature(cls).parameters
    named_parameters = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    argument_for_all = _argument_for_all(
        named_parameters,
        [name for name, p in named_parameters.items() if p.default is p.empty and name not in saved],
        saved,
        argument_for_all,
    )
    annotations = hints(cls)
    if argument_for_all is not None:
        return {argument_for_all: _as_annotated(annotations.get(argument_for_all), HParams(saved), argument_for_all)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: _as_annotated(annotations.get(name), value, name)
        for name, value in saved.items()
        if takes_any or name in named_parameters
    }


def replaced_by_defaults(cls: Callable[..., Any], texts: Mapping[str, str], available: Iterable[str]) -> dict[str, str]:
    """The hyperparameters that would silently get the constructor's default, because a checkpoint could not hold their values; by name, as text.

    Args:
        texts: the values of all hyperparameters as text, from a checkpoint's manifest.
        available: the names of arguments whose values are saved or given.
    """
    defaults = {
        name: p.default
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is not p.empty and name not in set(available)
    }
    lost_texts = {name: str(texts[name]) for name in defaults if name in texts}
    return {
        name: text
        for name, text in lost_texts.items()
        if _ADDRESS.sub("", text) != _ADDRESS.sub("", as_text(defaults[name]))
    }


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def as_text(value: Any) -> str:
    """The text by which a manifest records a hyperparameter that is not a plain value."""
    return repr(value)[:200]


def constructor_arguments(
    cls: type, saved: Mapping[str, Any], overrides: Mapping[str, Any], argument_for_all: str | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments to construct ``cls`` with, from saved hyperparameters.

    Hyperparameters that are not arguments of the constructor are ignored. If one argument takes all hyperparameters, it gets them as a dict, in
    which overrides replace entries.

    Args:
        overrides: values that take precedence over ``saved``.
        argument_for_all: the argument that took all of ``saved`` as one dict.

    Returns:
        The positional arguments, and the arguments by name.

    Raises:
        TypeError: a required argument is missing, or an override is not an argument of the constructor; the message names it.
    """
    parameters = inspect.signature(cls).parameters
    named_parameters = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [
        name
        for name, p in named_parameters.items()
        if p.default is p.empty and name not in saved and name not in overrides
    ]
    argument_for_all = _argument_for_all(named_parameters, missing, saved, argument_for_all)
    entries = {
        name: value
        for name, value in overrides.items()
        if argument_for_all is not None and name in saved and name not in named_parameters
    }
    overrides = {name: value for name, value in overrides.items() if name not in entries}
    if not takes_any and (unknown := [name for name in overrides if name not in named_parameters]):
        raise TypeError(
            f"{cls.__name__}.__init__ has no argument {unknown[0]!r}{nearest(unknown[0], named_parameters)}; "
            f"it has {', '.join(named_parameters) or 'none'}"
        )
    annotations = hints(cls)
    if argument_for_all is not None:
        arguments = {
            argument_for_all: _as_annotated(
                annotations.get(argument_for_all), HParams({**saved, **entries}), argument_for_all
            ),
            **overrides,
        }
    else:
        used_values = {
            name: value
            for name, value in saved.items()
            if (takes_any or name in named_parameters) and name not in overrides
        }
        arguments = {
            **{name: _as_annotated(annotations.get(name), value, name) for name, value in used_values.items()},
            **overrides,
        }
    if missing := [name for name in missing if name not in arguments]:
        has = ", ".join(map(str, saved)) or "none"
        raise TypeError(
            f"{cls.__name__}.__init__ needs {', '.join(map(repr, missing))}, not among the checkpoint's hyperparameters ({has}): give it as an "
            f"override, load_from_checkpoint(path, {missing[0]}=...), or save it with save_hyperparameters()"
        )
    positional = [name for name, p in named_parameters.items() if p.kind is p.POSITIONAL_ONLY and name in arguments]
    return [arguments.pop(name) for name in positional], arguments


def _argument_for_all(
    named_parameters: Mapping[str, Any], missing: Sequence[str], saved: Mapping[str, Any], argument_for_all: str | None
) -> str | None:
    """The constructor's argument that takes all hyperparameters as one dict; ``None``: no argument does. ``missing``: required arguments without a
    value."""
    if argument_for_all is None and saved and len(missing) == 1 and not named_parameters.keys() & saved.keys():
        return missing[0]
    return argument_for_all if argument_for_all in named_parameters else None
