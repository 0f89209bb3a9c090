"""Hyperparameters: what an object was constructed with."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any


class HParams(dict[str, Any]):
    """A dict whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are: {', '.join(map(str, self)) or 'none'}") from None

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
        keyword_only = frame.f_code.co_varnames[frame.f_code.co_argcount : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        values.update({name: arguments.locals[name] for name in keyword_only if name in arguments.locals})
        if arguments.keywords:
            values.update(arguments.locals.get(arguments.keywords, {}))
        found.update(values)
        frame = frame.f_back
    found.pop("__class__", None)
    return found
