"""Base class of progress bars: when a bar is drawn, and what it shows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine import Callback, terminal_text

from ..text import keep_random_state, results_table
from .estimates import Progress, RunEstimates, duration, epochs_per_line, number, speed
from .screen import Screen, screen_of

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from engine import Run


class ProgressBar(Callback):
    """Base class of progress bars. A subclass defines :meth:`bar`.

    In its bottom rows a terminal shows a bar for the epoch, a bar for the evaluation under way, and below them the metrics on lines of their own;
    everything that any rank prints or logs scrolls above them. A notebook shows the same in its cell. Elsewhere (files, pipes, continuous
    integration, processes forked from a notebook) the callback writes a line every ``interval_s`` seconds. When an epoch ends, and after an
    error, a line stays; in runs of more than 1,000 epochs every n-th of them leaves one (n is 2, 5, 10, ...), and the last.
    ``Fit.validate`` and ``Fit.test`` end with a table.

    Only the main process shows anything. It draws in the training process itself, at most ``refresh_rate`` times a second; a step in between only
    reads the clock. Nothing waits for the device. The terminal is also restored after an error and Ctrl-C; after SIGKILL the bars
    stay until ``reset``.
    """

    critical = False
    shows_progress = True

    def __init__(self, refresh_rate: float = 10.0, interval_s: float = 30.0, console: Console | None = None) -> None:
        """
        Args:
            refresh_rate: how often the bar is drawn, in Hz; more than 0 and at most 10.
            interval_s: seconds between two lines of text, if the output is not a terminal or a notebook.
            console: the ``rich`` console to write to; ``None``: standard output.

        Raises:
            ValueError: a number is out of range.
        """
        name = type(self).__name__
        if not 0 < refresh_rate <= 10:
            raise ValueError(
                f"{name}(refresh_rate={refresh_rate!r}): it must be more than 0 and at most 10 Hz (drawings a second, not batches between "
                "two of them); leave the callback out for no bar"
            )
        if not interval_s > 0:
            raise ValueError(f"{name}(interval_s={interval_s!r}): it must be more than 0 seconds")
        self.refresh_rate, self.interval_s = refresh_rate, interval_s
        self._console = console
        self._screen: Screen | None = None  # on the main process, in a run
        self._estimates = RunEstimates()
        self._next = math.inf  # when to draw
        self._line_due = 0.0  # when to write a line, where nothing is drawn
        self._training = False  # in an epoch
        self._ended_line = ""  # the start of a finished epoch's line, until its metrics are known

    # -- to define or to override -------------------------------------------------------------------------------------------------

    def bar(self, shown: Progress, screen: Screen) -> str:
        """Return one bar with the content ``shown``, as a line of less than ``screen.width`` columns."""
        raise NotImplementedError(f"{type(self).__name__} must define bar(shown, screen)")

    def get_metrics(self, run: Run, module: nn.Module) -> Mapping[str, float | int | str]:
        """Return the metrics to show below the bars; by default those logged with ``prog_bar=True``. Must not wait for the device."""
        return dict(run.progress)

    # -- events of the run --------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._next, self._training, self._ended_line, self._screen = math.inf, False, "", None
        self._estimates = RunEstimates()
        if not run.is_main_process:
            return
        with keep_random_state():
            from rich.console import Console

            self._screen = screen_of(self._console or Console(), self._console is not None)
        self._next = 0.0
        self._line_due = time.monotonic() + self.interval_s

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._close(run, module)

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        if self._screen is not None and self._training and not self._ended_line:
            self._write(self._as_text(self._estimates.epoch(run)), run, module)
        self._close(run, module)

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        if self._screen is None or self._screen.live or logging.getLogger("engine").isEnabledFor(logging.INFO):
            return  # the library's log says it
        if run.loaded_from is not None and run.step:
            self._write_line(f"resumed from {run.loaded_from}: epoch {run.epoch}, step {run.step}")
        if any(callback.runs_last or callback.is_logger for callback in run.callbacks):
            self._write_line(f"this run writes into {run.folder}")

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._draw(run, module)
        self._close(run, module)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        if self._screen is not None:
            if (run.epoch - 1) % epochs_per_line(run):
                self._ended_line = ""
            self._write_epoch(run, module)
            self._training = True
            self._estimates.begin_epoch(run)
            self._draw(run, module)

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if time.monotonic() >= self._next:
            self._estimates.measure(run)
            self._draw_or_write(run, module)

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        if self._screen is not None:
            self._estimates.measure(run)
            self._estimates.end_epoch(run)
            rate = speed(self._estimates.epoch_rate(run), "step")
            self._ended_line = f"{self._estimates.epoch(run).title}: step {run.step}, {rate}"

    def on_sanity_check_start(self, run: Run, module: nn.Module) -> None:
        limit = run.settings.num_sanity_val_steps
        counts = run.num_eval_batches
        if limit >= 0:
            counts = [limit if count is None else min(count, limit) for count in counts]
        self._eval_start(run, module, "sanity check", counts)

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, module, "validation", run.num_eval_batches)

    def on_test_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, module, "test", run.num_eval_batches)

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, module, "predict", run.num_eval_batches)

    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._estimates.evaluated(dataloader_idx)
        if time.monotonic() >= self._next:
            self._draw_or_write(run, module)

    def on_test_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_validation_batch_end(run, module, outputs, batch, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_validation_batch_end(run, module, outputs, batch, batch_idx, dataloader_idx)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        if run.stage != "sanity":  # on_sanity_check_end ends its bar
            self._eval_end(run, module)

    def on_sanity_check_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end(run, module)

    def on_test_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end(run, module)

    def on_predict_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end(run, module)

    # -- drawing ------------------------------------------------------------------------------------------------------------------

    def _eval_start(self, run: Run, module: nn.Module, name: str, limits: list[int | None]) -> None:
        # The sanity check starts a validation inside itself.
        if self._screen is not None and self._estimates.eval_name is None:
            self._estimates.begin_evaluation(name, limits)
            self._draw(run, module)

    def _eval_end(self, run: Run, module: nn.Module) -> None:
        if self._screen is None or self._estimates.eval_name is None:
            return
        if not self._training:
            self._draw(run, module)  # a notebook keeps it
        name = self._estimates.eval_name
        self._estimates.end_evaluation()
        if run.stage in ("validate", "test"):
            self._screen.close()
            self._next = math.inf
            if run.metrics:
                self._screen.write(results_table(name, run, min(self._screen.width, 200)))
        elif name == "validation" and not self._screen.live and run.state.batch_idx != run.num_train_batches:
            self._write(f"validation: step {run.step}", run, module)
        else:
            self._draw(run, module)

    def _draw_or_write(self, run: Run, module: nn.Module) -> None:
        """Draw the bars; where nothing is drawn, write a line if it is due."""
        screen = self._screen
        if screen is None:
            return
        self._plan_next_drawing()
        if screen.live:
            self._draw(run, module)
        elif time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + self.interval_s
            if self._estimates.eval_name is None:
                self._write(self._as_text(self._estimates.epoch(run)), run, module)
            else:
                screen.write(self._as_text(self._estimates.evaluation()))

    def _draw(self, run: Run, module: nn.Module) -> None:
        screen = self._screen
        if screen is None or not screen.live:
            return
        lines = [self.bar(self._estimates.epoch(run), screen)] if self._training else []
        if self._estimates.eval_name is not None:
            lines.append(self.bar(self._estimates.evaluation(), screen))
        metrics = wrap_items(_metric_texts(self.get_metrics(run, module)), screen.width - 1, screen.height - len(lines))
        screen.draw([*lines, *metrics])

    def pause_s(self) -> float:
        """The seconds between two drawings."""
        return 1.0 / self.refresh_rate

    def _plan_next_drawing(self) -> None:
        """Set the time of the next drawing."""
        live = self._screen is not None and self._screen.live
        self._next = time.monotonic() + (self.pause_s() if live else min(1.0, self.interval_s))

    def _as_text(self, progress: Progress) -> str:
        """Return a bar's content as text."""
        count = progress.whole or f"{progress.unit} {progress.done}" + (
            "" if progress.total is None else f"/{progress.total}"
        )
        text = f"{progress.title}: {count}, {speed(progress.rate, progress.unit)}"
        return text if progress.eta_s is None else f"{text}, ETA {duration(progress.eta_s)}"

    def _write(self, text: str, run: Run, module: nn.Module) -> None:
        """Write a line with the metrics."""
        assert self._screen is not None
        items = [text, *_metric_texts(self.get_metrics(run, module))]
        if not self._screen.live:
            self._screen.write(", ".join(items))
            return
        first, *continuation = wrap_items(items, self._screen.width - 3, 100)
        self._screen.write("\n".join([first, *(f"  {line}" for line in continuation)]))

    def _write_line(self, text: str) -> None:
        """Write a line without the metrics."""
        assert self._screen is not None
        self._screen.write(terminal_text(text, one_line=True))

    def _write_epoch(self, run: Run, module: nn.Module) -> None:
        """Write the finished epoch's line when the next one starts, since its metrics are logged after its last hook."""
        if self._ended_line and self._screen is not None:
            self._write(self._ended_line, run, module)
        self._ended_line = ""

    def _close(self, run: Run, module: nn.Module) -> None:
        if self._screen is not None:
            try:
                self._write_epoch(run, module)
            finally:
                self._screen.close()
                self._screen, self._next, self._training = None, math.inf, False


def _metric_texts(metrics: Mapping[str, Any]) -> list[str]:
    return [terminal_text(f"{name}={number(value)}", one_line=True) for name, value in metrics.items()]


def wrap_items(items: Sequence[str], width: int, max_lines: int) -> list[str]:
    """Put items on at most ``max_lines`` lines of at most ``width`` columns. The last line says how many items are left out."""
    from rich.cells import cell_len, set_cell_size

    lines: list[list[str]] = []
    used = width
    for item in items:
        if cell_len(item) > width:  # the name is cut, not the value
            name, _, value = item.rpartition("=")
            item = set_cell_size(name, max(0, width - 2 - cell_len(value))) + "…=" + value
            item = set_cell_size(item, min(width, cell_len(item)))
        if used + 2 + cell_len(item) > width:
            lines.append([])
            used = -2
        lines[-1].append(item)
        used += 2 + cell_len(item)
    if len(lines) > max_lines:
        left_out = sum(map(len, lines[max(0, max_lines - 1) :]))
        lines = lines[: max(0, max_lines - 1)] + ([[f"… {left_out} more"]] if max_lines > 0 else [])
    return ["  ".join(line) for line in lines]
