"""A logger for Weights & Biases."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from engine import Run

from ..text import element
from .base import Logger, Moment, settings_of
from .media import cells, histogram, pixels, sound

_FLUSH_S = 0.02
"""How often W&B flushes to the run's file (s); its default is 15 s."""

_OF_LIGHTNING = {
    "offline": "here it is mode='offline'",
    "save_dir": "the files are in the folder wandb of the run's folder: leave it out",
    "version": "a resumed run continues the run in W&B by itself: leave it out",
    "experiment": "the logger makes the run: leave it out",
    "prefix": "put it into the names that you log",
    "log_model": "log checkpoints in a callback's on_checkpoint_saved(run, module, path, score): module.log_artifact(name, path)",
    "checkpoint_name": "name checkpoints where you log them: module.log_artifact(name, path)",
}


class WandbLogger(Logger):
    """Logs to Weights & Biases: ``pip install wandb``.

    Each row has ``step`` (optimizer steps done), which is the x axis of all metrics, ``epoch`` and ``samples`` (trained on so far, by all ranks).
    Hyperparameters and settings, without secrets, are the run's config. A resumed run and its evaluations are the same run, with the id
    of the run; steps that it has already are not sent again. With ``mode="offline"`` nothing leaves the machine: each start of a run writes a
    folder ``offline-run-*`` in ``wandb`` of the run's folder, and ``wandb sync --append`` sends them, in their order, to one run.
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table", "artifact"})

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        retries: int = 3,
        waiting: int = 10_000,
        patience_s: float = 60.0,
        **init: Any,
    ) -> None:
        """
        Args:
            project: name of the project; ``None``: W&B's choice.
            name: name of the run; ``None``: the name of the run's folder.
            mode: ``"online"``, ``"offline"`` or ``"disabled"``; ``None``: as W&B is configured (``WANDB_MODE``).
            retries, waiting, patience_s: as in :class:`Logger`.
            init: further arguments of ``wandb.init``: ``entity``, ``tags``, ``group``, ``settings``.

        Raises:
            TypeError: an argument of Lightning's logger that ``wandb.init`` does not have; the message says what to use.
            ValueError: ``id``, ``resume``, ``reinit``, ``config`` or ``dir`` is given; the logger sets them itself.
        """
        if refused := sorted({"id", "resume", "reinit", "config", "dir"} & init.keys()):
            raise ValueError(
                f"WandbLogger({', '.join(refused)}=...): a run and its resumes have the id run.id, the config of the run and a folder in run.folder; "
                "leave it out"
            )
        for argument, answer in _OF_LIGHTNING.items():
            if argument in init:
                raise TypeError(f"WandbLogger() got an unexpected keyword argument {argument!r}: {answer}")
        super().__init__(retries=retries, waiting=waiting, patience_s=patience_s)
        self.project, self.name, self.mode, self.init = project, name, mode, init
        self._wandb_run: Any = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; {self.project}"

    def tracker(self) -> Any:
        """Return the ``wandb.Run``."""
        return self._wandb_run

    def describe(self, values: Mapping[str, Any]) -> None:
        self._wandb_run.config.update(dict(values), allow_val_change=True)

    def open(self, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbLogger logs with the package wandb: pip install wandb") from error
        self._wandb = wandb
        run.folder.mkdir(parents=True, exist_ok=True)
        offline = wandb.Settings().mode if self.mode is None else self.mode
        settings = self.init.get("settings") or {}
        settings = wandb.Settings(**settings) if isinstance(settings, Mapping) else settings
        settings.x_transaction_log_flush_interval = _FLUSH_S
        self._wandb_run = wandb.init(
            project=self.project,
            name=self.name or run.folder.name,
            mode=self.mode,
            id=run.id,
            dir=str(run.folder),
            config=settings_of(run),
            resume=None if offline in ("offline", "dryrun") else "allow",
            reinit="create_new",
            settings=settings,
            **{name: value for name, value in self.init.items() if name != "settings"},
        )
        self._wandb_run.define_metric("step")
        self._wandb_run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        self._log(values, at)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        wandb, caption = self._wandb, options.get("caption")
        if kind in ("image", "figure"):
            medium: Any = wandb.Image(pixels(value), caption=caption)
        elif kind == "histogram":
            medium = wandb.Histogram(np_histogram=histogram(value))
        elif kind == "audio":
            medium = wandb.Audio(sound(value), sample_rate=options["sample_rate"])
        elif kind == "table":
            medium = wandb.Table(columns=value[0], data=cells(value[1]))
        else:
            medium = wandb.Html(element("pre", value))
        self._log({name: medium}, at)

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        artifact = self._wandb.Artifact(re.sub(r"[^\w.-]", "_", name), type="file", metadata={"step": at.step})
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self._wandb_run.log_artifact(artifact)

    def close(self, status: str) -> None:
        self._wandb_run.finish(exit_code=1 if status in ("failed", "interrupted") else 0)
        self._wandb_run = None

    def _log(self, values: Mapping[str, Any], at: Moment) -> None:
        path = Path(self._wandb_run.settings.sync_file or "")
        before = path.stat().st_size if path.is_file() else 0
        # W&B's own step counts rows, also those of earlier offline folders; it must rise with each row.
        row = {"epoch": at.epoch, "samples": at.samples, **values, "step": at.step}
        row_number = max(self.count, self._wandb_run.step)  # a module may have logged rows itself
        self._wandb_run.log(row, step=row_number, commit=True)
        deadline = time.monotonic() + 5.0
        while path.is_file() and path.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(_FLUSH_S / 4)  # if this process is killed, rows that W&B's process has not written are lost
