"""The form of a checkpoint's values besides tensors, checked when it is opened: a value of another form is damage.

Code that reads a value can rely on its type and, for counts and sizes, on its range.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.tensors import Stored

COUNT = range(1 << 62)
NUMBER = (range(-(1 << 62), 1 << 62), float)  # an int that a float can hold: they are added to one
_INTERVAL = {"last_step": range(-1, 1 << 62), "last_s": NUMBER, "count": (COUNT, None), "every": str}
_COUNTERS = dict.fromkeys(("epoch", "step", "batch_idx", "batches", "position", "whole_batches", "samples"), COUNT)
SHARED_FORM = {
    "state": {**_COUNTERS, "epoch_done": bool, "validated_step": range(-1, 1 << 62)},
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


def unlike(saved: Any, own: Any) -> bool:
    """Whether a saved hyperparameter cannot replace ``own``: not a number for a number, or another count for several."""
    if isinstance(own, (tuple, list)):
        return not isinstance(saved, (tuple, list)) or len(saved) != len(own) or any(map(unlike, saved, own))
    if type(own) in (int, float):
        return not hasattr(saved, "dtype") and (
            type(saved) not in (int, float) or (type(saved) is int and abs(saved) >= 1 << 63)
        )
    if isinstance(own, bool):
        return saved is not None and type(saved) is not bool
    return isinstance(saved, Stored) and saved.shape.numel() != 1


def _wrong(value: Any, form: Any, path: str) -> str | None:
    """The path of the first value that is not of the form."""
    if isinstance(form, tuple):
        return None if any(_wrong(value, each, path) is None for each in form) else path
    if isinstance(form, range):
        return None if type(value) is int and value in form else path
    if isinstance(form, list):
        if not isinstance(value, list):
            return path
        return next(
            (bad for index, each in enumerate(value) if (bad := _wrong(each, form[0], f"{path}.{index}")) is not None),
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
