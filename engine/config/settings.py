"""Every argument of ``Fit``: its default, meaning, and possible values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.config.checks import Check, a_bool, a_choice, an_int, is_int, unknown, wrong, wrong_type
from engine.config.duration import Duration, parse
from engine.config.name_and_options import PRECISIONS, precision_name, precision_setting, strategy_setting
from engine.config.transform_settings import compile_setting, recompute_setting
from engine.utils.device_names import KNOWN, hint, is_added
from engine.utils.errors import nearest

__all__ = ["OVERFIT", "PRECISIONS", "Settings", "check", "fast_dev_run_overrides", "precision_name"]

OVERFIT = ("limit_train_batches", "limit_val_batches")
"""The settings that ``overfit_batches`` sets."""
_ONE_EPOCH = Duration("epochs", 1)
_TEN_MINUTES, _HALF_HOUR = Duration("seconds", 600), Duration("seconds", 1800)


@dataclass(frozen=True)
class Settings:
    """All arguments of ``Fit``, checked and in one form each.

    Values are normalised: durations become :class:`Duration`, precision names the library's own,
    ``callbacks`` a tuple, ``root_dir`` a ``Path``.

    Raises:
        ValueError, TypeError: a value that is not possible; the message names the argument, the value and what is possible.
    """

    strategy: Any = "auto"
    """How the model is distributed over the ranks: a registered name, ``{name: deepspeed, stage: 3}`` with its settings, or a strategy object."""
    accelerator: str = "auto"
    """``"auto"``: the accelerator that ``torch.accelerator`` finds, else the CPU. ``"gpu"``: that accelerator, whatever its kind (an NPU too).
    Or a device by its name: ``"cpu"``, ``"cuda"`` (ROCm too), ``"mps"``, ``"xpu"``, ``"npu"``, ``"hpu"``, ``"mtia"``, or one that a package
    adds to torch."""
    devices: int | str | tuple[int, ...] = "auto"
    """Processes on this node, one device each: a number, the device indices (``[0, 2]`` or ``"0,2"``), or ``"auto"``."""
    num_nodes: int = 1
    """Nodes of the job."""
    precision: Any = "32-true"
    """Number formats of the model and of its computations: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"fp8-mixed"``,
    ``"bf16-true"``, ``"16-true"``, ``"64-true"``, ``{name: fp8-mixed, recipe: rowwise}``, or an ``FP8`` or ``Precision`` object."""
    max_epochs: int | None = None
    """Stop after this many epochs. 1 when neither this nor ``max_steps`` nor ``max_time`` is given."""
    min_epochs: int | None = None
    """Epochs before which callbacks (early stopping), ``run.stop()`` and ``max_time`` do not end the training; an earlier wish to stop is met
    then."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    min_steps: int | None = None
    """Optimizer steps before which callbacks, ``run.stop()`` and ``max_time`` do not end the training; with ``min_epochs`` both must be reached.
    Ctrl-C and SIGTERM end the training at any time."""
    max_time: Duration | None = None
    """Stop after this time: ``"10 min"``, ``"1.5 h"``, ``"DD:HH:MM:SS"`` or a ``timedelta``."""
    accumulate_grad_batches: int | dict[int, int] = 1
    """Micro-batches of one optimizer step, or a schedule ``{first epoch: micro-batches}`` (1 before its first epoch)."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks; the window is derived from it, at any world size."""
    gradient_clip_val: float | None = None
    """Maximum gradient norm, or absolute value, after clipping; ``None`` or 0: no clipping."""
    gradient_clip_algorithm: str = "norm"
    """``"norm"``: the global norm over all parameters and ranks. ``"value"``: each element on its own."""
    val_every: Duration | None = _ONE_EPOCH
    """How often to validate: ``"1 epochs"``, ``"500 steps"``, ``"10 min"``; ``None``: never."""
    num_sanity_val_steps: int = 2
    """Validation batches to try before training starts; 0: none, -1: all."""
    limit_train_batches: int | float | None = None
    """Micro-batches of an epoch on each rank: an int is a number (0: none), a float in (0, 1] a fraction, ``None`` all."""
    limit_val_batches: int | float | None = None
    """Batches of each validation loader on each rank, during training and in ``Fit.validate``: an int is a number (0 switches validation off), a
    float in (0, 1] a fraction, ``None`` all."""
    limit_test_batches: int | float | None = None
    """Batches of each loader of ``Fit.test`` on each rank: an int is a number (0 tests nothing), a float in (0, 1] a fraction, ``None`` all."""
    limit_predict_batches: int | float | None = None
    """Batches of each loader of ``Fit.predict`` on each rank: an int is a number (0 predicts nothing), a float in (0, 1] a fraction, ``None`` all."""
    overfit_batches: int | float = 0
    """Train on the first batches only, the same in every epoch, unshuffled: an int is a number, a float in (0, 1] a fraction, 0 all. Validation is
    limited and unshuffled likewise."""
    fast_dev_run: bool | int = False
    """Try everything on n batches (``True``: 1): one epoch, n batches of training and of validation, no sanity check."""
    log_every_n_steps: int = 50
    """Optimizer steps between two log boundaries, at which metrics leave the device; the first and the last step are logged as well.
    0: never within an epoch."""
    callbacks: tuple[Any, ...] = ()
    """Callback objects, called in this order. Given in code only."""
    activation_checkpointing: str | int | None = None
    """Recompute the model's repeated blocks in the backward pass instead of storing their results: ``"full"``, ``"selective"`` (results
    of matrix products and attention are kept), an int n (every n-th block only), or ``None``."""
    compile: bool | str | dict[str, Any] = False
    """``torch.compile``: ``True`` for the whole model, ``"blocks"`` for each repeated block, or a dict of its options (with ``"blocks": True``)."""
    sync_batchnorm: bool = False
    """Batch norms compute their statistics over the samples of all ranks, as one process would over the whole micro-batch."""
    deterministic: bool | str = False
    """``True``: only deterministic algorithms, others raise an error; ``"warn"``: others warn."""
    benchmark: bool | None = None
    """Whether cuDNN measures its algorithms for each new input shape and uses the fastest. ``None``: torch's setting; off if ``deterministic``."""
    matmul_precision: str | None = None
    """How products of float32 matrices are computed during the run, as ``torch.set_float32_matmul_precision`` has it: ``"highest"`` in float32,
    ``"high"`` in TF32 (or pairs of bfloat16), ``"medium"`` in bfloat16, each where the device has it. ``None``: torch's setting."""
    detect_anomaly: bool = False
    """Autograd checks every backward pass for NaN and shows the forward operation it comes from. Slow; for debugging."""
    seed: int | None = None
    """Seed of python, numpy and torch, and of the data order; 0 to 2**32 - 1. ``None`` seeds nothing."""
    on_nonfinite: str | None = None
    """A step whose gradient norm is not finite: ``"raise"`` an error, ``"skip"`` the step, or ``None``: no check."""
    timeout: Duration | None = _TEN_MINUTES
    """Maximum time without a finished batch, and for a collective, after the first step: several ranks then end with an error that names
    those that lag; a single process logs its position. ``None``: ``start_timeout`` applies throughout, without monitoring."""
    start_timeout: Duration = _HALF_HOUR
    """Maximum time without a sign of life, and for a collective, up to the first step: processes connect, data are prepared, the model is
    compiled."""
    check: bool = False
    """Compare the ranks before the first step: parameters, lengths of loaders, structure of the first batch, and that batches arrive unchanged."""
    debug: bool = False
    """Compare operation, shapes and dtypes over the ranks before each collective: an error instead of a hang. Slow; for debugging."""
    gc_every_n_steps: int = 50
    """Python's garbage collector runs at every n-th optimizer step, on all ranks at once, and not in between; 0: automatic, as Python does."""
    reload_best: bool = False
    """After the training the module takes the weights of the best checkpoint, by a ``ModelCheckpoint``'s ``monitor``."""
    root_dir: Path = Path("runs")
    """Where checkpoints and logs are written."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, check(field.name, getattr(self, field.name)))
        if self.global_batch_size is not None and self.accumulate_grad_batches != 1:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} and accumulate_grad_batches={self.accumulate_grad_batches!r}: "
                "the first derives the second; give one of them"
            )
        self._check_together()
        if self.overfit_batches:
            for name in OVERFIT:
                object.__setattr__(self, name, self.overfit_batches)
        if self.fast_dev_run:
            for name, value in fast_dev_run_overrides(int(self.fast_dev_run)).items():
                object.__setattr__(self, name, value)
        if self.max_epochs is None and self.max_steps is None and self.max_time is None:
            object.__setattr__(self, "max_epochs", 1)
        for least, most in ((self.min_epochs, self.max_epochs), (self.min_steps, self.max_steps)):
            if least is not None and most is not None and least > most:
                unit = "epochs" if most is self.max_epochs else "steps"
                raise ValueError(
                    f"min_{unit}={least} and max_{unit}={most}: the training would end before its minimum; give a larger max_{unit}"
                )

    def _check_together(self) -> None:
        """Check for settings that contradict each other."""
        for name in OVERFIT:
            given = getattr(self, name)
            if self.overfit_batches and not self.fast_dev_run and given not in (None, self.overfit_batches):
                raise ValueError(
                    f"overfit_batches={self.overfit_batches} and {name}={given}: the first sets the second; give one of them"
                )
        if self.benchmark and self.deterministic is True:
            raise ValueError(
                "benchmark=True and deterministic=True: the fastest algorithm differs between runs; give one of them"
            )

    def accumulate_at(self, epoch: int) -> int:
        """Micro-batches of one optimizer step in ``epoch`` (the first is 0)."""
        schedule = self.accumulate_grad_batches
        if isinstance(schedule, int):
            return schedule
        return next((schedule[first] for first in sorted(schedule, reverse=True) if first <= epoch), 1)


def fast_dev_run_overrides(n: int) -> dict[str, Any]:
    """What ``fast_dev_run=n`` replaces in the other settings."""
    return {
        "max_epochs": 1,
        "min_epochs": None,
        "max_steps": None,
        "min_steps": None,
        "max_time": None,
        "val_every": _ONE_EPOCH,
        "num_sanity_val_steps": 0,
        "limit_train_batches": n,
        "limit_val_batches": n,
        "limit_test_batches": n,
        "limit_predict_batches": n,
        "log_every_n_steps": 1,
    }


def check(name: str, value: object) -> Any:
    """``value`` of the setting ``name`` in its normal form.

    Raises:
        ValueError, TypeError: as :class:`Settings`. An unknown ``name`` is a ValueError with the nearest one.
    """
    if name not in _CHECKS:
        raise ValueError(f"{name!r} is not a setting{nearest(name, _CHECKS)}; possible: {', '.join(_CHECKS)}")
    return _CHECKS[name](name, value)


def _devices(name: str, value: Any) -> int | str | tuple[int, ...]:
    possible = "'auto', an int of at least 1, or distinct device indices such as [0, 2]"
    if isinstance(value, str) and value != "auto":
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            raise unknown(name, value, ["auto"], possible) from None
        value = numbers if "," in value else numbers[0]
    if value == "auto":
        return "auto"
    if isinstance(value, (list, tuple)):
        if not value or not all(is_int(i) and i >= 0 for i in value) or len(set(value)) != len(value):
            raise wrong(name, value, possible)
        return tuple(map(operator.index, value))
    if not is_int(value):
        raise wrong_type(name, value, possible)
    if value < 1:
        raise wrong(name, value, possible)
    return operator.index(value)


def _accumulate(name: str, value: Any) -> int | dict[int, int]:
    possible = "an int of at least 1, or a schedule {epoch: int} such as {0: 1, 5: 4}"
    if not isinstance(value, Mapping):
        if not is_int(value):
            raise wrong_type(name, value, possible)
        if value < 1:
            raise wrong(name, value, possible)
        return operator.index(value)
    if not value or not all(
        is_int(n) and n >= least for pair in value.items() for n, least in zip(pair, (0, 1), strict=True)
    ):
        raise wrong(name, value, possible)
    return {operator.index(epoch): operator.index(value[epoch]) for epoch in sorted(value)}


def _clip(name: str, value: Any) -> float | None:
    possible = "a number of at least 0, or None for no clipping"
    if value is None:
        return None
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise wrong_type(name, value, possible)
    number = float(value)
    if math.isnan(number) or number < 0:
        raise wrong(name, value, possible)
    return number or None


def _limit(name: str, value: Any) -> int | float | None:
    possible = "an int of at least 0 (a number of batches), a float in (0, 1] (a fraction of them), or None for all"
    if value is None:
        return None
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise wrong(name, value, possible)
        return value or 0
    if not is_int(value):
        raise wrong_type(name, value, possible)
    if value < 0:
        raise wrong(name, value, possible)
    return operator.index(value)


def _overfit(name: str, value: Any) -> int | float:
    found = _limit(name, value)
    return 0 if found is None else found


def _interval(name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
    duration = _duration(name, value)
    if duration is not None and duration.value == 0:
        raise wrong(name, value, "a duration of more than 0, or None for never")
    return duration


def _time(name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
    duration = _duration(name, value)
    if duration is not None and duration.unit != "seconds":
        raise wrong(name, value, f"a time such as '30 s', '10 min' or '1.5 h'; {value!r} means {duration}")
    return duration


def _limit_s(name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
    found = _time(name, value)
    if found is None and name == "start_timeout":
        raise wrong_type(name, value, "a time such as '30 min'")
    if found is not None and found.value < 1:
        raise wrong(name, value, "a time of at least '1 s'" + (", or None for no watch" if name == "timeout" else ""))
    return found


def _duration(name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
    try:
        return parse(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}={value!r}: {error}") from None


def _fast_dev_run(name: str, value: Any) -> bool | int:
    return value if isinstance(value, bool) else _FAST_INT(name, value)


_FAST_INT = an_int(0)


def _callbacks(name: str, value: Any) -> tuple[Any, ...]:
    items = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if isinstance(item, type):
            raise TypeError(f"{name} has the class {item.__name__}: give an object, {item.__name__}(...)")
        if isinstance(item, (str, bytes, int, float, dict, set)) or item is None:
            raise TypeError(f"{name} has {item!r} of type {type(item).__name__}: give a list of Callback objects")
    return items


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path) and not hasattr(value, "__fspath__"):
        raise wrong_type(name, value, "a path")
    if not str(value).strip():
        raise wrong(name, value, "a path; '.' is the current directory")
    if len(str(value).splitlines()) > 1:  # it would look like two lines of a log
        raise wrong(name, value, "a path without line ends")
    return Path(value).expanduser()


def _accelerator(name: str, value: Any) -> str:
    possible = " or ".join(map(repr, KNOWN)) + ", or a device that a package adds to torch, once it is imported"
    if not isinstance(value, str):
        raise wrong_type(name, value, possible)
    known = value.lower()
    if known not in KNOWN and not is_added(known):
        raise unknown(name, value, KNOWN, possible + hint(known))
    return known


_CHECKS: dict[str, Check] = {
    "strategy": strategy_setting,
    "accelerator": _accelerator,
    "devices": _devices,
    "num_nodes": an_int(1),
    "precision": precision_setting,
    "max_epochs": an_int(0, none="no limit of epochs"),
    "min_epochs": an_int(0, none="no minimum"),
    "max_steps": an_int(0, none="no limit of steps"),
    "min_steps": an_int(0, none="no minimum"),
    "max_time": _time,
    "accumulate_grad_batches": _accumulate,
    "global_batch_size": an_int(1, none="what the loader's batches give"),
    "gradient_clip_val": _clip,
    "gradient_clip_algorithm": a_choice("norm", "value"),
    "val_every": _interval,
    "num_sanity_val_steps": an_int(-1),
    "limit_train_batches": _limit,
    "limit_val_batches": _limit,
    "limit_test_batches": _limit,
    "limit_predict_batches": _limit,
    "overfit_batches": _overfit,
    "fast_dev_run": _fast_dev_run,
    "log_every_n_steps": an_int(0),
    "callbacks": _callbacks,
    "activation_checkpointing": recompute_setting,
    "compile": compile_setting,
    "sync_batchnorm": a_bool(),
    "deterministic": a_bool("warn"),
    "benchmark": a_bool(none="what torch is set to"),
    "matmul_precision": a_choice("highest", "high", "medium", none="what torch is set to"),
    "detect_anomaly": a_bool(),
    "seed": an_int(0, none="no seeding", most=2**32 - 1),
    "on_nonfinite": a_choice("raise", "skip", none="no check"),
    "timeout": _limit_s,
    "start_timeout": _limit_s,
    "check": a_bool(),
    "debug": a_bool(),
    "gc_every_n_steps": an_int(0),
    "reload_best": a_bool(),
    "root_dir": _path,
}
