"""Learning rate schedules by name, with a warm-up: constant, linear and cosine."""

from __future__ import annotations

import math
import os
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from engine.distributed.environments import detect
from engine.step.schedules import NamedFactor
from engine.utils.errors import nearest
from engine.utils.log import logger

NAMES = ("constant", "linear", "cosine")
"""The schedules of :func:`lr_schedule`."""


def lr_schedule(
    optimizer: Optimizer,
    name: str = "cosine",
    *,
    warmup: int | float = 0,
    total_steps: int | None = None,
    min_lr_factor: float = 0.0,
) -> dict[str, Any]:
    """Create a learning rate schedule that steps once per optimizer step, as the ``lr_scheduler`` of ``configure_optimizers``::

        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        schedule = lr_schedule(optimizer, "cosine", warmup=0.05, total_steps=self.run.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    In a loop of your own, ``lr_schedule(...)["scheduler"]`` is the scheduler. The learning rates are those of ``transformers.get_scheduler``. At and
    after ``total_steps`` the learning rate stays at its end.

    Args:
        optimizer: the optimizer, with the learning rate at the end of the warm-up; each parameter group keeps its own.
        name: ``"cosine"`` or ``"linear"``, which fall from the end of the warm-up to the end of the training, or ``"constant"``.
        warmup: the number of steps in which the learning rate rises linearly, from 0 at the first step; a float below 1 is a fraction of
            ``total_steps``, rounded up.
        total_steps: the number of optimizer steps in the training, such as ``run.total_steps``; a constant schedule needs it for a fraction only.
        min_lr_factor: the learning rate at the end, as a fraction of that at the end of the warm-up.

    Returns:
        The entry ``{"scheduler": ..., "interval": "step"}``.

    Raises:
        ValueError: an argument is unknown or out of range, or ``total_steps`` is needed and ``None``.
    """
    if name not in NAMES:
        raise ValueError(f"lr_schedule({name!r}) is unknown{nearest(name, NAMES)}; possible: {', '.join(NAMES)}")
    if total_steps is not None and (
        isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 0
    ):
        raise ValueError(f"lr_schedule(total_steps={total_steps!r}): must be a number of optimizer steps")
    if isinstance(min_lr_factor, bool) or not 0 <= min_lr_factor <= 1:
        raise ValueError(f"lr_schedule(min_lr_factor={min_lr_factor!r}): must be from 0 to 1")
    if name == "constant" and min_lr_factor:
        raise ValueError(
            f"lr_schedule('constant', min_lr_factor={min_lr_factor}): a constant learning rate has no lower end"
        )
    if total_steps is None and needs_length(name, warmup):
        raise ValueError(
            f"lr_schedule({name!r}, warmup={warmup!r}) needs total_steps, the number of optimizer steps in the training, which is not known: "
            "its data has no length, or only max_time ends it. Give Fit(max_steps=), or lr_schedule(total_steps=)"
        )
    steps = warmup_steps(warmup, total_steps)
    is_number = isinstance(warmup, int)  # a fraction of few steps, as in a trial run, may be all of them
    if is_number and total_steps is not None and 0 < total_steps <= steps and detect(os.environ).rank == 0:
        logger.warning(
            "warmup=%d: the training has %d optimizer step(s), so its learning rate ends below the optimizer's",
            warmup,
            total_steps,
        )
    factor = NamedFactor(_FACTORS[name], warmup=steps, total=total_steps or 0, minimum=min_lr_factor)
    return {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}


def needs_length(name: str, warmup: int | float) -> bool:
    """Whether the schedule ``name`` with this ``warmup`` depends on the number of steps in the training."""
    return name != "constant" or (isinstance(warmup, float) and warmup > 0)


def warmup_steps(warmup: int | float, total_steps: int | None) -> int:
    """The number of warm-up steps, given as such or as a fraction (a float below 1) of ``total_steps``.

    Raises:
        ValueError: ``warmup`` is neither, or a fraction of an unknown number.
    """
    is_fraction = isinstance(warmup, float) and 0 <= warmup < 1
    if not is_fraction and (isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0):
        raise ValueError(
            f"warmup={warmup!r} must be a number of steps (an int), or a fraction of all steps (a float below 1)"
        )
    if not is_fraction or not warmup:
        return int(warmup)
    if total_steps is None:
        raise ValueError(
            f"warmup={warmup} is a fraction of the training, whose length is not known: give a number of steps"
        )
    return math.ceil(total_steps * warmup)


def _constant(step: int, *, warmup: int, total: int, minimum: float) -> float:
    return step / warmup if step < warmup else 1.0


def _linear(step: int, *, warmup: int, total: int, minimum: float) -> float:
    if step < warmup:
        return step / warmup
    return minimum + (1 - minimum) * max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, *, warmup: int, total: int, minimum: float) -> float:
    if step < warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return minimum + (1 - minimum) * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


_FACTORS = {"constant": _constant, "linear": _linear, "cosine": _cosine}
