"""A progress bar in tqdm's look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import ProgressBar
from .estimates import Progress, duration
from .screen import Screen

if TYPE_CHECKING:
    from rich.console import Console

_METHODS_OF_LIGHTNING = (
    "init_sanity_tqdm",
    "init_train_tqdm",
    "init_predict_tqdm",
    "init_validation_tqdm",
    "init_test_tqdm",
)


class TQDMProgressBar(ProgressBar):
    """Shows the content of :class:`RichProgressBar` in tqdm's look; needs ``tqdm``.

    ::

        epoch 1/9:   45%|████████████▌               | 45/100 [00:03<00:04, 12.30step/s, ETA 1:23]
        validation:  32%|█████████▎                  | 13/40 [00:00<00:00, 31.00batch/s]
        train/loss=0.1234  val/loss=0.2345  val/accuracy=0.9321

    tqdm formats the bars; the time after ``ETA`` is that of the whole training and includes validation. A bar is a line of the screen, not a
    ``tqdm`` object: bars that you make yourself with ``tqdm(...)`` scroll above it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if methods := [name for name in _METHODS_OF_LIGHTNING if hasattr(cls, name)]:
            raise TypeError(
                f"{cls.__name__}.{methods[0]} would never be called: override bar(shown, screen), which returns a line"
            )

    def __init__(self, refresh_rate: float = 10.0, interval_s: float = 30.0, console: Console | None = None) -> None:
        """Arguments and errors: as in :class:`ProgressBar`, and

        Raises:
            ModuleNotFoundError: tqdm is not installed.
        """
        super().__init__(refresh_rate, interval_s, console)
        try:
            from tqdm.std import tqdm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "TQDMProgressBar needs tqdm: pip install tqdm; RichProgressBar needs nothing more", name=error.name
            ) from error
        self._format = tqdm.format_meter

    def bar(self, shown: Progress, screen: Screen) -> str:
        limit = screen.width - 1
        eta = f"ETA {duration(shown.eta_s)}" if shown.unit == "step" else None
        line = ""
        for postfix in (eta, None):  # tqdm would cut the end of a line that is too long
            line = self._format(
                shown.done,
                shown.total,
                max(shown.elapsed_s, 1e-9),
                ncols=limit,
                prefix=shown.title,
                ascii=screen.ascii,
                unit=shown.unit,
                rate=shown.rate,
                postfix=postfix,
            )
            if len(line) < limit or "|" in line:
                break
        return line[:limit]
