"""Reads the content of a Lightning checkpoint, a dict that ``torch.load`` has read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.compat.foreign_checkpoints.foreign_content import ForeignContent, is_storable, named_tensors, with_names

AVERAGE = "average"
"""The name of averaged weights in the new checkpoint: that of :class:`callbacks.WeightAveraging`."""
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin")
_LIGHTNING = frozenset(
    (
        *(
            "state_dict",
            "epoch",
            "global_step",
            "pytorch-lightning_version",
            "loops",
            "callbacks",
            "optimizer_states",
            "lr_schedulers",
        ),
        *(
            "hparams_name",
            "hyper_parameters",
            "hparams_type",
            "datamodule_hparams_name",
            "datamodule_hyper_parameters",
            *_SCALERS,
        ),
    )
)


def lightning_content(loaded: Mapping[str, Any], source_name: str) -> ForeignContent:
    """The content of a Lightning checkpoint. If its ``WeightAveraging`` was used, its ``state_dict`` holds the averages, which were validated."""
    trained_weights = loaded.get("current_model_state")
    if not isinstance(trained_weights, Mapping):
        return add_lightning_entries(loaded, named_tensors("Lightning checkpoint", loaded["state_dict"], source_name))
    average, other_entries = named_tensors("Lightning checkpoint", loaded["state_dict"], source_name), dict(loaded)
    for name in ("current_model_state", "averaging_state"):
        other_entries.pop(name, None)
    content = add_lightning_entries(other_entries, named_tensors("Lightning checkpoint", trained_weights, source_name))
    names = {*average.names, *average.aliases}
    content.average = {str(name): value for name, value in loaded["state_dict"].items() if str(name) in names}
    content.notes.append(
        f"the average of WeightAveraging is there as the weights {AVERAGE!r}; in a training it starts again"
    )
    return content


def add_lightning_entries(loaded: Mapping[str, Any], content: ForeignContent) -> ForeignContent:
    """Add the entries of a Lightning checkpoint other than its weights to ``content``, and return it."""
    content.step = int(loaded.get("global_step", 0))
    current = loaded.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    content.epoch = int(current.get("processed", loaded.get("epoch", 0)))
    for name, value in dict(loaded.get("hyper_parameters") or {}).items():
        if is_storable(value, f"the hyperparameter {name!r}", content.notes):
            content.hparams[str(name)] = value
    hparams_name = loaded.get("hparams_name")
    content.hparams_name = hparams_name if isinstance(hparams_name, str) and hparams_name != "kwargs" else None
    content.optim = [
        with_names(state, content, f"optimizer {i}") for i, state in enumerate(loaded.get("optimizer_states") or [])
    ]
    content.schedulers = [
        s for i, s in enumerate(loaded.get("lr_schedulers") or []) if is_storable(s, f"scheduler {i}", content.notes)
    ]
    scaler = next((loaded[name] for name in _SCALERS if name in loaded), None)
    content.scaler = scaler if is_storable(scaler, "the loss scaler", content.notes) else None
    content.user = {
        name: v
        for name, v in loaded.items()
        if name not in _LIGHTNING and is_storable(v, f"the entry {name!r}", content.notes)
    }
    if loaded.get("callbacks"):
        content.notes.append(f"left out: the states of {len(loaded['callbacks'])} callback(s)")
    return content
