"""The form of a checkpoint's state besides parameters and optimizers, common to ``Fit`` and ``Engine``, its checks, and earlier forms.

``state/shared``, the same on all ranks::

    seed, schedulers, scaler, window, registered
    optimizer_random                    the seed and the numbers of steps of optimizers that draw random numbers in their steps
    loaders                             {"epoch", "position"[, "order", "draws"]} of each loader; a run saves only its training loader

``state/rank=...``, each rank's own::

    place                               number of ranks with different data, this rank's index among them, and whether its losses count
    rng
    streams                             each loader's state besides its position

A run adds callbacks, metrics and its counters (``state``, ``callbacks``, ...; see :mod:`engine.loop.run_snapshot`) and the user's own entries
(``user``, as :class:`Entries`).

Values are checked when a checkpoint is opened, and an invalid one makes it a damaged checkpoint. Code that reads a value can rely on its type and,
for counts and sizes, on its range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.tensor_files import Stored
from engine.utils.extensions import advice

COUNT = range(1 << 62)
NUMBER = (range(-(1 << 62), 1 << 62), float)  # an int is added to a float, and must not overflow it
_INTERVAL = {"last_step": range(-1, 1 << 62), "last_s": NUMBER, "count": (COUNT, None), "every": str}
_COUNTERS = dict.fromkeys(("epoch", "step", "batch_idx", "batches", "position", "whole_batches", "samples"), COUNT)
SHARED_FORM = {
    "state": {
        **_COUNTERS,
        "epoch_done": bool,
        "validated_step": range(-1, 1 << 62),
        "clock_tokens": (COUNT, float),
        "clock_step": COUNT,
    },
    "global_batch": (COUNT, None),
    "seed": (range(1 << 64), None),
    "order": (str, None),
    "schedulers": [dict],
    "scaler": (dict, None),
    "optimizer_random": ({"seed": range(1 << 64), "steps": [COUNT]}, None),
    "window": ({"scalars": bool, "reference": (*NUMBER, None)}, None),
    "metrics": dict,
    "elapsed_s": NUMBER,
    "items": (*NUMBER, None),
    "val_every": _INTERVAL,
    "hparams": dict,
    "hparams_name": (str, None),
    "datamodule_kind": (str, None),
    "datamodule_hparams": dict,
    "datamodule_hparams_name": (str, None),
    "registered": list,
    "postponed": [str],
    "epoch_is_cut": bool,
    "user": dict,
    "callbacks": dict,
    "loaders": [
        {
            "epoch": COUNT,
            "position": COUNT,
            "order": (str, None),
            "samples": (COUNT, None),
            "draws": (dict, None),
            "plan": (COUNT, None),
        }
    ],
    "kinds": {"optimizers": [str], "schedulers": [str]},
}
_SUM = (*NUMBER, Tensor, None)
_LOGGED = {...: {"options": list, "total": _SUM, "weight": _SUM}}
OWN_FORM = {
    "place": [COUNT, ...],
    "rng": dict,
    "recorder": _LOGGED,
    "hook_values": _LOGGED,
    "metrics": dict,
    "logged": dict,
    "waiting_stops": [str],
    "asked_stop": str,
    "streams": list,
}
OPTIM_FORM = {"state": dict, "param_groups": [{"params": list}], "beside_parameters": dict}
ENTRY_PLACE = "checkpoint entry"
"""The kind of place under which extensions know names of a checkpoint's entries."""
_STORED = "the run stores and restores it"


class Fields(dict[str, Any]):
    """A checkpoint's values by name; looking up a missing one raises :class:`DamagedCheckpoint`."""

    def __init__(self, where: object, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise DamagedCheckpoint(f"{self.where} has no {name!r}")


def checked_form(where: object, values: Any, form: Any) -> Fields:
    """Check ``values`` against ``form`` and return them.

    Args:
        where: the file, for messages.
        form: a type; a ``range`` of ints; ``None``; ``[form]``, a list of such values; ``[form, ...]``, one that is not empty; ``{name: form}``, a
            dict whose entries of these names, where present, have these forms; ``{...: form}``, a dict whose values all have this form; a tuple of
            alternative forms.

    Raises:
        DamagedCheckpoint: a value does not have its form; the message says where.
    """
    if (bad_path := _path_of_wrong_value(values, form, "")) is not None:
        raise DamagedCheckpoint(f"{where} has no usable {bad_path.removeprefix('.') or 'values'!r}")
    return Fields(where, values)


def checked_optimizer(where: object, state: Any) -> None:
    """Check the state of one optimizer, by names or numbers of parameters, before its tensors are read.

    Raises:
        DamagedCheckpoint: it is not a valid optimizer state.
    """
    bad_path = _path_of_wrong_value(state, OPTIM_FORM, "")
    if bad_path is None and state.get("param_groups"):
        names = [name for group in state["param_groups"] for name in group.get("params", [None])]
        are_unique = all(type(name) in (str, int) for name in names) and len(set(names)) == len(names)
        are_dicts = "state" in state and all(isinstance(entry, dict) for entry in state["state"].values())
        bad_path = None if are_unique and are_dicts else "state"
    if bad_path is not None:
        raise DamagedCheckpoint(f"{where} has no usable {bad_path.removeprefix('.') or 'state'!r}")


def cannot_replace(saved: Any, current: Any) -> bool:
    """Whether a saved hyperparameter cannot replace the ``current`` one: it is not a number where a number is, or has another length."""
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


def _path_of_wrong_value(value: Any, form: Any, path: str) -> str | None:
    """The path of the first value that does not have its form, such as ``".state.epoch"``; ``None`` if all do."""
    if isinstance(form, tuple):
        return None if any(_path_of_wrong_value(value, alternative, path) is None for alternative in form) else path
    if isinstance(form, range):
        return None if type(value) is int and value in form else path
    if isinstance(form, list):
        if not isinstance(value, list) or (... in form and not value):
            return path
        return next(
            (
                bad_path
                for index, item in enumerate(value)
                if (bad_path := _path_of_wrong_value(item, form[0], f"{path}.{index}")) is not None
            ),
            None,
        )
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return path
        if ... in form:
            form = dict.fromkeys(value, form[...])
        bad_paths = (
            _path_of_wrong_value(value[name], inner_form, f"{path}.{name}")
            for name, inner_form in form.items()
            if name in value
        )
        return next((bad_path for bad_path in bad_paths if bad_path is not None), None)
    return None if (value is None if form is None else type(value) is form) else path


# -- earlier forms ------------------------------------------------------------------------------------------------------------------


def shared_form(tree: Any) -> Any:
    """Convert a ``state/shared`` tree of any version to the current form."""
    if not isinstance(tree, dict) or "loaders" in tree or not isinstance(tree.get("state"), dict):
        return tree
    # Saved by a run of an earlier version, or converted from another trainer's checkpoint.
    state, order = tree["state"], tree.get("order")
    is_over = bool(state.get("epoch_done"))
    loader = {"epoch": state.get("epoch", 0) + is_over, "position": 0 if is_over else state.get("position", 0)}
    return {"window": None, **tree, "loaders": [loader if order is None else {**loader, "order": order}]}


def own_form(tree: Any) -> Any:
    """Convert a rank's own tree of any version to the current form."""
    if not isinstance(tree, dict):
        return tree
    state = {"streams": [tree["stream"]], **tree} if "stream" in tree else tree
    place = state.get("place")
    return {**state, "place": [*place, 1]} if isinstance(place, list) and len(place) == 2 else state


# -- the user's entries -------------------------------------------------------------------------------------------------------------


class Entries(dict[str, Any]):
    """A user's entries in a checkpoint. The checkpoint's ``epoch``, ``global_step`` and ``hyper_parameters`` can be read too, but not set.

    Raises:
        KeyError: an entry is read that does not exist, or is set although the run stores it, or an extension has an alternative for this name,
            which the message explains.
    """

    def __init__(self, entries: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        if name in self._facts:
            return self._facts[name]
        sentence = advice(ENTRY_PLACE, name)
        raise KeyError(f"checkpoint[{name!r}]: {sentence}" if sentence else name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry, or the checkpoint's ``epoch``, ``global_step`` or ``hyper_parameters``."""
        return self[name] if name in self or name in self._facts else default

    def __setitem__(self, name: str, value: Any) -> None:
        sentence = advice(ENTRY_PLACE, name) or (_STORED if name in self._facts else "")
        if sentence:
            raise KeyError(f"checkpoint[{name!r}] cannot be set: {sentence}")
        super().__setitem__(name, value)
