"""Checks before a training starts, or after its first step, for mistakes that would otherwise stay silent or surface much later."""

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
"""Seconds of training after which :func:`report_endless` warns of a stream without an end."""
_METHODS = (
    "training_step", "validation_step", "test_step", "predict_step", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader", "configure_optimizers", "configure_model", "configure_callbacks", "configure_gradient_clipping",
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "prepare_data", "count_samples", "transfer_batch_to_device", "setup", "teardown",
)  # fmt: skip
"""Methods of a module that a run calls, in addition to events."""
_ALIASES = (("on_val_", "on_validation_"), ("on_valid_", "on_validation_"), ("validation_dataloader", "val_dataloader"))
# difflib's similarity: on_train_epoch_ends and on_train_epoch_end have 0.97; on_train_step_end and on_train_batch_end 0.84.
_MIN_SIMILARITY = 0.9
_LIBRARY_FOLDERS = tuple(
    os.path.join(root, name) + os.sep
    for root in [os.path.dirname(os.path.dirname(os.path.dirname(__file__)))]
    for name in ("engine", "callbacks")
)
_seen: WeakSet[type] = WeakSet()


# -- names of hooks ---------------------------------------------------------------------------------------------------------------------


def report_misspelled(owners: Iterable[Any], base: type) -> None:
    """Warn about methods that are never called and whose names are nearly the name of a hook.

    Args:
        owners: the module and the callbacks.
        base: the base class of callbacks.
    """
    for owner in owners:
        if type(owner) in _seen:
            continue
        _seen.add(type(owner))
        for name, hook in misspelled(type(owner), TrainModule if isinstance(owner, TrainModule) else base).items():
            method = next(function for function in _user_functions(type(owner)) if function.__name__ == name)
            warn_once(
                f"{type(owner).__name__}.{name} is never called: the hook is {hook}; rename the method, or begin its name with an underscore",
                about=method.__code__,
            )


def misspelled(cls: type, base: type) -> dict[str, str]:
    """Find methods of ``cls`` whose names are nearly the name of a hook of ``base``; return the hook by method.

    Methods that another method refers to, or whose hook ``cls`` has as well, are helpers and left out.
    """
    hooks = {name for name in vars(base) if name.startswith("on_") or name in _METHODS}
    functions = list(_user_functions(cls))
    names = {function.__name__ for function in functions}
    hooks_by_method = {}
    for name in sorted(names - set(dir(base))):
        if name.startswith("_") or not (name.startswith("on_") or len(name) > 9):
            continue
        spelling = name
        for short, whole in _ALIASES:
            spelling = spelling.replace(short, whole)
        close_names = difflib.get_close_matches(spelling, hooks, n=1, cutoff=_MIN_SIMILARITY)
        if (
            close_names
            and close_names[0] not in names
            and not any(
                name in _names_and_literals(function.__code__) for function in functions if function.__name__ != name
            )
        ):
            hooks_by_method[name] = close_names[0]
    return hooks_by_method


def _user_functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of ``cls`` that users wrote. A class that stands for a user's class names that in ``user_classes``."""
    for part in getattr(cls, "user_classes", cls.__mro__):
        if part in TrainModule.__mro__:
            continue
        for value in vars(part).values():
            function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
            if isinstance(function, FunctionType) and not function.__code__.co_filename.startswith(_LIBRARY_FOLDERS):
                yield function


def _names_and_literals(code: CodeType) -> set[str]:
    """The names and literals in a function and in its inner functions."""
    return _literals(code).union(*((*part.co_names, *part.co_varnames) for part in _with_inner_functions(code)))


def _literals(code: CodeType) -> set[str]:
    """The str constants of a function and of its inner functions, also those in tuples."""
    texts: set[str] = set()
    for constant in (constant for part in _with_inner_functions(code) for constant in part.co_consts):
        values = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
        texts |= {value for value in values if isinstance(value, str)}
    return texts


def _with_inner_functions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner_functions(constant)


# -- optimizers ---------------------------------------------------------------------------------------------------------------------------


def check_parameters(module: TrainModule, optimizers: Sequence[Any]) -> None:
    """Refuse an optimizer that has none of the module's parameters.

    Raises:
        ValueError: an optimizer has none, although the module has parameters to train.
    """
    # A frozen module may serve as the loss for something else that is trained, such as an image.
    if not any(p.requires_grad for p in module.parameters()):
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
    """Warn once when the loss is NaN or infinite, unless such steps are skipped or an error. Waits for the device, so it is called at log boundaries.

    Args:
        outputs: what the step's last ``training_step`` on this rank returned.
    """
    if "nan" in run.warned or run.settings.on_nonfinite is not None or run.engine.scaler is not None:
        return
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    value = loss.sum if isinstance(loss, Loss) else loss
    if isinstance(value, Tensor) and value.numel() == 1 and not value.isfinite().item():
        run.warned.add("nan")
        logger.warning(
            "the loss is %s at step %d, and weights that such a step has changed stay NaN. Fit(on_nonfinite='raise') ends the run at the first such "
            "step and names the parameters, 'skip' leaves such steps out, detect_anomaly=True finds the operation; look for NaN in the data, log(0), "
            "a division by 0 or a learning rate that is too high",
            "NaN" if value.isnan() else "infinite",
            run.step,
        )


def report_endless(run: Run) -> None:
    """Warn once when no epoch has ended after :data:`ENDLESS_S`, and only the number of epochs limits the training."""
    if (
        "endless" not in run.warned
        and run.num_train_batches is None
        and run.train_loader is not None
        and run.train_loader.limit is None
        and not run.state.epoch
        and run.max_steps is None
        and run.control.max_time is None
        and run.control.max_length is None
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
    """Refuse, after the first step rather than after the first epoch, a metric that callbacks or schedulers monitor and nothing logs.

    The sanity check shows what validation logs, and the first step what ``training_step`` logs. A metric is not refused if something else may
    log it: a user's callback, a hook that comes later, or code that has the metric's name or checks for the sanity check.

    Raises:
        ValueError: nothing logs a metric; the message names the callback or scheduler that monitors it, and the logged metrics.
    """
    if run.settings.fast_dev_run or (run.val_loaders and run.logbook.sanity_names is None):
        return
    followed: list[tuple[str, str | None]] = [
        (f"{type(callback).__name__}(monitor={monitored!r})", monitored)
        for callback in run.callbacks
        if (callback.is_early_stopping or callback.finds_best)
        and getattr(callback, "strict", True)
        and (monitored := callback.monitored) is not None
    ]
    if run.module.automatic_optimization:
        followed += [
            (f"{type(schedule.scheduler).__name__} with monitor {schedule.monitor!r}", schedule.monitor)
            for schedule in run.schedulers
            if schedule.reduce_on_plateau and schedule.strict
        ]
    if not followed:
        return
    logged = {*(slot.name for slot in run.logbook.training.all_slots), *run.metrics, *(run.logbook.sanity_names or ())}
    names = set().union(*gather_json(run.engine.group, sorted(logged)))
    forms = {f"{name}{ending}" for name in names for ending in ("", "_step", "_epoch")}
    forms |= {name.removesuffix("_epoch") for name in names}
    for follower, monitor in followed:
        if monitor in forms or _may_log(run, monitor, names):
            continue
        what = (
            ""
            if run.val_loaders
            else ", and this training has no validation (no data was given for it, or it is switched off)"
        )
        raise ValueError(
            f"{follower}: neither validation nor training_step logs {monitor!r}{nearest(monitor, names)}; "
            f"logged: {', '.join(sorted(names)) or 'nothing'}{what}. Log it with self.log({monitor!r}, value), or with strict=False it may be missing"
        )


def _may_log(run: Run, monitor: str | None, names: set[str]) -> bool:
    """Whether code that has not run yet may log the metric ``monitor``. ``names``: the metrics logged so far."""
    if overrides(run.module, "on_train_epoch_end"):
        return True
    functions = list(_user_functions(type(run.module)))
    if not run.val_loaders:
        functions = _without_validation(functions)
    for callback in run.callbacks:
        of_callback = list(_user_functions(type(callback)))
        if any(
            "log" in text or "metric" in text
            for function in of_callback
            for text in _names_and_literals(function.__code__)
        ):
            return True
        functions += of_callback
    for part in {type(part) for part in run.module.modules()} - {type(run.module)}:
        functions += _user_functions(part)
    forms = {monitor, str(monitor).removesuffix("_epoch"), str(monitor).removesuffix("_step")}
    for function in functions:
        texts = _names_and_literals(function.__code__)
        # The metric's name may be a constant of the function's file.
        constants = {value for name in texts if isinstance(value := function.__globals__.get(name), str)}
        if forms & (texts | constants) or any("sanity" in text for text in texts):
            return True
        # The name may be built in an f-string, from pieces such as "train/" and "_". Pieces of metrics logged so far prove nothing.
        pieces = {text for text in _literals(function.__code__) if text and not f"{text[0]}{text[-1]}".isalnum()}
        if any(text in str(monitor) and not any(text in name for name in names) for text in pieces):
            return True
    return False


def _without_validation(functions: Sequence[FunctionType]) -> list[FunctionType]:
    """The ``functions`` that a training without validation may call: a method of validation only if another one names it."""
    methods = [f for f in functions if f.__name__ == "validation_step" or f.__name__.startswith("on_validation_")]
    further_functions = [function for function in functions if function not in methods]
    names = set().union(*(_names_and_literals(function.__code__) for function in further_functions))
    return [*further_functions, *(method for method in methods if method.__name__ in names)]
