"""The settings: every argument of ``Fit`` with its kind, default and meaning."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.config import combinations
from engine.config.duration import Duration
from engine.config.kinds import (
    Accelerator,
    BatchLimit,
    BatchSize,
    CallbackObjects,
    Compilation,
    Devices,
    Flag,
    FlagOrNumber,
    Folder,
    Interval,
    Kind,
    Maximum,
    Offloading,
    PrecisionName,
    Recomputation,
    RunName,
    Schedule,
    StrategyName,
    Time,
    WholeNumber,
    Word,
)
from engine.utils.errors import nearest

_ONE_EPOCH = Duration("epochs", 1)
_TEN_MINUTES, _HALF_HOUR = Duration("seconds", 600), Duration("seconds", 1800)


def setting(kind: Kind, default: Any) -> Any:
    """A field of :class:`Settings`. The docstring under the field is its documentation."""
    return field(default=default, metadata={"kind": kind})


# Fit.__init__ repeats names, types and texts, so that editors show them. After a change: python tests/tools/settings_text.py --write
@dataclass(frozen=True)
class Settings:
    """All arguments of ``Fit``, checked and normalized.

    Each field is a setting. Its kind checks and normalizes the value (durations become :class:`Duration`, precision names the library's own,
    ``callbacks`` a tuple, ``root_dir`` a ``Path``), and the docstring under the field is its documentation.

    Raises:
        ValueError, TypeError: a value is not possible; the message names the argument, the value and what is possible.
    """

    strategy: Any = setting(StrategyName(), "auto")
    """How the model is distributed over the ranks: ``"auto"``, ``"single"``, ``"ddp"``, ``"fsdp"``, ``"mesh"``, ``"deepspeed"`` or another registered
    name, ``{name: deepspeed, stage: 3}`` with its settings, or an :class:`engine.Strategy` object."""
    accelerator: str = setting(Accelerator(), "auto")
    """``"auto"``: the accelerator that ``torch.accelerator`` finds, else the CPU. ``"gpu"``: that accelerator, whatever its kind (an NPU too).
    Or a device by its name: ``"cpu"``, ``"cuda"`` (ROCm too), ``"mps"``, ``"xpu"``, ``"npu"``, ``"hpu"``, ``"mtia"``, or one that a package
    adds to torch."""
    devices: int | str | tuple[int, ...] = setting(Devices(), "auto")
    """Processes on this node, one device each: a number, the device indices (``[0, 2]`` or ``"0,2"``), or ``"auto"``: every GPU, or one process.
    ``run`` starts them unless a launcher has."""
    num_nodes: int = setting(WholeNumber(1), 1)
    """Nodes of the job."""
    precision: Any = setting(PrecisionName(), "32-true")
    """Number formats of the model and of its computations: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"fp8-mixed"``,
    ``"bf16-true"``, ``"16-true"``, ``"64-true"``, ``{name: fp8-mixed, recipe: rowwise}``, or an ``FP8`` or ``Precision`` object."""
    max_epochs: int | None = setting(WholeNumber(0, none="no limit of epochs"), None)
    """Stop after this many epochs. 1 when no other limit (``max_steps``, ``max_time``, ``max_duration``) is given."""
    min_epochs: int | None = setting(WholeNumber(0, none="no minimum"), None)
    """Epochs before which callbacks (early stopping), ``run.stop()`` and ``max_time`` do not end the training; an earlier request to stop takes
    effect then."""
    max_steps: int | None = setting(WholeNumber(0, none="no limit of steps"), None)
    """Stop after this many optimizer steps."""
    min_steps: int | None = setting(WholeNumber(0, none="no minimum"), None)
    """Optimizer steps before which callbacks, ``run.stop()`` and ``max_time`` do not end the training; with ``min_epochs`` both must be reached.
    Ctrl-C and SIGTERM end the training at any time."""
    max_time: Duration | None = setting(Time(none="no limit of time"), None)
    """Stop after this time: ``"10 min"``, ``"1.5 h"``, ``"DD:HH:MM:SS"`` or a ``timedelta``."""
    max_duration: Duration | None = setting(Interval("no such limit"), None)
    """Stop after this length in any unit: ``"2e9 tokens"``, ``"1e6 samples"``, ``"3 epochs"``, ``500`` steps, ``"10 min"``. Beside other limits
    the first one ends the training."""
    accumulate_grad_batches: int | dict[int, int] = setting(Schedule(), 1)
    """Micro-batches of one optimizer step, or a schedule ``{first epoch: micro-batches}`` (1 before its first epoch)."""
    global_batch_size: int | str | dict[int | str, int | str] | None = setting(BatchSize(), None)
    """Samples of one optimizer step over all ranks, or its tokens (``"524_288 tokens"``) where rows have one length; the window is derived from it,
    at any world size. Or a schedule ``{0: 256, "5e8 tokens": 512}``: each stage begins at the first step at or after its start."""
    gradient_clip_val: float | None = setting(Maximum(none="no clipping"), None)
    """Maximum gradient norm, or absolute value, after clipping; ``None`` or 0: no clipping."""
    gradient_clip_algorithm: str = setting(Word("norm", "value", "norm_per_parameter"), "norm")
    """``"norm"``: the global norm over all parameters and ranks. ``"value"``: each element on its own. ``"norm_per_parameter"``: the norm of each
    parameter's gradient, over all ranks."""
    val_every: Duration | None = setting(Interval(), _ONE_EPOCH)
    """How often to validate: ``"1 epochs"``, ``500`` steps, ``0.25`` of an epoch, ``"1e8 tokens"``, ``"10 min"``; ``None``: never."""
    num_sanity_val_steps: int = setting(WholeNumber(-1), 2)
    """Validation batches to try before training starts; 0: none, -1: all."""
    limit_train_batches: int | float | None = setting(BatchLimit(), None)
    """Micro-batches of an epoch on each rank: an int is a number (0: none), a float in (0, 1] a fraction, ``None`` all."""
    limit_val_batches: int | float | None = setting(BatchLimit(), None)
    """Batches of each validation loader on each rank, during training and in ``Fit.validate``: an int is a number (0 switches validation off), a
    float in (0, 1] a fraction, ``None`` all."""
    limit_test_batches: int | float | None = setting(BatchLimit(), None)
    """Batches of each loader of ``Fit.test`` on each rank: an int is a number (0 tests nothing), a float in (0, 1] a fraction, ``None`` all."""
    limit_predict_batches: int | float | None = setting(BatchLimit(), None)
    """Batches of each loader of ``Fit.predict`` on each rank: an int is a number (0 predicts nothing), a float in (0, 1] a fraction, ``None`` all."""
    overfit_batches: int | float = setting(BatchLimit(zero_is_all=True), 0)
    """Train on the same batches in every epoch, the first ones, unshuffled: an int is a number, a float in (0, 1] a fraction, 0 all. Validation is
    limited and unshuffled, too."""
    fast_dev_run: bool | int = setting(FlagOrNumber(), False)
    """Try everything on n batches (``True``: 1): one epoch, n batches of training and of validation, no sanity check."""
    log_every_n_steps: int = setting(WholeNumber(0), 50)
    """Optimizer steps between two log boundaries, at which metrics leave the device; the first and the last step are logged as well.
    0: never within an epoch."""
    callbacks: tuple[Any, ...] = setting(CallbackObjects(), ())
    """Callback objects, called in this order. Given in code only."""
    activation_checkpointing: str | int | None = setting(Recomputation(), None)
    """Recompute the model's repeated blocks in the backward pass instead of storing their results: ``"full"``, ``"selective"`` (results
    of matrix products and attention are kept), an int n (every n-th block only), or ``None``."""
    activation_offload: bool | str | int = setting(Offloading(), False)
    """Move what the forward pass saves for the backward pass to the host's pinned memory, and back ahead of its use. ``True``: all that is saved
    before the model's last repeated block; ``"blocks"``: only what repeated blocks save; an int n: only what the first n save."""
    compile: bool | str | dict[str, Any] = setting(Compilation(), False)
    """``torch.compile``: ``True`` for the whole model, ``"blocks"`` for each repeated block, or a dict of its options (with ``"blocks": True``)."""
    sync_batchnorm: bool = setting(Flag(), False)
    """Batch norms compute their statistics over the samples of all ranks, as one process would over the whole micro-batch."""
    deterministic: bool | str = setting(Flag("warn"), False)
    """``True``: only deterministic algorithms, others raise an error; ``"warn"``: others warn."""
    benchmark: bool | None = setting(Flag(none="what torch is set to"), None)
    """Whether cuDNN measures its algorithms for each new input shape and uses the fastest. ``None``: torch's setting; off if ``deterministic``."""
    matmul_precision: str | None = setting(Word("highest", "high", "medium", none="what torch is set to"), None)
    """How products of float32 matrices are computed during the run, as ``torch.set_float32_matmul_precision`` has it: ``"highest"`` in float32,
    ``"high"`` in TF32 (or pairs of bfloat16), ``"medium"`` in bfloat16, each where the device has it. ``None``: torch's setting."""
    detect_anomaly: bool = setting(Flag(), False)
    """Autograd checks every backward pass for NaN and shows the forward operation it comes from. Slow; for debugging."""
    seed: int | None = setting(WholeNumber(0, 2**32 - 1, none="no seeding"), None)
    """Seed of python, numpy and torch, and of the data order; 0 to 2**32 - 1. ``None`` seeds nothing. It is set when the run starts: to seed the
    first weights of a module that is created earlier, call ``seed_everything`` before."""
    on_nonfinite: str | None = setting(Word("raise", "skip", none="no check"), None)
    """The reaction to a step whose gradient norm is not finite: ``"raise"`` an error, ``"skip"`` the step, or ``None``: no check."""
    max_skipped_steps: int | None = setting(WholeNumber(1, none="no limit"), 100)
    """Maximum number of steps in a row that are skipped because a gradient is not finite: the last of them is an error, under fp16 once its loss
    scale is at most 1. ``None``: no limit. The first skipped step is reported; later ones are counted in the metric ``skipped_steps``."""
    timeout: Duration | None = setting(Time(1, none="no watch"), _TEN_MINUTES)
    """Maximum time without a finished batch, and for a collective, after the first step: several ranks then end with an error that names
    those that lag; a single process logs its position. ``None``: ``start_timeout`` applies throughout, without monitoring."""
    start_timeout: Duration = setting(Time(1), _HALF_HOUR)
    """Maximum time without a sign of life, and for a collective, until the first step, while processes connect, data is prepared and the model is
    compiled."""
    check: bool = setting(Flag(), False)
    """Compare the ranks before the first step: parameters, lengths of loaders, structure of the first batch, and that batches arrive unchanged."""
    debug: bool = setting(Flag(), False)
    """Compare operation, shapes and dtypes over the ranks before each collective: an error instead of a hang. Slow; for debugging."""
    gc_every_n_steps: int = setting(WholeNumber(0), 50)
    """Run Python's garbage collector at every n-th optimizer step, on all ranks at once, and not in between; 0: automatically, as Python does."""
    reload_best: bool = setting(Flag(), False)
    """After the training, load the weights of the best checkpoint, by the ``monitor`` of a ``ModelCheckpoint``, into the module."""
    root_dir: Path = setting(Folder(), Path("runs"))
    """Where checkpoints and logs are written. Without ``name``, the first run uses this folder, each later run a numbered folder in it."""
    name: str | None = setting(RunName(), None)
    """A name for the run, whose folder is ``root_dir/name``; a further run of this name has ``name_version_1``, and so on, beside it. ``"auto"``,
    ``"last"`` and ``"best"`` then mean the newest run of this name. If ranks have different names, rank 0's counts."""

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            object.__setattr__(self, name, kind.normalized(name, getattr(self, name)))
        combinations.check_settings(self)
        for name, value in combinations.implied(self).items():
            object.__setattr__(self, name, value)
        combinations.check_limits(self)

    def accumulate_at(self, epoch: int) -> int:
        """Micro-batches of one optimizer step in ``epoch`` (the first is 0)."""
        schedule = self.accumulate_grad_batches
        if isinstance(schedule, int):
            return schedule
        return next((schedule[first] for first in sorted(schedule, reverse=True) if first <= epoch), 1)


KINDS: dict[str, Kind] = {declared.name: declared.metadata["kind"] for declared in fields(Settings)}
"""Name of a setting -> its kind."""


def checked_setting(name: str, value: object) -> Any:
    """Check a ``value`` of the setting ``name``, for code that takes one setting alone, and return it normalized.

    Raises:
        ValueError, TypeError: as :class:`Settings`; also a ValueError for an unknown ``name``, which names the nearest one.
    """
    if name not in KINDS:
        raise ValueError(f"{name!r} is not a setting{nearest(name, KINDS)}; possible: {', '.join(KINDS)}")
    return KINDS[name].normalized(name, value)
