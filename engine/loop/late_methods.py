"""Methods that the user's code sets on the module or on a callback after the run has collected the hooks, in ``setup`` for example."""

from __future__ import annotations

from typing import Any

from engine.callback import Callback
from engine.loop.method_arguments import BESIDES_EVENTS
from engine.loop.run import Run
from engine.module import TrainModule


def take_late_methods(run: Run) -> None:
    """Call from now on the hooks that were set on the module or on a callback so far, or deleted, in their places among the others.

    Raises:
        TypeError: a method was set that the steps of the training do not call any more; the message names it.
    """
    owners: list[TrainModule | Callback] = [run.module, *run.callbacks]
    for owner in owners:
        owner.note_methods()
    run.hooks.take_late(run.callbacks, run.module)
    if run.optimization is None:
        return
    for name, method in methods_of_steps(run.module).items():
        if method != run.methods_of_steps[name]:
            raise TypeError(
                f"{type(run.module).__name__}.{name} was set on the module after the training was set up, which does not call it any more: set it "
                "before the run, or in setup or configure_model"
            )


def methods_of_steps(module: TrainModule) -> dict[str, Any]:
    """Return by name the methods of the module that the training's set-up hands to the steps."""
    return {name: getattr(module, name) for name in ("training_step", *BESIDES_EVENTS)}
