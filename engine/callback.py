"""``Callback``: the events of a run, and who is called at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from engine.run import Run


class Callback:
    """Subclass it and override the events that matter; only overridden ones are ever called. Every event gets the run and the module."""

    runs_last = False
    """Called after the others at each event (checkpointing sees what they logged)."""

    def setup(self, run: Run, module: nn.Module, stage: str) -> None: ...
    def teardown(self, run: Run, module: nn.Module, stage: str) -> None: ...
    def on_fit_start(self, run: Run, module: nn.Module) -> None: ...
    def on_fit_end(self, run: Run, module: nn.Module) -> None: ...
    def on_sanity_check_start(self, run: Run, module: nn.Module) -> None: ...
    def on_sanity_check_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_start(self, run: Run, module: nn.Module) -> None: ...
    def on_train_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None: ...
    def on_after_backward(self, run: Run, module: nn.Module) -> None: ...
    def on_before_optimizer_step(self, run: Run, module: nn.Module, optimizer: Any) -> None: ...
    def on_before_zero_grad(self, run: Run, module: nn.Module, optimizer: Any) -> None: ...
    def on_validation_start(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_end(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self, run: Run, module: nn.Module) -> None: ...
    def on_test_end(self, run: Run, module: nn.Module) -> None: ...
    def on_test_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_test_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_test_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_start(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_end(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Values are about to be published, on every rank: add to ``metrics`` here."""

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Values over all ranks, every ``log_every_n_steps`` steps and after each epoch and evaluation; called on every rank."""

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        """Anything was raised (Ctrl-C too); it is raised on afterwards. Other ranks may be gone: no collectives here."""

    def on_save_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What to keep in checkpoints: a tree of tensors and JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave."""


Hook = Callable[..., Any]
EVENTS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class Hooks:
    """For each event, the bound methods to call, found once: callbacks in their order, those that run last, and the module before them.

    ``hooks.on_train_batch_end`` is a tuple; an event that nobody overrides is an empty one and costs the loop nothing.
    """

    def __init__(self, callbacks: Sequence[Callback], module: nn.Module, base: type[nn.Module]) -> None:
        self.transfers = any(_of_module(module, base, f"on_{when}_batch_transfer") for when in ("before", "after"))
        early = [c for c in callbacks if not c.runs_last]
        late = [c for c in callbacks if c.runs_last]
        for event in EVENTS:
            found = [_of_callback(c, event) for c in early]
            found += [_of_module(module, base, event)]
            last = [_of_callback(c, event) for c in late]
            if event == "on_train_epoch_end":  # the last ones come when the epoch's schedulers have stepped: a saved state is whole
                self.last_on_train_epoch_end = tuple(hook for hook in last if hook is not None)
            else:
                found += last
            setattr(self, event, tuple(hook for hook in found if hook is not None))

    def __getattr__(self, name: str) -> tuple[Hook, ...]:
        raise AttributeError(f"there is no event {name!r}")  # also tells type checkers that events are attributes


def _of_callback(callback: Callback, event: str) -> Hook | None:
    method = getattr(callback, event, None)
    if method is None or getattr(method, "__func__", None) is getattr(Callback, event):
        return None
    return method


def _of_module(module: nn.Module, base: type[nn.Module], event: str) -> Hook | None:
    """The module's own hook, made to take what a callback takes."""
    method = getattr(module, event, None)
    if not callable(method) or getattr(method, "__func__", None) is getattr(base, event, None):
        return None

    def hook(run: Run, module: nn.Module, *args: Any) -> Any:
        return method(*args)

    return hook
