"""``python tests/tools/api_reference.py DIRECTORY`` builds the API reference from docstrings; ``pip install -e ".[docs]"`` installs what it needs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import engine
from engine.compat.names import ATTRIBUTES

MODULES = ("engine", "engine.launch", "callbacks", "engine.losses", "engine.optim")


def build(directory: Path) -> None:
    """Write a page for each of :data:`MODULES`, and an index."""
    import pdoc

    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:  # names that are imported when they are first used
            vars(module)[name] = getattr(module, name)
    for owner, names in ATTRIBUTES.items():  # these only raise errors
        for name in names:
            delattr(getattr(engine, owner), name)
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(
        "engine", "callbacks", r"!engine\.(?!(launch|losses|optim)$)", r"!callbacks\.", output_directory=directory
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
