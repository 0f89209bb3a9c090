"""The states of callbacks in a checkpoint: collecting them, and finding the callback that each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.callback import Callback
from engine.checkpoint.resume import Loaded
from engine.utils.log import logger
from engine.utils.overrides import overridden
from engine.utils.text import terminal_text


def check_keys(callbacks: Sequence[Callback]) -> None:
    """Check that no two callbacks with state have the same ``state_key``.

    Raises:
        TypeError: a ``state_key`` is not a str.
        ValueError: two callbacks with state have the same key.
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
    """Collect the callbacks' states by key. An error in ``state_dict`` of a callback that is not critical is logged, and its state left out."""
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
    """Restore the callbacks' states, and warn of states that no callback matches.

    Args:
        loaded: the checkpoint that the states come from.
        saved: the result of :func:`states`.
    """
    remaining, without_state = dict(saved), list(callbacks)
    for name_of in (_key, _stem, _earlier_key(callbacks)):
        for callback in list(without_state):
            name = name_of(callback)
            keys = [key for key in remaining if (_stem_of(key) if name_of is _stem else key) == name]
            is_only_candidate = sum(name_of(candidate) == name for candidate in without_state) == 1
            if len(keys) == 1 and is_only_candidate:
                loaded.load_into(f"the callback {_key(callback)}", callback.load_state_dict, remaining.pop(keys[0]))
                without_state.remove(callback)
    if unmatched := sorted(key for key, state in remaining.items() if state):
        keys_here = [_key(callback) for callback in callbacks if not type(callback).__name__.startswith("_")]
        logger.warning(
            "%s has the state of %s, which is not restored: no callback here has this state_key. The state_keys here: %s",
            loaded.path, terminal_text(", ".join(unmatched), one_line=True), ", ".join(sorted(keys_here)) or "none",
        )  # fmt: skip


def _key(callback: Callback) -> str:
    return callback.state_key


def _stem(callback: Callback) -> str:
    return _stem_of(callback.state_key)


def _stem_of(key: str) -> str:
    """The part of a key that may not change between runs; see :attr:`engine.Callback.state_key`."""
    return key.partition("; ")[0]


def _earlier_key(callbacks: Sequence[Callback]) -> Callable[[Callback], str]:
    """Return a function that gives a callback's key in checkpoints of versions without ``state_key``: its class, and its number within the class."""

    def key(callback: Callback) -> str:
        same_class = [candidate for candidate in callbacks if type(candidate) is type(callback)]
        name = type(callback).__qualname__
        return (
            name
            if len(same_class) == 1
            else f"{name}.{next(i for i, candidate in enumerate(same_class) if candidate is callback)}"
        )

    return key
