"""States of callbacks in a checkpoint, and the callbacks they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.callback import Callback
from engine.checkpoint.resume import Loaded
from engine.utils.log import logger
from engine.utils.overrides import overridden
from engine.utils.text import terminal_text


def check_keys(callbacks: Sequence[Callback]) -> None:
    """Check that the states of ``callbacks`` have distinct keys.

    Raises:
        TypeError: a ``state_key`` is not text.
        ValueError: two callbacks with a state have the same key.
    """
    owners: dict[str, Callback] = {}
    for callback in callbacks:
        key: object = callback.state_key
        if not isinstance(key, str):
            raise TypeError(
                f"{type(callback).__name__}.state_key is {key!r} of type {type(key).__name__}: return a str"
            )
        if not overridden(callback, "state_dict", Callback):
            continue
        if key in owners:
            raise ValueError(
                f"callbacks of {type(owners[key]).__name__} and {type(callback).__name__} both have the state_key {key!r}: a checkpoint "
                'cannot distinguish them: override state_key with what differs, for example return f"{type(self).__qualname__}[{self.name}]"'
            )
        owners[key] = callback


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The callbacks' states, by key; without those that fail and are not critical."""
    result = {}
    for callback in callbacks:
        try:
            result[callback.state_key] = callback.state_dict()
        except Exception:
            if callback.critical:
                raise
            logger.exception("%s.state_dict failed; the checkpoint does not have its state", type(callback).__name__)
    return result


def load_states(callbacks: Sequence[Callback], loaded: Loaded, saved: Mapping[str, Any]) -> None:
    """Restore the callbacks from what :func:`states` returned; a state without a callback is a warning.

    Args:
        loaded: the checkpoint that has ``saved``.
    """
    remaining, waiting = dict(saved), list(callbacks)
    for name_of in (_key, _stem, _earlier_key(callbacks)):
        for callback in list(waiting):
            name = name_of(callback)
            keys = [key for key in remaining if (_stem_of(key) if name_of is _stem else key) == name]
            alone = sum(name_of(candidate) == name for candidate in waiting) == 1
            if len(keys) == 1 and alone:
                loaded.load_into(f"the callback {_key(callback)}", callback.load_state_dict, remaining.pop(keys[0]))
                waiting.remove(callback)
    if lost := sorted(key for key, state in remaining.items() if state):
        keys_here = [_key(callback) for callback in callbacks if not type(callback).__name__.startswith("_")]
        logger.warning(
            "%s has the state of %s, which is not restored: no callback here has this state_key. The state_keys here: %s",
            loaded.path, terminal_text(", ".join(lost), one_line=True), ", ".join(sorted(keys_here)) or "none",
        )  # fmt: skip


def _key(callback: Callback) -> str:
    return callback.state_key


def _stem(callback: Callback) -> str:
    return _stem_of(callback.state_key)


def _stem_of(key: str) -> str:
    return key.partition("; ")[0]


def _earlier_key(callbacks: Sequence[Callback]) -> Callable[[Callback], str]:
    """The keys in checkpoints of versions without ``state_key``: the class, numbered among those of the same class."""

    def key(callback: Callback) -> str:
        alike = [candidate for candidate in callbacks if type(candidate) is type(callback)]
        name = type(callback).__qualname__
        return (
            name
            if len(alike) == 1
            else f"{name}.{next(i for i, candidate in enumerate(alike) if candidate is callback)}"
        )

    return key
