"""Weights of the model besides those that are trained, such as moving averages: a checkpoint's folder ``weights``, by name.

::

    weights/rank=00000.safetensors      what this rank wrote; a tensor is called <name of the weights>/<name in the model>
    weights/weights.json                {<name of the weights>: {"aliases": names in the model that share a tensor}}

They need not cover the whole model: the rest is that of the trained weights. The manifest names the weights with which the score was measured
(``scored_with``); checkpoints of versions before that do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import SCORED_WITH, TRAINED, WEIGHTS
from engine.checkpoint.tensors import Stored
from engine.utils.errors import nearest
from engine.utils.log import logger
from engine.utils.text import terminal_text

STEM = f"{WEIGHTS}/{WEIGHTS}"


def weights_folder(wanted: str | None) -> tuple[str, ...]:
    """The folder whose checksums must be checked before the weights ``wanted`` are read, besides the model's."""
    return () if wanted == TRAINED else (WEIGHTS,)


class OtherWeights:
    """Those of an open checkpoint.

    Raises:
        DamagedCheckpoint: the files do not have the form that this library writes.
    """

    def __init__(self, opened: Opened) -> None:
        self.where, self._files = opened.directory, opened.tensors(WEIGHTS)
        tree = opened.tree(STEM, {}) or {}
        if not isinstance(tree, dict) or not all(
            isinstance(entry, dict) and isinstance(entry.get("aliases"), dict) for entry in tree.values()
        ):
            raise DamagedCheckpoint(f"{self.where}: {STEM}.json has no aliases")
        self._of: dict[str, dict[str, Stored]] = {str(name): {} for name in tree}
        for key, stored in self._files.stored.items():
            name, _, own = key.partition("/")
            if name not in self._of:
                raise DamagedCheckpoint(f"{self.where}: {STEM}.json does not name {key!r}")
            self._of[name][own] = stored
        self._scored = opened.manifest.get(SCORED_WITH, None if self._of else TRAINED)
        if self._scored not in (None, TRAINED, *self._of):
            raise DamagedCheckpoint(
                f"{self.where}: {SCORED_WITH} names the weights {self._scored!r:.80}, which are not there"
            )
        for name, entry in tree.items():
            for other, first in entry["aliases"].items():
                if first not in self._of[str(name)]:
                    raise DamagedCheckpoint(f"{self.where}: {STEM}.json names {first!r}, which is not there")
                self._of[str(name)][str(other)] = self._of[str(name)][first]

    @property
    def names(self) -> list[str]:
        """The names of the weights that are there."""
        return list(self._of)

    def chosen(self, wanted: str | None) -> str:
        """The name of the weights to load; ``None``: those with which the score was measured.

        Raises:
            ValueError: there are none of this name.
        """
        if wanted not in (None, TRAINED):
            self.of(wanted)
        elif wanted is None and self._scored is None:
            logger.warning(
                "%s also has the weights %s, and a version wrote it that did not note with which weights the score was measured: the trained ones "
                "are loaded; weights=%r loads the others",
                self.where, terminal_text(", ".join(map(repr, self._of))), next(iter(self._of)),
            )  # fmt: skip
        return wanted or self._scored or TRAINED

    def of(self, name: str) -> dict[str, Stored]:
        """The tensors of the weights ``name``, by their names in the model.

        Raises:
            ValueError: there are none of this name; the message lists the names.
        """
        if name not in self._of:
            there = (
                ", ".join(map(repr, [TRAINED, *self._of]))
                if self._of
                else "the trained ones only (a callback such as EMA adds others)"
            )
            raise ValueError(
                terminal_text(f"{self.where} has no weights {name!r}; it has {there}{nearest(name, self._of)}")
            )
        return self._of[name]

    def read_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the model, whole ones or this rank's shards, from the weights ``name``.

        Raises:
            ValueError: a tensor is not there, or has another shape.
        """
        there, rest = self.of(name), dict(targets)
        if missing := [key for key in rest if key not in there]:
            raise ValueError(f"{self.where}: the weights {name!r} lack {terminal_text(', '.join(missing[:5]))}")
        while rest:  # once, unless two tensors here are one in the checkpoint
            now: dict[str, Tensor] = {}
            for key in list(rest):
                if now.setdefault(there[key].name, rest[key]) is rest[key]:
                    del rest[key]
            self._files.read_into(now)
