"""When Lightning's ``EarlyStopping`` checks and its ``ModelCheckpoint`` saves: at the ends of epochs, or after each validation."""

from __future__ import annotations

from typing import Any

from engine.loop.run import Run
from engine.utils.log import logger


def acts_at_epoch_ends(callback: object, argument: str, requested: bool | None, trainer: Any) -> bool:
    """Whether the callback acts at the end of each epoch in the training of ``trainer``, and not after each validation.

    By default it acts at the ends of epochs if each epoch has one validation, at its end. A warning says if there is no validation to wait for.

    Args:
        argument: the name of the callback's argument that decides.
        requested: the argument's value; ``None``: not given.
    """
    run: Run = trainer.run
    if requested is None:
        pace = run.val_every.pace
        in_batches = pace is None or pace.unit != "seconds"
        requested = bool(in_batches and trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1)
    if not requested and not has_validation(run) and run.is_main_process:
        name = type(callback).__name__
        logger.warning(
            "%s acts after validations, and this training has none: it does nothing; give %s(%s=True)",
            *(name, name, argument),
        )
    return requested


def has_validation(run: Run) -> bool:
    """Whether a training has data to validate on."""
    return not run.val_every.is_never and any(count != 0 for count in run.num_eval_batches)
