"""A logger for Aim's repositories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from engine import Run, separate

from .base import Logger, Moment, settings_of
from .media import finite, markdown, pixels, sound


class AimLogger(Logger):
    """Logs into a repository of Aim: ``pip install aim``, then ``aim up``.

    The steps are optimizer steps done; Aim keeps the epoch of each value, and ``samples`` (trained on so far, by all ranks) is a metric. If a
    metric has several values at one step, Aim keeps the last. Hyperparameters and settings, without secrets, are the run's parameters.
    A resumed run and its evaluations are the same run in Aim. The logger does not send files.
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table"})

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
        retries: int = 3,
        waiting: int = 10_000,
        patience_s: float = 30.0,
        **run: Any,
    ) -> None:
        """
        Args:
            repo: a folder, or ``"aim://host:port"``; ``None``: the current folder. A folder without a repository gets one.
            experiment: name of the experiment, which groups runs.
            retries, waiting, patience_s: as in :class:`Logger`.
            run: further arguments of ``aim.Run``: ``system_tracking_interval``, ``log_system_params``. The terminal is not captured,
                unless ``capture_terminal_logs=True``.
        """
        super().__init__(retries=retries, waiting=waiting, patience_s=patience_s)
        self.repo = "." if repo is None else os.path.expanduser(repo)
        self.experiment_name = experiment
        self._options = {"capture_terminal_logs": False, "system_tracking_interval": None, **run}
        self._run: Any = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; {self.repo}"

    @property
    def name(self) -> str | None:
        """The experiment's name."""
        return self.experiment_name

    def tracker(self) -> Any:
        """Return the ``aim.Run``."""
        return self._run

    def describe(self, values: Mapping[str, Any]) -> None:
        self._run["hparams"] = {**self._run["hparams"], **values}

    def open(self, run: Run) -> None:
        try:
            import aim
        except ImportError as error:
            raise ImportError("AimLogger logs with the package aim: pip install aim") from error
        self._aim = aim
        local = "://" not in self.repo
        repo = aim.Repo.from_path(self.repo, init=not aim.Repo.exists(self.repo)) if local else self.repo
        note = run.folder / "aim.txt"  # Aim chooses the ids of its runs
        aim_id = note.read_text().strip() if note.exists() else None
        try:
            self._run = aim.Run(
                aim_id, repo=repo, experiment=self.experiment_name, force_resume=aim_id is not None, **self._options
            )
        except aim.sdk.errors.MissingRunError:
            self._run = aim.Run(repo=repo, experiment=self.experiment_name, **self._options)
        note.parent.mkdir(parents=True, exist_ok=True)
        separate(note)
        note.write_text(self._run.hash + "\n")
        self._run.name = run.folder.name
        self._run["fit_run_id"] = run.id
        self._run["hparams"] = settings_of(run)

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        for name, value in (values if at.repeated else {"samples": at.samples, **values}).items():
            self._run.track(value, name=name, step=at.step, epoch=at.epoch)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        aim, caption = self._aim, options.get("caption") or ""
        if kind in ("image", "figure"):
            medium: Any = aim.Image(pixels(value).squeeze(), caption=caption)
        elif kind == "audio":
            medium = aim.Audio(sound(value).astype("float32"), rate=options["sample_rate"])
        elif kind == "histogram":
            medium = aim.Distribution(finite(value), bin_count=64)
        else:
            medium = aim.Text(markdown(*value) if kind == "table" else str(value))
        self._run.track(medium, name=name, step=at.step, epoch=at.epoch)

    def close(self, status: str) -> None:
        self._run["status"] = status
        self._run.close()
        self._run = None
