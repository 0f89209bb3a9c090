"""Tells loggers about checkpoints, as Lightning's ``ModelCheckpoint`` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.utils.log import logger


def notify(loggers: Iterable[Any], checkpoint_callback: Any) -> None:
    """Call ``after_save_checkpoint`` of the loggers that have it. An error is logged, as any error of a logger, and the training goes on."""
    for entry in loggers:
        after_save = getattr(entry, "after_save_checkpoint", None)
        if after_save is None:
            continue
        try:
            after_save(checkpoint_callback)
        except Exception:
            logger.exception("%s.after_save_checkpoint failed", type(entry).__name__)
