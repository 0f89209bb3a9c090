"""Hyperparameters: the constructor arguments of an object."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from engine.utils.errors import nearest


class HParams(dict[str, Any]):
    """A dict whose entries are attributes as well."""

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


def init_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of ``owner``'s constructors that are running in ``frame`` and its callers (a subclass's ``__init__`` around a base's)."""
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        arguments = inspect.getargvalues(frame)
        if not arguments.args or arguments.locals[arguments.args[0]] is not owner:
            break
        values = {name: arguments.locals[name] for name in arguments.args[1:] if name in arguments.locals}
        keyword_only = frame.f_code.co_varnames[
            frame.f_code.co_argcount : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        ]
        values.update({name: arguments.locals[name] for name in keyword_only if name in arguments.locals})
        if arguments.keywords:
            values.update(arguments.locals.get(arguments.keywords, {}))
        found.update(values)
        frame = frame.f_back
    found.pop("__class__", None)
    return found


def argument_name(owner: object, frame: FrameType | None, value: object) -> str | None:
    """The name of the constructor's argument that is ``value``, if any."""
    return next((name for name, given in init_arguments(owner, frame).items() if given is value), None)


def kept_arguments(cls: Callable[..., Any], saved: Mapping[str, Any], whole: str | None = None) -> dict[str, Any]:
    """The arguments of ``cls`` that saved hyperparameters provide, by name; parameters as of :func:`constructor_arguments`."""
    parameters = inspect.signature(cls).parameters
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    whole = _whole(
        named, [name for name, p in named.items() if p.default is p.empty and name not in saved], saved, whole
    )
    if whole is not None:
        return {whole: HParams(saved)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in saved.items() if takes_any or name in named}


def replaced_by_defaults(cls: Callable[..., Any], texts: Mapping[str, str], given: Iterable[str]) -> dict[str, str]:
    """Hyperparameters whose values a checkpoint could not hold, by name, and for which the constructor's default differs.

    Args:
        texts: of the values of all hyperparameters, as in a checkpoint's manifest.
        given: names of those that are saved, or given otherwise.
    """
    defaults = {
        name: p.default
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is not p.empty and name not in set(given)
    }
    lost = {name: str(texts[name]) for name in defaults if name in texts}
    return {
        name: text for name, text in lost.items() if _ADDRESS.sub("", text) != _ADDRESS.sub("", as_text(defaults[name]))
    }


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def as_text(value: Any) -> str:
    """The text in a manifest for a hyperparameter that is not a plain value."""
    return repr(value)[:200]


def constructor_arguments(
    cls: type, saved: Mapping[str, Any], overrides: Mapping[str, Any], whole: str | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments to construct ``cls`` with, from saved hyperparameters.

    Those without a constructor argument are ignored. A constructor with one argument for all of them gets the dict, with
    overrides applied to its entries.

    Args:
        overrides: they win over ``saved``.
        whole: the argument that was the dict of all of ``saved``.

    Returns:
        Positional arguments and arguments by name.

    Raises:
        TypeError: a required argument is missing, or an override is not an argument; the message names it.
    """
    parameters = inspect.signature(cls).parameters
    named = {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [
        name for name, p in named.items() if p.default is p.empty and name not in saved and name not in overrides
    ]
    whole = _whole(named, missing, saved, whole)
    entries = {
        name: value for name, value in overrides.items() if whole is not None and name in saved and name not in named
    }
    overrides = {name: value for name, value in overrides.items() if name not in entries}
    if not takes_any and (strange := [name for name in overrides if name not in named]):
        raise TypeError(
            f"{cls.__name__}.__init__ has no argument {strange[0]!r}{nearest(strange[0], named)}; it has {', '.join(named) or 'none'}"
        )
    if whole is not None:
        found = {whole: HParams({**saved, **entries}), **overrides}
    else:
        found = {**{name: value for name, value in saved.items() if takes_any or name in named}, **overrides}
    if missing := [name for name in missing if name not in found]:
        has = ", ".join(map(str, saved)) or "none"
        raise TypeError(
            f"{cls.__name__}.__init__ needs {', '.join(map(repr, missing))}, not among the checkpoint's hyperparameters ({has}): give it as an "
            f"override, load_from_checkpoint(path, {missing[0]}=...), or save it with save_hyperparameters()"
        )
    first = [name for name, p in named.items() if p.kind is p.POSITIONAL_ONLY and name in found]
    return [found.pop(name) for name in first], found


def _whole(named: Mapping[str, Any], missing: Sequence[str], saved: Mapping[str, Any], whole: str | None) -> str | None:
    """The constructor's argument that takes all hyperparameters as one dict, if one does."""
    if whole is None and saved and len(missing) == 1 and not named.keys() & saved.keys():
        return missing[0]
    return whole if whole in named else None
