"""What modules call on a logger themselves, in Lightning's words: ``self.logger.experiment``, ``log_metrics``, ``log_hyperparams``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine import Callback, Run

if TYPE_CHECKING:
    from .base import Moment


class Nothing:
    """Stands for a tracker's object on the ranks that do not log: takes every call, item and ``with`` block, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __bool__(self) -> bool:
        return False


NOTHING = Nothing()


class Direct(Callback):
    """The part of a logger that users call, in a run."""

    _of: Run | None = None
    """The run under way, on every rank."""

    # -- to define --------------------------------------------------------------------------------------------------------------

    def tracker(self) -> Any:
        """What :attr:`experiment` is: the tracker's own object; the logger itself, if there is none."""
        return self

    def describe(self, values: Mapping[str, Any]) -> None:
        """Send hyperparameters by flat names, in the logger's thread."""

    # -- to call ----------------------------------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The tracker's own object, while a run is under way: TensorBoard's ``SummaryWriter``, W&B's run, MLflow's client, Aim's run, the module
        ``trackio``; for files of rows the logger itself. On ranks other than 0 an object that does nothing.

        Calls of it are made at once, in the thread that calls; what the logger itself sends may still wait for its thread.

        Raises:
            AttributeError: no run is under way.
        """
        run = self._under_way("experiment")
        if not run.is_main_process:
            return NOTHING
        self._opened(run)
        return self.tracker()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers in order with those that the run logs, on rank 0; other ranks' calls do nothing.

        Args:
            metrics: numbers, or tensors with one element, which are waited for; of this rank.
            step: ``None``: the optimizer steps done.
        """
        run = self._under_way("log_metrics")
        if run.is_main_process:
            values = {name: float(value) for name, value in metrics.items()}
            self._opened(run)
            self._send_values(run, values, step)

    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Send hyperparameters beside those of ``save_hyperparameters``, which the run sends itself; on rank 0.

        Args:
            params: a mapping, which may be nested, or a Namespace.
            metrics: numbers to log with them.
        """
        run = self._under_way("log_hyperparams")
        if run.is_main_process:
            given = params if isinstance(params, Mapping) else {} if params is None else vars(params)
            self._opened(run)
            self._send_settings({**given, **more})
        if metrics:
            self.log_metrics(metrics)

    def save(self) -> None:
        """Nothing: values are sent, or written, as soon as they are logged."""

    @property
    def version(self) -> str:
        """The run's id."""
        return self._under_way("version").id

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._under_way("save_dir").folder)

    @property
    def log_dir(self) -> str:
        """The folder where this logger writes, on every rank; for a tracker elsewhere the run's folder."""
        return str(self._under_way("log_dir").folder)

    # -- of the logger ----------------------------------------------------------------------------------------------------------

    def _opened(self, run: Run) -> None:
        raise NotImplementedError

    def _send_values(self, run: Run, values: dict[str, float], step: int | None) -> None:
        raise NotImplementedError

    def _send_settings(self, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _under_way(self, what: str) -> Run:
        if self._of is None:
            raise AttributeError(f"{type(self).__name__}.{what} is there during a run only")
        return self._of


def at_step(moment: Moment, step: int | None) -> Moment:
    """``moment``, at another ``step`` if one is given."""
    return moment if step is None else replace(moment, step=int(step))
