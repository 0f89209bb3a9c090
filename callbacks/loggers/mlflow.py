"""A logger for MLflow: a tracking server or a local database."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import Run

from .base import Logger, Moment, settings_of
from .media import cells, content, file_name, histogram, pixels

_TAG = "fit.run_id"
_BATCH = 100
"""Largest number of parameters in one request to MLflow."""


class MLflowLogger(Logger):
    """Logs to MLflow: ``pip install mlflow``.

    The steps of metrics are optimizer steps done; the metrics ``epoch`` and ``samples`` (trained on so far, by all ranks) are beside them.
    Hyperparameters and settings, without secrets, are parameters. MLflow does not allow a parameter to change, so a value that a resume changes is
    a tag. A resumed run and its evaluations are the same run in MLflow; steps that it has already are not sent again. Characters that
    MLflow does not allow in a metric's name become ``_``.
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table", "artifact"})

    def __init__(
        self,
        experiment_name: str = "fit",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifact_location: str | None = None,
        retries: int = 3,
        waiting: int = 10_000,
        patience_s: float = 30.0,
    ) -> None:
        """
        Args:
            experiment_name: the experiment, which is created if it is missing.
            run_name: name of the run; ``None``: the name of the run's folder.
            tracking_uri: URI of a server, ``"http://127.0.0.1:5000"``, or of a database, ``"sqlite:///mlflow.db"``; ``None``: as MLflow is
                configured (``MLFLOW_TRACKING_URI``).
            tags: tags of the run.
            artifact_location: where the files of an experiment that is created here go; ``None``: MLflow's choice, which without a server is
                the folder ``mlruns``.
            retries, waiting, patience_s: as in :class:`Logger`.
        """
        super().__init__(retries=retries, waiting=waiting, patience_s=patience_s)
        self.experiment_name, self.run_name, self.tracking_uri = experiment_name, run_name, tracking_uri
        self.tags, self.artifact_location = dict(tags or {}), artifact_location
        self.run_id: str | None = None
        """The run's id in MLflow; known from the start of the first run."""
        self._client: Any = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; {self.experiment_name}, {self.tracking_uri}"

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.experiment_name

    def tracker(self) -> Any:
        """Return MLflow's client; its calls take :attr:`run_id`."""
        return self._client

    def describe(self, values: Mapping[str, Any]) -> None:
        self._send_parameters(values)

    def open(self, run: Run) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ImportError("MLflowLogger logs with the package mlflow: pip install mlflow") from error
        self._client = client = MlflowClient(self.tracking_uri)
        self.run_id = self._find_run(run.id)
        if self.run_id is None:
            tags = {**self.tags, _TAG: run.id}
            name = self.run_name or run.folder.name
            self.run_id = client.create_run(self._experiment_id(), tags=tags, run_name=name).info.run_id
        else:
            client.update_run(self.run_id, status="RUNNING")
        self._send_parameters(settings_of(run))

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        from mlflow.entities import Metric

        everything = values if at.repeated else {"epoch": at.epoch, "samples": at.samples, **values}
        when = int(at.time * 1000)
        metrics = [Metric(_allowed_name(name), float(value), when, at.step) for name, value in everything.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        name, value = list(values.items())[-1]
        history = self._client.get_metric_history(self.run_id, _allowed_name(name))
        return any(metric.step == at.step and metric.value == value for metric in history)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        client, path = self._client, file_name(name, at.step, ".json").as_posix()
        if kind == "image":
            when = int(at.time * 1000)
            client.log_image(self.run_id, pixels(value), key=_allowed_name(name), step=at.step, timestamp=when)
        elif kind == "histogram":
            counts, edges = histogram(value)
            client.log_dict(self.run_id, {"counts": counts, "edges": edges}, path)
        elif kind == "table":
            client.log_dict(self.run_id, {"columns": value[0], "data": cells(value[1])}, path)
        elif kind == "text":
            client.log_text(self.run_id, str(value), path.removesuffix(".json") + ".txt")
        else:
            target = Path(path.removesuffix(".json") + {"audio": ".wav", "figure": ".png"}[kind])
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, target.name)
                file.write_bytes(content(kind, value, options.get("sample_rate", 44100)))
                client.log_artifact(self.run_id, str(file), target.parent.as_posix())

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), name)
        else:
            self._client.log_artifact(self.run_id, str(path), name)

    def close(self, status: str) -> None:
        names = {"failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self.run_id, names.get(status, "FINISHED"))

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self.experiment_name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(self.experiment_name, self.artifact_location))
            except MlflowException:  # another run has just created it
                experiment = self._client.get_experiment_by_name(self.experiment_name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _find_run(self, run_id: str) -> str | None:
        runs = self._client.search_runs([self._experiment_id()], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _send_parameters(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = {_allowed_name(name): str(value)[:6000] for name, value in settings.items()}
        sent = self._client.get_run(self.run_id).data.params
        new = [Param(name, value) for name, value in parameters.items() if name not in sent]
        for start in range(0, len(new), _BATCH):
            self._client.log_batch(self.run_id, params=new[start : start + _BATCH])
        for name, value in parameters.items():
            if sent.get(name, value) != value:
                self._client.set_tag(self.run_id, name, value)


def _allowed_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)
