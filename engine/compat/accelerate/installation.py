"""Lets other packages, such as transformers, import ``engine.interop.accelerate`` when they import ``accelerate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Literal

from engine.compat.accelerate.accelerator import Accelerator
from engine.compat.accelerate.door import PACKAGE
from engine.compat.door import SameModule

NAME = "accelerate"
_USERS = (
    "transformers.trainer",
    "transformers.training_args",
    "transformers.modeling_utils",
    "trl",
    "sentence_transformers",
    "peft",
)
"""Modules of other packages that keep what they have imported from Accelerate."""


class Installed(MetaPathFinder, SameModule):
    """Finds ``accelerate.x`` as our module of that name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ours = name.startswith(f"{NAME}.")
        return ModuleSpec(name, self, origin=PACKAGE + name.removeprefix(NAME)) if is_ours else None


def install(rules: Literal["exact", "accelerate"] = "accelerate") -> None:
    """Let ``import accelerate`` in this process give ``engine.interop.accelerate``, so that ``transformers.Trainer`` and trainers that build on it
    run on this library's engine. Call it in the first lines of a script, before it imports them.

    Args:
        rules: the rules of each :class:`Accelerator` that is made without any. ``transformers.Trainer`` divides its losses itself, by Accelerate's.

    Raises:
        RuntimeError: Accelerate, or a package that uses it, is imported already.
    """
    if isinstance(sys.modules.get(NAME), ModuleType) and sys.modules[NAME].__name__ == PACKAGE:
        Accelerator.usual_rules = rules
        return
    if imported := [name for name in (NAME, *_USERS) if name in sys.modules]:
        raise RuntimeError(
            f"install() comes too late: {', '.join(imported)} is imported, and keeps Accelerate's own names; call it in the first lines of the script"
        )
    Accelerator.usual_rules = rules
    sys.meta_path.insert(0, Installed())  # first, because the package of the name may be installed
    sys.modules[NAME] = sys.modules[PACKAGE]
