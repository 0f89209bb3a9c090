"""A checkpoint's state besides parameters and optimizers: one form for ``Fit`` and ``Engine``, its checks, and reading of earlier forms.

``state/shared`` of both, the same on all ranks::

    seed, schedulers, scaler, window, registered
    loaders                             {"epoch", "position"[, "order"]} of each; a run has only its training loader

``state/rank=...`` of both::

    place                               number of ranks with different data, this rank's index, and whether it saves for its data
    rng
    streams                             state of each loader besides its position

A run adds callbacks, metrics and its counters (``state``, ``callbacks``, ...; see :mod:`engine.loop.run_snapshot`) and the user's own entries
(``user``, as :class:`Entries`).

Values are checked when a checkpoint is opened: one of another form is damage. Code that reads a value can rely on its type and, for counts and
sizes, on its range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.tensors import Stored
from engine.utils.extensions import answer

COUNT = range(1 << 62)
NUMBER = (range(-(1 << 62), 1 << 62), float)  # an int that a float can hold: they are added to one
_INTERVAL = {"last_step": range(-1, 1 << 62), "last_s": NUMBER, "count": (COUNT, None), "every": str}
_COUNTERS = dict.fromkeys(("epoch", "step", "batch_idx", "batches", "position", "whole_batches", "samples"), COUNT)
SHARED_FORM = {
    "state": {**_COUNTERS, "epoch_done": bool, "validated_step": range(-1, 1 << 62)},
    "global_batch": (COUNT, None),
    "seed": (range(1 << 64), None),
    "order": (str, None),
    "schedulers": [dict],
    "scaler": (dict, None),
    "window": ({"scalars": bool, "reference": (*NUMBER, None)}, None),
    "metrics": dict,
    "elapsed_s": NUMBER,
    "items": (*NUMBER, None),
    "val_every": _INTERVAL,
    "hparams": dict,
    "hparams_name": (str, None),
    "datamodule_hparams": dict,
    "datamodule_hparams_name": (str, None),
    "registered": list,
    "postponed": [str],
    "user": dict,
    "callbacks": dict,
    "loaders": [{"epoch": COUNT, "position": COUNT, "order": (str, None), "samples": (COUNT, None)}],
    "kinds": {"optimizers": [str], "schedulers": [str]},
}
_SUM = (*NUMBER, Tensor, None)
_LOGGED = {...: {"options": list, "total": _SUM, "weight": _SUM}}
OWN_FORM = {"place": [COUNT], "rng": dict, "recorder": _LOGGED, "metrics": dict, "logged": dict, "streams": list}
OPTIM_FORM = {"state": dict, "param_groups": [{"params": list}]}
ENTRY_PLACE = "checkpoint entry"
"""The place by which extensions are asked about entries of a checkpoint."""
_STORED = "the run stores and restores it"


class Fields(dict[str, Any]):
    """A checkpoint's values by name; a missing one is damage."""

    def __init__(self, where: object, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise DamagedCheckpoint(f"{self.where} has no {name!r}")


def checked(where: object, values: Any, form: Any) -> Fields:
    """Check ``values`` against ``form`` and return them.

    Args:
        where: the file, for messages.
        form: a type; a ``range`` of ints; ``None``; ``[form]``, a list of such; ``{name: form}``, a dict in which these
            names, if present, have such values; ``{...: form}``, a dict of such; a tuple of alternative forms.

    Raises:
        DamagedCheckpoint: a value is not of the form; the message says where.
    """
    if (bad := _wrong(values, form, "")) is not None:
        raise DamagedCheckpoint(f"{where} has no usable {bad.removeprefix('.') or 'values'!r}")
    return Fields(where, values)


def checked_optimizer(where: object, state: Any) -> None:
    """Check the state of one optimizer, by names or numbers of parameters, before its tensors are read.

    Raises:
        DamagedCheckpoint: it has another form.
    """
    bad = _wrong(state, OPTIM_FORM, "")
    if bad is None and all(len(state.get(key, ())) for key in ("param_groups",)):
        names = [name for group in state["param_groups"] for name in group.get("params", [None])]
        odd = [name for name in names if type(name) not in (str, int)]
        entries = all(isinstance(entry, dict) for entry in state.get("state", {"": None}).values())
        bad = None if entries and not odd and len(set(names)) == len(names) else "state"
    if bad is not None:
        raise DamagedCheckpoint(f"{where} has no usable {bad.removeprefix('.') or 'state'!r}")


def cannot_replace(saved: Any, current: Any) -> bool:
    """Whether a saved hyperparameter cannot replace the ``current`` one: not a number for a number, or another count for several."""
    if isinstance(current, (tuple, list)):
        return (
            not isinstance(saved, (tuple, list))
            or len(saved) != len(current)
            or any(map(cannot_replace, saved, current))
        )
    if type(current) in (int, float):
        return not hasattr(saved, "dtype") and (
            type(saved) not in (int, float) or (type(saved) is int and abs(saved) >= 1 << 63)
        )
    if isinstance(current, bool):
        return saved is not None and type(saved) is not bool
    return isinstance(saved, Stored) and saved.shape.numel() != 1


def _wrong(value: Any, form: Any, path: str) -> str | None:
    """The path of the first value that is not of the form."""
    if isinstance(form, tuple):
        return None if any(_wrong(value, alternative, path) is None for alternative in form) else path
    if isinstance(form, range):
        return None if type(value) is int and value in form else path
    if isinstance(form, list):
        if not isinstance(value, list):
            return path
        return next(
            (bad for index, item in enumerate(value) if (bad := _wrong(item, form[0], f"{path}.{index}")) is not None),
            None,
        )
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return path
        if ... in form:
            form = dict.fromkeys(value, form[...])
        wrong = (_wrong(value[name], inner, f"{path}.{name}") for name, inner in form.items() if name in value)
        return next((bad for bad in wrong if bad is not None), None)
    return None if (value is None if form is None else type(value) is form) else path


# -- earlier forms ------------------------------------------------------------------------------------------------------------------


def shared_form(tree: Any) -> Any:
    """A ``state/shared`` tree of any version in the current form."""
    if not isinstance(tree, dict) or "loaders" in tree or not isinstance(tree.get("state"), dict):
        return tree
    # A run of an earlier version, or a checkpoint that was converted.
    state, order = tree["state"], tree.get("order")
    over = bool(state.get("epoch_done"))
    loader = {"epoch": state.get("epoch", 0) + over, "position": 0 if over else state.get("position", 0)}
    return {"window": None, **tree, "loaders": [loader if order is None else {**loader, "order": order}]}


def own_form(tree: Any) -> Any:
    """A rank's tree of any version in the current form."""
    if not isinstance(tree, dict):
        return tree
    state = {"streams": [tree["stream"]], **tree} if "stream" in tree else tree
    place = state.get("place")
    return {**state, "place": [*place, 1]} if isinstance(place, list) and len(place) == 2 else state


# -- the user's entries -------------------------------------------------------------------------------------------------------------


class Entries(dict[str, Any]):
    """A user's entries, and to read also the checkpoint's ``epoch``, ``global_step`` and ``hyper_parameters``.

    Raises:
        KeyError: an entry is set that the run stores, or an extension knows what to do instead of reading or setting it: the message says so.
    """

    def __init__(self, entries: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        if name in self._facts:
            return self._facts[name]
        sentence = answer(ENTRY_PLACE, name)
        raise KeyError(f"checkpoint[{name!r}]: {sentence}" if sentence else name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or the checkpoint's ``epoch``, ``global_step`` or ``hyper_parameters``."""
        return self[name] if name in self or name in self._facts else default

    def __setitem__(self, name: str, value: Any) -> None:
        sentence = answer(ENTRY_PLACE, name) or (_STORED if name in self._facts else "")
        if sentence:
            raise KeyError(f"checkpoint[{name!r}] cannot be set: {sentence}")
        super().__setitem__(name, value)
