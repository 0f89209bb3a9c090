"""A logger for Trackio's local database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from engine import Run

from .base import Logger, Moment, settings_of
from .media import histogram, markdown, pixels, sound


class TrackioLogger(Logger):
    """Logs into Trackio's database on this machine: ``pip install trackio``, then ``trackio show``.

    A row has the optimizer steps done as its step, with ``epoch`` and ``samples`` (trained on so far, by all ranks). Hyperparameters and
    settings, without secrets, are the run's config. A resumed run and its evaluations are the same run. A row is in the database as soon as it is
    sent: a kill loses nothing. ``trackio sync --project NAME --space-id SPACE`` copies a project into a Space. The logger does not send files.
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table"})

    def __init__(
        self,
        project: str = "fit",
        name: str | None = None,
        retries: int = 3,
        waiting: int = 10_000,
        patience_s: float = 30.0,
    ) -> None:
        """
        Args:
            project: name of the project, which groups runs.
            name: name of the run; ``None``: the name of the run's folder, with the first letters of the run's id.
            retries, waiting, patience_s: as in :class:`Logger`.
        """
        super().__init__(retries=retries, waiting=waiting, patience_s=patience_s)
        self.project, self.name = project, name
        self._run = self._id = ""
        self._config: dict[str, Any] | None = None  # still to be sent
        self._described: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; {self.project}"

    def tracker(self) -> Any:
        """Return the module ``trackio``."""
        return self._trackio

    def describe(self, values: Mapping[str, Any]) -> None:
        """Send hyperparameters with the next row."""
        self._config = {**(self._config or self._described), **values}

    def open(self, run: Run) -> None:
        try:
            import trackio
            from trackio.sqlite_storage import SQLiteStorage
        except ImportError as error:
            raise ImportError("TrackioLogger logs with the package trackio: pip install trackio") from error
        self._trackio, self._storage = trackio, SQLiteStorage
        self._run, self._id = self.name or f"{run.folder.name}-{run.id[:8]}", run.id
        self._config = self._described = settings_of(run)
        SQLiteStorage.init_db(self.project)

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        self._log(dict(values), at)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        caption = options.get("caption")
        if kind in ("image", "figure"):
            medium: Any = self._trackio.Image(pixels(value), caption=caption)
        elif kind == "audio":
            medium = self._trackio.Audio(sound(value), sample_rate=options["sample_rate"])
        elif kind == "histogram":
            medium = self._trackio.Histogram(np_histogram=tuple(map(np.asarray, histogram(value))))
        else:
            medium = self._trackio.Markdown(markdown(*value) if kind == "table" else str(value))
        if kind in ("image", "figure", "audio"):
            medium._save(self.project, self._run, at.step)
        self._log({name: medium._to_dict()}, at)

    def _log(self, values: dict[str, Any], at: Moment) -> None:
        self._storage.bulk_log(
            project=self.project,
            run=self._run,
            run_id=self._id,
            metrics_list=[{"epoch": at.epoch, "samples": at.samples, **values}],
            steps=[at.step],
            timestamps=[datetime.fromtimestamp(at.time, UTC).isoformat()],
            config=self._config,
            log_ids=[f"{self._id}-{self.count}"],  # a row that the database has already is not written again
        )
        self._described, self._config = self._config or self._described, None
