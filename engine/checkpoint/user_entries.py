"""The dict of ``on_save_checkpoint`` and ``on_load_checkpoint``: a user's own entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.utils.extensions import answer

PLACE = "checkpoint entry"
"""What extensions are asked about."""
_OWN = "the run stores and restores it"


class Entries(dict[str, Any]):
    """A user's entries, and to read also the checkpoint's ``epoch``, ``global_step`` and ``hyper_parameters``.

    Raises:
        KeyError: an entry is set that the run stores, or an extension knows what to do instead of reading or setting it: the message says so.
    """

    def __init__(self, own: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        super().__init__(own)
        self._known = known

    def __missing__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        sentence = answer(PLACE, name)
        raise KeyError(f"checkpoint[{name!r}]: {sentence}" if sentence else name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's, with the checkpoint's own numbers."""
        return self[name] if name in self or name in self._known else default

    def __setitem__(self, name: str, value: Any) -> None:
        sentence = answer(PLACE, name) or (_OWN if name in self._known else "")
        if sentence:
            raise KeyError(f"checkpoint[{name!r}] cannot be set: {sentence}")
        super().__setitem__(name, value)
