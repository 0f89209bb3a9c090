"""The attributes of Lightning's progress bars that modules, callbacks and subclasses read, and the methods that switch a bar off and on."""

from __future__ import annotations

from typing import Any

from engine.compat.lightning.events import run_of
from engine.compat.lightning.weak_link import WeakLink

Count = int | float


class BarAttributes:
    """Lightning's attributes and methods of a progress bar."""

    _link: WeakLink[Any] = WeakLink()
    _current_eval_dataloader_idx: int | None = None
    _disabled = False
    idle = False
    sanity_check_description, train_description, validation_description = "Sanity Checking", "Training", "Validation"
    test_description, predict_description = "Testing", "Predicting"

    @property
    def trainer(self) -> Any:
        """The trainer of the current or the latest run.

        Raises:
            TypeError: there was none.
        """
        trainer = self._link()
        if trainer is None:
            raise TypeError(f"{type(self).__name__}.trainer is known from setup on")
        return trainer

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return not self._disabled and not self.idle

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is not shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Show nothing from now on."""
        self._disabled = True
        self._show()

    def enable(self) -> None:
        """Show the bar again."""
        self._disabled = False
        self._show()

    def pause_s(self) -> float:
        return 0.1

    def _show(self) -> None:
        """Let a bar of this library draw, or keep it from that."""
        screen = getattr(self, "_screen", None)
        if self._disabled and screen is not None:
            screen.close()
            self._hidden_screen, self._screen = screen, None
        elif not self._disabled and screen is None and getattr(self, "_hidden_screen", None) is not None:
            self._screen, self._hidden_screen, self._next = self._hidden_screen, None, 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Keep the trainer, and set up the bar."""
        self._link, self._hidden_screen = WeakLink(trainer), None
        super().setup(run_of(trainer), pl_module, stage)  # type: ignore[misc]
        self._show()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the bar."""
        self._hidden_screen = None
        super().teardown(run_of(trainer), pl_module, stage)  # type: ignore[misc]

    @property
    def total_train_batches(self) -> Count:
        """This rank's training batches of an epoch, or those that ``max_steps`` leaves."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> Count:
        """This rank's batches in all validation loaders; 0 in an epoch without validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        return 0 if every and (trainer.current_epoch + 1) % every else sum(trainer.num_val_batches)

    @property
    def total_val_batches_current_dataloader(self) -> Count:
        """This rank's batches in the current validation loader."""
        trainer = self.trainer
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return counts[self._current_eval_dataloader_idx or 0]

    @property
    def total_test_batches_current_dataloader(self) -> Count:
        """This rank's batches in the current test loader."""
        return self.trainer.num_test_batches[self._current_eval_dataloader_idx or 0]

    @property
    def total_predict_batches_current_dataloader(self) -> Count:
        """This rank's batches in the current prediction loader."""
        return self.trainer.num_predict_batches[self._current_eval_dataloader_idx or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether ``dataloader_idx`` is another loader than in the call before."""
        previous, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return previous != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the loader of the latest call of :meth:`has_dataloader_changed`."""
        self._current_eval_dataloader_idx = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``: what is printed scrolls above the bar."""
        print(*args, **kwargs)

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """The values logged with ``prog_bar=True``, and as ``v_num`` the first logger's version, of a text its last four characters."""
        base_metrics = getattr(super(), "get_metrics", None)
        metrics = trainer.progress_bar_metrics if base_metrics is None else base_metrics(run_of(trainer), pl_module)
        version = getattr(trainer.logger, "version", None)
        if version in ("", None):
            return dict(metrics)
        return {"v_num": version[-4:] if isinstance(version, str) else version, **metrics}
