"""The dict of ``on_save_checkpoint`` and ``on_load_checkpoint``: a user's own entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WEIGHTS = (
    "weights are stored apart from these entries, in parts: override state_dict() to leave some out, and set strict_loading = False for those that "
    "differ; engine.Resume and load_from_checkpoint have strict=False"
)
_OWN = "the run stores and restores it"
ELSEWHERE = {
    "state_dict": _WEIGHTS,
    "optimizer_states": f"{_OWN}; self.optimizers() has the optimizers",
    "lr_schedulers": f"{_OWN}; self.lr_schedulers() has the schedulers",
    "callbacks": f"{_OWN}; a callback's state is its state_dict()",
    "loops": _OWN,
    "pytorch-lightning_version": "this is not a checkpoint of Lightning",
}
"""Entries that Lightning's checkpoints have and these do not: why, and what to do."""


class Entries(dict[str, Any]):
    """A user's entries, and to read also the checkpoint's ``epoch``, ``global_step`` and ``hyper_parameters``.

    Raises:
        KeyError: an entry of Lightning's checkpoints is read or set that is stored elsewhere; the message says what to do.
    """

    def __init__(self, own: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        super().__init__(own)
        self._known = known

    def __missing__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        raise KeyError(f"checkpoint[{name!r}]: {ELSEWHERE[name]}" if name in ELSEWHERE else name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's, with the checkpoint's own numbers."""
        return self[name] if name in self or name in self._known else default

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._known or name in ELSEWHERE:
            raise KeyError(f"checkpoint[{name!r}] cannot be set: {ELSEWHERE.get(name, _OWN)}")
        super().__setitem__(name, value)
