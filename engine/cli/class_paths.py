"""Imports what a class path names: ``my.module:Net``, ``net.py:Net`` or ``net.py``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.cli.terminal import UsageError
from engine.utils.errors import nearest

CALLBACKS = "engine.callbacks"
"""The package in which bare names of callbacks are looked up. Imported by name after :func:`importable_here`, which makes a project's own
``callbacks.py`` the module ``callbacks``."""


def importable_here() -> None:
    """Make modules of the current directory importable, as ``python script.py`` does for modules next to the script."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def load(text: str, role: str, base: type, package: str | None = None) -> Any:
    """Import and return the object that ``text`` names.

    Args:
        text: ``module:name``, ``module.name``, ``file.py:name``, or a module or file alone that defines one subclass of ``base``.
        role: what the object is for, such as ``"the target"``, for errors.
        base: the class whose subclass is searched for in a module or a file alone.
        package: the package in which a bare name is looked up.

    Raises:
        UsageError: there is no such module, file or name, or not exactly one matching class.
        Exception: an exception of the module's import.
    """
    path, colon, name = text.partition(":")
    if not path or (colon and not name):
        raise UsageError(f"{role} {text!r} is not a target: write my.module:Name, file.py:Name or file.py")
    try:
        if path.endswith(".py"):
            module = _from_file(Path(path), role)
        elif colon:
            module = _import(path, text, role)
        elif package is not None and "." not in path and not importlib.util.find_spec(path):
            module, name = importlib.import_module(package), path
        else:
            module, name = _import_longest(path, text, role)
    except SystemExit as end:  # a script with top-level code would end this program as if it had succeeded
        raise UsageError(
            f"{role} {text!r}: its module calls exit({end.code!r}) when it is imported; put its script code under: "
            "if __name__ == '__main__':"
        ) from None
    return _member(module, name, text, role) if name else _only_subclass(module, text, role, base)


def _from_file(path: Path, role: str) -> ModuleType:
    """Import a file as the module of its name, and make the modules beside it importable."""
    if not path.is_file():
        files_beside = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(
            f"{role} names the file {str(path)!r}, which does not exist (from {os.getcwd()}){nearest(path.name, files_beside)}"
        )
    path = path.resolve()
    name, folder = path.stem, str(path.parent)
    if not name.isidentifier():
        raise UsageError(f"{role} names the file {path.name!r}: {name!r} is not a valid module name; rename it")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(name)
    module_file = getattr(module, "__file__", None)
    if module_file is None or Path(module_file).resolve() != path:
        raise UsageError(
            f"{role} names the file {str(path)!r}, but the module {name!r} is {module_file or 'built into Python'} already; rename the file"
        )
    return module


def _import(name: str, text: str, role: str) -> ModuleType:
    """Import a module; an error says where it was looked for, unless it comes from an import inside the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not _is_same_or_parent(error.name, name):
            raise
        hint = f"; write a file with its suffix: {name.replace('.', '/')}.py" if error.name == name else ""
        raise UsageError(
            f"{role} {text!r}: there is no module {error.name!r} (looked in {os.getcwd()} and where packages are){hint}"
        ) from None


def _import_longest(path: str, text: str, role: str) -> tuple[ModuleType, str]:
    """Split ``package.module.Class`` into the longest module that can be imported, which is returned, and the name in it."""
    for count in range(path.count(".") + 1, 0, -1):
        parts = path.split(".")
        name = ".".join(parts[:count])
        try:
            return importlib.import_module(name), ".".join(parts[count:])
        except ModuleNotFoundError as error:
            if not _is_same_or_parent(error.name, name):
                raise
    if "=" in path:
        raise UsageError(f"{role} {text!r}: give a setting with --set, as in --set {text}")
    raise UsageError(
        f"{role} {text!r}: there is no module {path.split('.')[0]!r}; write my.module:Name, file.py:Name or file.py"
    )


def _is_same_or_parent(missing: str | None, name: str) -> bool:
    """Check whether the ``missing`` module is ``name`` itself or one of its packages."""
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def _member(module: ModuleType, name: str, text: str, role: str) -> Any:
    """The object with the dotted ``name`` in a module."""
    owner: Any = module
    for part in name.split("."):
        if not hasattr(owner, part):
            place = getattr(module, "__file__", None) or module.__name__
            raise UsageError(f"{role} {text!r}: {place} has no {name!r}{nearest(name, _public(owner))}")
        owner = getattr(owner, part)
    return owner


def _public(owner: Any) -> Iterator[str]:
    names = getattr(owner, "__all__", None) or vars(owner)
    return (name for name in names if not name.startswith("_"))


def _only_subclass(module: ModuleType, text: str, role: str, base: type) -> Any:
    """The one subclass of ``base`` that a module defines."""
    classes = [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module.__name__
    ]
    names = sorted({cls.__qualname__ for cls in classes})
    if len(names) != 1:
        contents = (
            f"several classes that are a {base.__name__} ({', '.join(names)})"
            if names
            else f"no class that is a {base.__name__}"
        )
        raise UsageError(f"{role} {text!r} defines {contents}; name one: {text}:{names[0] if names else 'Name'}")
    return classes[0]
