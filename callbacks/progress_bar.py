"""A progress bar in the terminal, one line per epoch elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import nn

from engine import Callback, Run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class RichProgressBar(Callback):
    """A bar for the epoch with optimizer steps per second and the metrics logged with ``prog_bar=True``; another for each evaluation.

    Only the main process shows anything. The bar is drawn in the training process itself at most ``refresh_rate`` times a
    second; a step in between only reads the clock. When an epoch ends its last line stays above the bar. If output goes to a
    file or a pipe there is no bar, only that line. The terminal is also restored after an error and Ctrl-C.

    Steps per second are those of the epoch so far, without the time of validation.
    """

    def __init__(self, refresh_rate: float = 10.0, console: Console | None = None) -> None:
        """
        Args:
            refresh_rate: how often the bar is drawn, in Hz; more than 0 and at most 10.
            console: the ``rich`` console to write to; ``None``: standard output.

        Raises:
            ValueError: ``refresh_rate`` is out of range.
        """
        if not 0 < refresh_rate <= 10:
            raise ValueError(
                f"RichProgressBar(refresh_rate={refresh_rate!r}): it must be more than 0 and at most 10 Hz"
            )
        self.refresh_rate = refresh_rate
        self._console = console
        self._progress: Progress | None = None
        self._epoch_task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._shown = False
        self._evaluating = False
        self._ended: tuple[str, float] | None = None
        self._next = 0.0
        self._done = 0
        self._eval_done = 0
        self._first_step = 0
        self._started = 0.0
        self._paused_at = 0.0

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._shown = run.is_main_process
        self._evaluating = False
        if not self._shown:
            return
        if self._console is None:
            from rich.console import Console

            self._console = Console()

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._close(run)

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        self._close(run)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._close(run)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        if self._shown:
            self._print_line(run)
            self._done = run.state.batch_idx
            self._first_step = run.step
            self._started = time.monotonic()
            self._epoch_task = self._start_task(f"epoch {run.epoch}", run.num_train_batches, self._done)

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._done = batch_idx + 1
        if self._shown and time.monotonic() >= self._next:
            self._draw(self._epoch_task, self._done, self._text(run))

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        if not self._shown:
            return
        self._end_task(self._epoch_task)
        self._epoch_task = None
        self._ended = (f"epoch {run.epoch}: step {run.step}, ", time.monotonic())

    def on_sanity_check_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, "sanity check")

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, "validation")

    def on_test_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, "test")

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        self._eval_start(run, "predict")

    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._eval_done += 1
        if self._shown and time.monotonic() >= self._next:
            self._draw(self._eval_task, self._eval_done, "")

    def on_test_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_validation_batch_end(run, module, outputs, batch, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_validation_batch_end(run, module, outputs, batch, batch_idx, dataloader_idx)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end()

    def on_sanity_check_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end()

    def on_test_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end()

    def on_predict_end(self, run: Run, module: nn.Module) -> None:
        self._eval_end()

    def _eval_start(self, run: Run, what: str) -> None:
        # The sanity check starts a validation inside itself: one bar, under the outer name.
        if not self._shown or self._evaluating:
            return
        self._evaluating = True
        self._draw(self._epoch_task, self._done, self._text(run))
        self._paused_at = time.monotonic()
        self._eval_done = 0
        counts = run.num_eval_batches
        total = None if any(count is None for count in counts) else sum(count or 0 for count in counts)
        self._eval_task = self._start_task(what, total, 0)

    def _eval_end(self) -> None:
        if self._evaluating:
            self._evaluating = False
            self._end_task(self._eval_task)
            self._eval_task = None
            self._started += time.monotonic() - self._paused_at

    def _print_line(self, run: Run) -> None:
        """Print the finished epoch's line when the next one starts, since its metrics are logged after its last hook."""
        if self._ended is not None:
            assert self._console is not None
            start, now = self._ended
            self._ended = None
            self._console.print(start + self._text(run, now), highlight=False, markup=False, soft_wrap=True)

    def _text(self, run: Run, now: float | None = None) -> str:
        elapsed = (time.monotonic() if now is None else now) - self._started
        rate = (run.step - self._first_step) / max(elapsed, 1e-9)
        return " ".join([f"{rate:.1f} step/s", *(f"{name}={value:.4g}" for name, value in run.progress.items())])

    def _start_task(self, what: str, total: int | None, done: int) -> TaskID | None:
        assert self._console is not None
        if not (self._console.is_terminal or self._console.is_jupyter):
            return None
        if self._progress is None:
            self._progress = _progress(self._console)
            self._progress.start()
        self._next = 0.0
        return self._progress.add_task(what, total=total, completed=done, text="")

    def _draw(self, task: TaskID | None, done: int, text: str) -> None:
        self._next = time.monotonic() + 1.0 / self.refresh_rate
        if self._progress is not None and task is not None:
            self._progress.update(task, completed=done, text=text)
            self._progress.refresh()

    def _end_task(self, task: TaskID | None) -> None:
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            self._progress.refresh()

    def _close(self, run: Run) -> None:
        """Remove the bar from the terminal and restore the cursor."""
        self._print_line(run)
        progress, self._progress = self._progress, None
        self._epoch_task = self._eval_task = None
        if progress is not None:
            for task in progress.task_ids:
                progress.remove_task(task)
            progress.stop()


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    # Drawn by hand: the thread that would redraw takes the interpreter lock from the training thread.
    return Progress(*columns, console=console, auto_refresh=False, transient=True)
