"""Create modules and data modules from a checkpoint, with its hyperparameters and its weights or state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.checkpoint.catalog import open_path
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import SHARED
from engine.checkpoint.reader import Source, own_state, weights_folder
from engine.checkpoint.state_forms import SHARED_FORM, Entries, Fields, checked_form
from engine.config.hyperparameters import constructor_arguments, replaced_by_defaults
from engine.utils.log import logger
from engine.utils.text import terminal_text

T = TypeVar("T")


def load_module(
    cls: type[T], path: str | Path, strict: bool, map_location: Any, weights: str | None, overrides: Mapping[str, Any]
) -> T:  # fmt: skip
    """Do the work of ``TrainModule.load_from_checkpoint``, which documents the arguments."""
    with open_path(path, ("model", "state", *weights_folder(weights))) as opened:
        shared = _shared(opened)
        texts = opened.manifest.get("hparams")
        module: Any = _construct(cls, path, shared, "", texts if isinstance(texts, dict) else {}, overrides)
        module.configure_model()
        module.built = True
        counters = opened.manifest.get("counters")
        facts = (
            {"epoch": counters.get("epoch"), "global_step": counters.get("step")} if isinstance(counters, dict) else {}
        )
        facts["hyper_parameters"] = dict(shared.get("hparams", {}))
        entries = Entries(shared.get("user") or {}, facts)
        module.on_load_checkpoint(entries)
        report = Source(opened, weights).load_model(module, own_state(module), strict and module.strict_loading)
        if report:
            logger.warning("%s fits in part: %s", path, report)
        module.on_checkpoint_loaded(entries)
    result: T = module if map_location is None else module.to(torch.device(map_location))
    return result


def load_datamodule(cls: type[T], path: str | Path, overrides: Mapping[str, Any]) -> T:
    """Do the work of ``DataModule.load_from_checkpoint``, which documents the arguments."""
    with open_path(path, ("state",)) as opened:
        shared = _shared(opened)
        data: Any = _construct(cls, path, shared, "datamodule_", {}, overrides)
        if shared.get("datamodule") is not None:
            data.load_state_dict(shared["datamodule"])
    result: T = data
    return result


def _shared(opened: Opened) -> Fields:
    return checked_form(f"{opened.directory}: {SHARED}.json", opened.tree(SHARED) or {}, SHARED_FORM)


def _construct(
    cls: type, path: str | Path, shared: Fields, prefix: str, texts: Mapping[str, str], overrides: Mapping[str, Any]
) -> Any:
    """Create an object of ``cls`` from the saved hyperparameters and ``overrides``, which win.

    Args:
        prefix: of the names of entries in ``shared``: ``""`` for the module, ``"datamodule_"`` for the data module.
        texts: the hyperparameters as text; a warning shows those that could not be saved.
    """
    saved = {str(name): value for name, value in shared.get(f"{prefix}hparams", {}).items()}
    positional, named = constructor_arguments(cls, saved, overrides, shared.get(f"{prefix}hparams_name"))
    if unsaved := replaced_by_defaults(cls, texts, {*saved, *overrides}):
        arguments = terminal_text(", ".join(f"{name}={text}" for name, text in unsaved.items()), one_line=True)
        logger.warning(
            "%s: the %s was made with %s, which a checkpoint cannot hold: pass them as arguments",
            *(path, "data module" if prefix else "module", arguments),
        )
    return cls(*positional, **named)
