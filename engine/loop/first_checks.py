"""Mistakes that a training would make in silence, or would end with much later: found before it starts or after its first step."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.loop.run import Run
from engine.module import TrainModule, overrides
from engine.step.gradients import Loss
from engine.utils.errors import nearest
from engine.utils.log import logger, warn_once
from engine.utils.parameters import parameters_of

ENDLESS_S = 600.0
"""Seconds of training after which a stream is called endless."""
_OVERRIDDEN = (
    "training_step", "validation_step", "test_step", "predict_step", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader", "configure_optimizers", "configure_model", "configure_callbacks", "configure_gradient_clipping",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "prepare_data", "transfer_batch_to_device", "setup", "teardown",
)  # fmt: skip
"""Methods that a run calls, besides events."""
_ALIASES = (("on_val_", "on_validation_"), ("on_valid_", "on_validation_"), ("validation_dataloader", "val_dataloader"))
_ALIKE = 0.9  # on_train_epoch_ends and on_train_epoch_end: 0.97; on_train_step_end and on_train_batch_end: 0.84
_OURS = tuple(
    os.path.join(root, name) + os.sep
    for root in [os.path.dirname(os.path.dirname(os.path.dirname(__file__)))]
    for name in ("engine", "callbacks")
)
_seen: WeakSet[type] = WeakSet()


# -- names of hooks ---------------------------------------------------------------------------------------------------------------------


def report_misspelled(owners: Iterable[Any], base: type) -> None:
    """Warn of methods that nobody calls, and whose names are almost the name of a hook.

    Args:
        owners: a module and callbacks.
        base: the class of callbacks.
    """
    for owner in owners:
        if type(owner) in _seen:
            continue
        _seen.add(type(owner))
        for name, hook in misspelled(type(owner), TrainModule if isinstance(owner, TrainModule) else base).items():
            method = next(function for function in _written_for(type(owner)) if function.__name__ == name)
            warn_once(
                f"{type(owner).__name__}.{name} is never called: the hook is {hook}; rename the method, or begin its name with an underscore",
                about=method.__code__,
            )


def misspelled(cls: type, base: type) -> dict[str, str]:
    """Methods of ``cls`` that nearly have the name of a hook of ``base``, and that hook.

    A method that another one names is a helper, and so is one beside the hook itself.
    """
    hooks = {name for name in vars(base) if name.startswith("on_") or name in _OVERRIDDEN}
    functions = list(_written_for(cls))
    names = {function.__name__ for function in functions}
    hooks_by_method = {}
    for name in sorted(names - set(dir(base))):
        if name.startswith("_") or not (name.startswith("on_") or len(name) > 9):
            continue
        spelling = name
        for short, whole in _ALIASES:
            spelling = spelling.replace(short, whole)
        near = difflib.get_close_matches(spelling, hooks, n=1, cutoff=_ALIKE)
        if (
            near
            and near[0] not in names
            and not any(name in _texts(function.__code__) for function in functions if function.__name__ != name)
        ):
            hooks_by_method[name] = near[0]
    return hooks_by_method


def _written_for(cls: type) -> Iterator[FunctionType]:
    """The functions of ``cls`` that are neither this library's nor torch's. A class that stands for a user's has his as ``user_classes``."""
    for part in getattr(cls, "user_classes", cls.__mro__):
        if part in TrainModule.__mro__:
            continue
        for value in vars(part).values():
            function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
            if isinstance(function, FunctionType) and not function.__code__.co_filename.startswith(_OURS):
                yield function


def _texts(code: CodeType) -> set[str]:
    """Names and literals in a function, and in the functions that it defines."""
    return _literals(code).union(*((*part.co_names, *part.co_varnames) for part in _codes(code)))


def _literals(code: CodeType) -> set[str]:
    """The constants of a function, and of the functions that it defines, that are texts, also in tuples."""
    texts: set[str] = set()
    for constant in (constant for part in _codes(code) for constant in part.co_consts):
        values = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
        texts |= {value for value in values if isinstance(value, str)}
    return texts


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# -- optimizers ---------------------------------------------------------------------------------------------------------------------------


def check_parameters(module: TrainModule, optimizers: Sequence[Any]) -> None:
    """Refuse an optimizer that trains nothing of the module.

    Raises:
        ValueError: it has none of the module's parameters, although some can be trained.
    """
    if not any(p.requires_grad for p in module.parameters()):  # an image is trained, with the loss of a frozen network
        return
    parameters = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        if parameters.isdisjoint(map(id, parameters_of([optimizer]))):
            raise ValueError(
                f"{type(optimizer).__name__} has none of the parameters of {type(module).__name__}, which would not be trained: make the "
                "optimizer in configure_optimizers, from self.parameters(). Parameters outside of the module belong in it, as an nn.Parameter "
                "or a submodule"
            )


# -- the first steps ------------------------------------------------------------------------------------------------------------------------


def report_nan(run: Run, outputs: Any) -> None:
    """Warn once when the loss is not a number. Waits for the device: called where values are logged.

    Args:
        outputs: of the step's last ``training_step`` on this rank.
    """
    if "nan" in run.warned or run.settings.on_nonfinite is not None:
        return
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    value = loss.sum if isinstance(loss, Loss) else loss
    if isinstance(value, Tensor) and value.numel() == 1 and value.isnan().item():
        run.warned.add("nan")
        logger.warning(
            "the loss is NaN at step %d, and weights that such a step has changed stay NaN. Fit(on_nonfinite='raise') ends the run at the first such "
            "step and names the parameters, 'skip' leaves such steps out, detect_anomaly=True finds the operation; look for NaN in the data, log(0), "
            "a division by 0 or a learning rate that is too high",
            run.step,
        )


def report_endless(run: Run) -> None:
    """Warn when no epoch has ended for a while, and only the number of epochs ends the training."""
    if (
        "endless" not in run.warned
        and run.num_train_batches is None
        and run.train_loader is not None
        and run.train_loader.limit is None
        and not run.state.epoch
        and run.max_steps is None
        and run.settings.max_time is None
        and run.elapsed_s >= ENDLESS_S
        and run.is_main_process
    ):
        run.warned.add("endless")
        logger.warning(
            "no epoch has ended after %.0f s: the training data (%s) has no length, and only max_epochs=%s ends this training. If the data never "
            "ends, give max_steps, max_time or limit_train_batches",
            run.elapsed_s,
            type(run.train_loader.loader).__name__,
            run.max_epochs,
        )


def check_monitors(run: Run) -> None:
    """Refuse a metric that callbacks or schedulers follow and nothing will log, after the first step rather than after the first epoch.

    What validation logs is known from the sanity check, and what ``training_step`` logs from the step. Where something else may log the metric,
    nothing is refused: the user's callbacks, hooks that come later, code that has its name or asks for the sanity check.

    Raises:
        ValueError: the message names who follows the metric, and those that were logged.
    """
    if run.settings.fast_dev_run or (run.val_loaders and run.logbook.sanity_names is None):
        return
    followed = [
        (f"{type(callback).__name__}(monitor={callback.monitor!r})", callback.monitor)
        for callback in run.callbacks
        if (callback.is_early_stopping or callback.finds_best)
        and getattr(callback, "strict", True)
        and hasattr(callback, "monitor")
    ]
    if run.module.automatic_optimization:
        followed += [
            (f"{type(schedule.scheduler).__name__} with monitor {schedule.monitor!r}", schedule.monitor)
            for schedule in run.schedulers
            if schedule.reduce_on_plateau and schedule.strict
        ]
    if not followed:
        return
    logged = {*run.logbook.training.slots, *run.metrics, *(run.logbook.sanity_names or ())}
    names = set().union(*gather_json(run.engine.group, sorted(logged)))
    forms = {f"{name}{ending}" for name in names for ending in ("", "_step", "_epoch")}
    forms |= {name.removesuffix("_epoch") for name in names}
    for who, monitor in followed:
        if monitor in forms or _may_log(run, monitor, names):
            continue
        what = (
            ""
            if run.val_loaders
            else ", and this training has no validation (no data was given for it, or it is switched off)"
        )
        raise ValueError(
            f"{who}: neither validation nor training_step logs {monitor!r}{nearest(monitor, names)}; "
            f"logged: {', '.join(sorted(names)) or 'nothing'}{what}. Log it with self.log({monitor!r}, value), or with strict=False it may be missing"
        )


def _may_log(run: Run, monitor: str | None, names: set[str]) -> bool:
    """Whether something that has not run yet may log the metric. ``names``: those that were logged so far."""
    if overrides(run.module, "on_train_epoch_end"):
        return True
    functions = list(_written_for(type(run.module)))
    if not run.val_loaders:
        functions = _without_validation(functions)
    for callback in run.callbacks:
        of_callback = list(_written_for(type(callback)))
        if any("log" in text or "metric" in text for function in of_callback for text in _texts(function.__code__)):
            return True
        functions += of_callback
    for part in {type(part) for part in run.module.modules()} - {type(run.module)}:
        functions += _written_for(part)
    forms = {monitor, str(monitor).removesuffix("_epoch"), str(monitor).removesuffix("_step")}
    for function in functions:
        texts = _texts(function.__code__)
        # A name that is a constant of the file.
        constants = {value for name in texts if isinstance(value := function.__globals__.get(name), str)}
        if forms & (texts | constants) or any("sanity" in text for text in texts):
            return True
        # Pieces of a name that is put together in an f-string ("train/", "_"), unless they are in what it has logged already.
        pieces = {text for text in _literals(function.__code__) if text and not f"{text[0]}{text[-1]}".isalnum()}
        if any(text in str(monitor) and not any(text in name for name in names) for text in pieces):
            return True
    return False


def _without_validation(functions: Sequence[FunctionType]) -> list[FunctionType]:
    """The ``functions`` that a training without validation may call: a method of validation only if another one names it."""
    methods = [f for f in functions if f.__name__ == "validation_step" or f.__name__.startswith("on_validation_")]
    further_functions = [function for function in functions if function not in methods]
    names = set().union(*(_texts(function.__code__) for function in further_functions))
    return [*further_functions, *(method for method in methods if method.__name__ in names)]
