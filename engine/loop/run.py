"""``Run``: the state of one training, validation, test or prediction, for callbacks and loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from engine import strategies
from engine.callback import Callback
from engine.checkpoint.content import Content
from engine.checkpoint.manifest import FOLDERS, TRAINED
from engine.checkpoint.one_file import check_local
from engine.checkpoint.resume import Resume, opening
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.writer import CheckpointWriter, SaveRequest
from engine.config.duration import Every
from engine.config.hyperparameters import as_data, for_loggers
from engine.config.masked import Config, plain_value, sections_with_origins, with_origins
from engine.config.secret_text import without_secrets
from engine.config.settings import Settings
from engine.config.settings_file import as_yaml
from engine.data.loader import PreparedLoader
from engine.distributed.agreement import Agreement, Stopwatch
from engine.distributed.collectives import stack
from engine.engine import Engine
from engine.loop.clock import TrainingClock
from engine.loop.hooks import Hooks
from engine.loop.loaders import RunData, RunLoaders
from engine.loop.logbook import Logbook
from engine.loop.optimization import Optimization
from engine.loop.placed_module import PlacedModule
from engine.loop.run_checkpoints import RunCheckpoints
from engine.loop.run_snapshot import RunSnapshot
from engine.loop.state import BegunStage, Result, Tally, Times, TrainState, status_of
from engine.loop.stopping import STOP, StopControl
from engine.loop.timing import Intervals, Phases, checkpoint_phase
from engine.metrics import media
from engine.metrics.recorder import Recorder
from engine.module import TrainModule
from engine.prepared import raw
from engine.step.optimizers import OptimizerSet
from engine.step.schedules import Schedule
from engine.utils.errors import nearest
from engine.utils.extensions import run_attribute, with_advice
from engine.utils.garbage import Collector
from engine.utils.log import StartLog, logger, warn_once
from engine.utils.parameters import parameters_of
from engine.utils.text import terminal_text


class PendingSetUp:
    """The set-up of a training while the hooks that come before it are called: :class:`engine.loop.setup.TrainingSetUp`."""

    def complete(self) -> None:
        """Set up the training now, unless it is done."""
        raise NotImplementedError


@with_advice
class Run:
    """The run as callbacks see it. Treat plain attributes as read-only.

    :class:`engine.Fit` creates a run from its ``settings``, the ``engine``, the ``module``, the ``callbacks``, the ``stage``, the user's ``data``,
    the ``origins`` of the settings, the ``sections`` of ``fit run``, and the ``start_log`` of an attached terminal.
    """

    stage: str
    """``"fit"`` (including its validation), ``"sanity"`` (the check before training), ``"validate"``, ``"test"`` or ``"predict"``."""
    pulse = 0
    """The number of evaluation batches and saves so far, which the watchdog counts as progress like training batches."""
    over = False
    """Whether the training has ended."""
    optimization: Optimization | None = None
    """The object that processes each micro-batch and each accumulation window; in trainings only."""
    exception: BaseException | None = None
    batches_told: int | None = None
    """The batches that :attr:`total_steps` has told a module with ``automatic_optimization = False``; ``None``: it was not asked, or not known."""
    first_step = 0
    """The number of optimizer steps at the start of this training: those of the run that it resumes."""
    nonfinite: tuple[str, ...] = ()
    """Names of weights that were not finite at the training's end; see :attr:`engine.Result.nonfinite`."""
    _pending_set_up: PendingSetUp | None = None
    methods_of_steps: Mapping[str, Any] = MappingProxyType({})
    """By name, the methods of the module that the training's set-up has handed to the steps."""
    evaluating = False
    """Whether a validation, test or prediction is in progress, also within a training."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        module: TrainModule,
        callbacks: tuple[Callback, ...],
        stage: str,
        data: RunData,
        origins: Mapping[str, str],
        sections: Mapping[str, Any],
        start_log: StartLog,
    ) -> None:
        self.settings, self.engine, self.module = settings, engine, module
        self.callbacks, self.stage, self.datamodule = callbacks, stage, data.datamodule
        self._origins, self._sections, self.start_log = origins, sections, start_log
        self.state = TrainState()
        """The counters of the training; resuming changes this object in place."""
        if stage != "fit":
            self.state.step, self.state.epoch, self.state.samples = module._reached
        agreement = Agreement(engine.group, Stopwatch())
        self.times, self.items = Times(), Tally()
        """``times``: where the time was spent; ``items``: the sum of the counts of all :class:`engine.Loss` objects, over all ranks."""
        self.clock = TrainingClock(engine, self.state, self.items, settings.log_every_n_steps)
        """The samples and tokens that the training has read, for intervals, limits and schedules in these units."""
        self.control = StopControl(settings, self.state, agreement, self.clock)
        self.intervals = Intervals(settings)
        self.garbage, self.phases = Collector(), Phases()
        self.loaders = RunLoaders(engine, settings, module, data, stage)
        self.placed = PlacedModule(engine, module)
        self.optimizer_set = OptimizerSet()
        parts = engine.loss_group.world_size // engine.data_group.world_size
        self.logbook = Logbook(module, engine.recorder(on_step=True, on_epoch=False, parts=parts), self.intervals)
        self.checkpoints = RunCheckpoints(engine.checkpoint_writer, agreement)
        self.hooks = Hooks(callbacks, module, engine.checkpoint_writer, self.logbook)
        self.checkpoints.have_listeners = bool(self.hooks.on_checkpoint_saved or self.hooks.on_checkpoint_removed)
        self.snapshot = RunSnapshot(
            engine,
            module,
            callbacks,
            data.datamodule,
            self.state,
            self.loaders,
            self.optimizer_set,
            self.logbook,
            agreement.stopwatch,
            self.items,
            self.intervals,
            self.control,
        )
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self.warned: set[str] = set()
        """The warnings that this run has given already, or does not give: ``"nan"``, ``"endless"``, ``"nonfinite"``."""
        self.logs_itself = not any(callback.shows_progress for callback in callbacks)
        """Whether the run logs metrics itself, because no callback shows progress."""
        # Last, so that an error above leaves the module without a recorder.
        self.logbook.record_to(self.logbook.training)

    @property
    def loggers(self) -> list[Any]:
        """The callbacks that are loggers, in the order of the callbacks, or the objects for which they stand."""
        loggers = (callback for callback in self.callbacks if callback.is_logger)
        return [logger if logger.stands_for is None else logger.stands_for for logger in loggers]

    @cached_property
    def trainer(self) -> Any:
        """The run as an installed extension shows it (``engine.interop``: with the names of Lightning's ``Trainer``), or an object in its place."""
        return run_attribute(self, "trainer")

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps in the whole training, for schedules: exact, by ``max_epochs``, ``max_steps`` and
        ``max_duration``. With ``automatic_optimization = False`` it is the number of batches, for schedulers that step once per batch; where
        ``max_steps`` ends the training, :attr:`engine.TrainModule.steps_per_batch` says how many steps a batch has. Available from ``setup`` on,
        where all ranks read it together. ``None``: only time ends the training, or the loader has no length. An error where stages of
        ``global_batch_size`` begin at steps that are not known before, or :attr:`engine.TrainModule.steps_per_batch` is wrong."""
        if self.stage not in ("fit", "sanity"):
            return None
        control = self.control
        if self.module.automatic_optimization:
            return self.loaders.told_steps(control.max_epochs, control.max_steps, control.max_length)
        self.batches_told = self.loaders.total_batches(control.max_epochs, control.max_steps, control.max_length)
        return self.batches_told

    @cached_property
    def config(self) -> Config:
        """The settings as plain JSON values, for loggers and checkpoints: by name, ``value`` and ``origin``; secrets are ``"***"``."""
        engine = self.engine
        objects = strategies.describe_requested(self.settings, engine.precision, engine.strategy)
        settings = with_origins(self.settings, self._origins, objects)
        return settings | sections_with_origins(self._sections, self._origins)

    def config_as_yaml(self) -> str:
        """:attr:`config` in the form of ``fit.yaml``, each line with its origin."""
        return as_yaml(self.config)

    @property
    def folder(self) -> Path:
        """The run's folder: ``root_dir``, or a numbered folder in it."""
        self.checkpoints.run_folder.announce()
        return self.checkpoints.run_folder.path

    # -- data -------------------------------------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> PreparedLoader | None:
        """The training loader; ``None`` before it is prepared, and in other runs."""
        return self.loaders.train

    @property
    def val_loaders(self) -> list[PreparedLoader]:
        """The validation loaders of a training."""
        return self.loaders.validation

    @property
    def num_train_batches(self) -> int | None:
        """The number of this rank's micro-batches in a training epoch; ``None`` when the loader has no length."""
        return self.loaders.train_batches

    @property
    def num_eval_batches(self) -> list[int | None]:
        """This rank's number of micro-batches for each loader of the evaluation, or of the training's validation."""
        return self.loaders.eval_batches

    def window_at(self, epoch: int) -> int:
        """The number of micro-batches in an accumulation window of this ``epoch``."""
        return self.loaders.window_at(epoch)

    @property
    def val_every(self) -> Every:
        """The trigger that says when validation is due. A callback may replace this in ``setup``."""
        return self.intervals.validation

    @val_every.setter
    def val_every(self, every: Every) -> None:
        self.intervals.validation = every

    # -- tables -----------------------------------------------------------------------------------------------------------------

    def set_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put a table into the result of the run and its report, in the place of an earlier one of this ``name``.

        Args:
            rows: each a mapping of column -> text or number. Columns come in the order of their first row.
        """
        self._tables[name] = [dict(row) for row in rows]

    @property
    def tables(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The tables of :meth:`set_table`, by name."""
        return MappingProxyType(self._tables)

    @property
    def begun_stages(self) -> Sequence[BegunStage]:
        """The stages that have begun in this run: of ``global_batch_size``, of the lengths of :class:`engine.Packed` rows, and of the weights of a
        :class:`engine.Mixture` with indices; the first stages, with which a training begins, are not among them."""
        return self.loaders.stages.begun

    # -- progress and ranks -----------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The run's id, which a resumed run and evaluations of the run keep; available from ``setup`` on."""
        return self.checkpoints.run_folder.id

    @property
    def step(self) -> int:
        """The number of optimizer steps so far."""
        return self.state.step

    @property
    def epoch(self) -> int:
        """The index of the current epoch, from 0; after the training, the number of epochs that were started."""
        return self.state.epoch + (self.over and (self.state.epoch_done or self.state.batch_idx > 0))

    @property
    def epochs(self) -> Fraction | None:
        """The epochs trained so far, as a fraction counted in steps, or in samples if ``global_batch_size`` has stages; ``None`` when the loader
        has no length."""
        if not self.num_train_batches:
            return None
        sizes, train = self.loaders.batch_sizes, self.train_loader
        if sizes is not None and sizes.changes and train is not None and train.positions_of_pass:
            positions = train.positions_of_pass
            return self.epoch + Fraction(min(self.state.position, positions), positions)
        window = self.window_at(self.epoch)
        done, length = (-(-batches // window) for batches in (self.state.batch_idx, self.num_train_batches))
        return self.epoch + Fraction(min(done, length), length)

    @property
    def samples(self) -> int:
        """The number of samples trained on, over all ranks and epochs; those of complete windows."""
        return self.state.samples

    @property
    def tokens(self) -> float | None:
        """The sum of ``count`` over all :class:`engine.Loss` objects in complete windows, on all ranks; ``None`` for scalar losses. If several
        optimizers step by themselves, only losses of the first one count. Waits for the device if the counts are tensors."""
        return self.items.total()

    @property
    def example_batch(self) -> Any:
        """The first batch of the training, or of an evaluation's first loader, on the device; ``None`` for a stream. Reading it takes nothing from
        the run's data. All ranks read it together the first time, in ``on_fit_start`` or at an evaluation's start."""
        return self.loaders.first_batch()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that module and data module have saved for loggers (``save_hyperparameters``), as JSON values without secrets."""
        values: dict[str, Any] = without_secrets(
            plain_value(as_data({**for_loggers(self.datamodule), **for_loggers(self.module)}))
        )
        return values

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.engine.process_index

    @property
    def local_rank(self) -> int:
        """This process's rank among the processes of its machine."""
        return self.engine.local_process_index

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.engine.num_processes

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0."""
        return self.engine.is_main_process

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.engine.device

    @property
    def validated_step(self) -> int:
        """The step at which validation ran last; -1: it has not run."""
        return self.state.validated_step

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, including those before a resume; with several ranks, the value on which they agreed last."""
        return self.control.elapsed_s

    @contextmanager
    def in_sanity_check(self) -> Iterator[None]:
        """Inside the block :attr:`stage` is ``"sanity"``."""
        self.stage = "sanity"
        try:
            yield
        finally:  # also after an error: setup and teardown must get the same stage
            self.stage = "fit"

    # -- stopping ---------------------------------------------------------------------------------------------------------------

    def stop(self, reason: str = "asked to stop", level: int = STOP) -> None:
        """Stop the training after this step, but not before ``min_epochs`` and ``min_steps``. Several ranks stop at the next step at which they
        agree (about 0.5 s later).

        Args:
            reason: the text for ``Result.stop_reason``.
            level: the urgency of the request; those of signals stop a training before its minimum.
        """
        self.control.ask(reason, level)

    def withdraw_stop(self, reason: str) -> None:
        """Withdraw this rank's request to stop with this ``reason``, while it waits for ``min_epochs`` and ``min_steps``."""
        self.control.withdraw(reason)

    @property
    def waiting_stops(self) -> tuple[str, ...]:
        """The reasons of this rank's requests to stop that wait for ``min_epochs`` and ``min_steps``. Checkpoints have them, so that a resumed run
        stops there too."""
        return tuple(self.control.waiting)

    @property
    def may_stop(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached."""
        return self.control.may_stop

    @property
    def stopping(self) -> bool:
        """Whether the training is going to stop, or this rank has asked to stop."""
        return bool(self.control.reason) or self.control.request is not None

    @property
    def stop_request(self) -> str | None:
        """The reason for which this rank has asked to stop, on which the ranks then agree; ``None``: it has not asked."""
        return self.control.request

    @property
    def stop_reason(self) -> str:
        """The reason why the training ended or is about to end, as text; empty while it goes on."""
        return self.control.reason

    @property
    def max_steps(self) -> int | None:
        """The number of optimizer steps at which the training ends; ``None``: no such limit."""
        return self.control.max_steps

    @property
    def max_epochs(self) -> int | None:
        """The number of epochs at which the training ends; ``None``: no such limit."""
        return self.control.max_epochs

    def set_limit(self, name: str, value: int | None) -> None:
        """Set the limit ``name`` of the training (``"max_epochs"`` or ``"max_steps"``) to ``value``; ``None``: no limit. All ranks call this."""
        self.control.set_limit(name, value)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed, on any rank."""
        return self.control.interrupted

    @property
    def terminated(self) -> bool:
        """Whether any rank has got SIGTERM."""
        return self.control.terminated

    @property
    def preempted(self) -> bool:
        """Whether the ranks have agreed to end early because of Ctrl-C or SIGTERM."""
        return self.control.preempted

    # -- steps ------------------------------------------------------------------------------------------------------------------

    @property
    def training_step(self) -> Callable[..., Any]:
        """The module's own ``training_step``; call it with a batch and the batch's index."""
        return self.placed.training_step

    @property
    def call(self) -> Callable[..., Any]:
        """:attr:`training_step`, called through the strategy's wrapper if there is one."""
        return self.placed.call

    @property
    def stepping(self) -> bool:
        """Whether an optimizer step is in progress, so that the state is not consistent and cannot be saved."""
        return self.optimization is not None and self.optimization.stepping

    @property
    def optimizers(self) -> list[Any]:
        """The prepared optimizers; empty before the training's setup, which the module's ``on_load_checkpoint`` completes by asking for them."""
        if self._pending_set_up is not None:
            self._pending_set_up.complete()
        return self.optimizer_set.optimizers

    @contextmanager
    def before_set_up(self, set_up: PendingSetUp) -> Iterator[None]:
        """Inside the block, hooks are called that come before the training's ``set_up``; one that asks for :attr:`optimizers` completes it."""
        self._pending_set_up = set_up
        try:
            yield
        finally:
            self._pending_set_up = None

    @property
    def schedulers(self) -> list[Schedule]:
        """The learning rate schedulers, each with its interval, frequency and monitor."""
        return self.optimizer_set.schedules

    def begin_optimization(self, optimization: Optimization, methods_of_steps: Mapping[str, Any]) -> None:
        """Process micro-batches by ``optimization`` from now on, whose steps call these methods of the module."""
        self.optimization, self.methods_of_steps = optimization, methods_of_steps

    def set_optimizers(self, optimizers: list[Any], schedules: list[Schedule], automatic: bool) -> None:
        """Use these prepared ``optimizers`` and ``schedules``. Without ``automatic`` optimization the module steps the schedulers."""
        self.optimizer_set.fill(optimizers, schedules, automatic)

    # -- logging ----------------------------------------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder:
        """The recorder that the module currently logs to."""
        return self.logbook.recorder

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of every logged name; a name logged ``on_step`` and ``on_epoch`` also has its epoch value without a suffix."""
        return self.logbook.metrics

    @property
    def progress(self) -> dict[str, float]:
        """The entries of :attr:`metrics` that were logged with ``prog_bar=True``."""
        return self.logbook.progress

    @property
    def withheld(self) -> frozenset[str]:
        """Names logged with ``logger=False`` among the latest values: callbacks get them in ``on_log``, loggers do not."""
        return self.logbook.withheld

    @property
    def values_are_partial(self) -> bool:
        """Whether the values that callbacks get in ``on_log`` now are those of an epoch that was cut off. The run that resumes it logs those of the
        whole epoch."""
        return self.logbook.is_partial

    def record_to(self, recorder: Recorder) -> None:
        """Send what the module logs to ``recorder`` from now on."""
        self.logbook.record_to(recorder)

    def latest_metrics(self) -> dict[str, float]:
        """:attr:`metrics`, updated with each training value of the latest step that logged it, over all ranks, also between log boundaries. A name
        logged ``on_step`` and ``on_epoch`` also has its step value without a suffix. A collective; waits for the device."""
        return self.logbook.latest()

    def begin(self) -> None:
        """Start or resume the training: intervals continue, and the values of the last step are not published again."""
        if not self.logs_itself:  # from here on a progress bar uses the terminal
            self.start_log.close()
        self.first_step = self.step
        self.logbook.begin(self.step)
        self.control.below_min_steps = self.step < (self.settings.min_steps or 0)
        self.clock.begin()
        if (length := self.control.max_length) is not None:
            if length.unit != "epochs":
                self.clock.follow(f"max_duration={str(length)!r}", length.unit)
            elif self.epochs is None:
                raise ValueError(
                    f"max_duration={str(length)!r}: the length of an epoch is unknown, because {type(self.loaders.training().loader).__name__} has "
                    "none: give whole epochs, steps or samples"
                )
        self.intervals.validation.follow(self.clock, "val_every")
        sizes = self.loaders.batch_sizes
        if sizes is not None and sizes.changes and sizes.unit in ("samples", "tokens"):
            self.clock.follow(f"global_batch_size={self.settings.global_batch_size}", sizes.unit, before_steps=True)
        rows = self.loaders.row_lengths
        if rows is not None and rows.unit in ("samples", "tokens"):
            self.clock.follow(f"Packed(length={rows})", rows.unit, before_steps=True)
        for schedule in self.optimizer_set.counted_schedules:
            what = f"the interval {schedule.interval!r} of {type(schedule.scheduler).__name__}"
            self.clock.follow(what, schedule.interval, before_steps=True)
        self.intervals.start(self.step, self.epochs)

    def follow_clock(self) -> None:
        """Set the learning rates that follow the number of samples or tokens, after each window."""
        for schedule in self.optimizer_set.counted_schedules:
            count = self.state.samples if schedule.interval == "samples" else int(self.state.clock_tokens)
            schedule.advance(self.logbook.metrics, count)

    def publish_due(self) -> bool:
        """Publish the values of the latest step if they are due; return whether they were."""
        due = self.logbook.due(self.state.step)
        if due:
            self._publish_step(self.logbook.training.window)
        return due

    def publish_last(self) -> None:
        """Publish the values of the step that ended the training, unless they were published already."""
        self._publish_step(self.logbook.training.window - 1)

    def _publish_step(self, window: int) -> None:
        logbook, step = self.logbook, self.state.step
        if step != logbook.published_step and self.settings.log_every_n_steps:
            logbook.published_step = step
            values = logbook.training.step_values(window)
            if skipped := self.engine.skips.count:
                values["skipped_steps"] = float(skipped)
            self.publish(values, logbook.training, window)

    def publish(self, values: dict[str, float], recorder: Recorder, window: int | None = None) -> None:
        """Pass the reduced ``values`` of ``recorder`` to the callbacks, the progress bar and :attr:`metrics`.

        ``window``: the window of the step that the values belong to; ``None``: they are an epoch's or an evaluation's.
        """
        logbook = self.logbook
        logbook.note(values, window)
        for hook in self.hooks.on_before_log:
            hook(self, self.module, values, self.state.step)
        if not values:
            return
        logbook.take_over(values, recorder, in_training=not self.evaluating)
        for hook in self.hooks.on_log:
            hook(self, self.module, values, self.state.step)
        if self.logs_itself and self.is_main_process and logger.isEnabledFor(logging.INFO):
            logger.info(
                "epoch %d step %d: %s",
                self.epoch,
                self.step,
                ", ".join(
                    f"{terminal_text(name, one_line=True)}={value:.4g}"
                    for name, value in values.items()
                    if name not in logbook.withheld
                ),
            )

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    @property
    def best_checkpoint(self) -> Path | str | None:
        """The checkpoint with the best score, as set by a callback."""
        return self.checkpoints.best

    @best_checkpoint.setter
    def best_checkpoint(self, path: Path | str | None) -> None:
        self.checkpoints.best = path

    @property
    def last_checkpoint(self) -> Path | str | None:
        """The latest saved checkpoint, as set by a callback, or the one that the run resumed from."""
        return self.checkpoints.last

    @last_checkpoint.setter
    def last_checkpoint(self, path: Path | str | None) -> None:
        self.checkpoints.last = path

    @property
    def loaded_from(self) -> Path | str | None:
        """The checkpoint that this run resumed from or loaded weights from."""
        return self.checkpoints.loaded_from

    @property
    def saver(self) -> CheckpointWriter:
        """Writes the run's checkpoints; call its ``hold()`` before you change weights outside of an optimizer step."""
        return self.engine.checkpoint_writer

    def checkpoints_at(self, root: str | Path | None, max_failures: int = 1) -> None:
        """Save checkpoints in ``root``, a directory or a URL that fsspec supports, instead of the folder ``checkpoints`` of the run. If another run
        uses ``root``, they go to a numbered folder in it. All ranks call this together, in ``setup``. Several callbacks may choose several places:
        the run resumes from the checkpoint that was written last in any of them.

        Args:
            root: the ``checkpoints_in`` of the calling callback.
            max_failures: the number of consecutive failures of asynchronous saves that is an error.
        """
        self.checkpoints.choose(root, max_failures)

    def checkpoint_path(self, name: str) -> Path | str:
        """The path of the checkpoint called ``name``."""
        return self.checkpoints.path(name)

    @property
    def continues_in_place(self) -> bool:
        """Whether the run has resumed from a checkpoint in its own checkpoint folder."""
        return self.checkpoints.continue_in_place

    def checkpoint_names(self) -> set[str]:
        """The names of the complete checkpoints in the run's checkpoint folder, as rank 0 sees them; all ranks call this together."""
        return self.checkpoints.names(self.checkpoints.folder)

    def save_checkpoint(
        self,
        name: str | None = None,
        *,
        score: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        tolerant: bool = False,
        remove: Sequence[str] = (),
        folder: CheckpointFolder | None = None,
    ) -> Path | str:
        """Save everything that the run needs to continue; all ranks call this together. If the current position was saved already, save nothing.

        Before that, steps whose verdict is pending are settled, ``on_checkpoint_saved`` is called for the checkpoint before, and values that
        are due are published (``on_log``).

        Args:
            name: the name of the checkpoint folder; by default ``step=00000120``.
            score: ``{"monitor": name, "mode": "min", "value": number}``: what ``resume="best"`` compares.
            asynchronous: return as soon as the training may continue; see :meth:`wait_for_checkpoint`.
            tolerant: only log a failed write, unless it is the last of ``max_failures`` in a row (:meth:`checkpoints_at`).
            remove: names of checkpoints to delete when this one is complete.
            folder: one of the run's checkpoint folders, by default the main one.

        Returns:
            The path of the checkpoint.

        Raises:
            TypeError: a value cannot be stored; the message says where in the state it is.
            OSError: the checkpoint cannot be written (and neither ``asynchronous`` nor ``tolerant``).
        """
        with checkpoint_phase(self.phases, self.times):
            checkpoints, state = self.checkpoints, self.state
            folder = folder or checkpoints.folder
            checkpoints.run_folder.announce()
            if checkpoints.training_began:
                self.finish_checkpoints()  # on_checkpoint_saved must come before this save may remove that checkpoint
            self.engine.settle()
            if not state.in_window and self.logbook.published_step >= 0 and not (self.over or self.exception):
                self.publish_due()  # a run that resumes here will not publish this step again
            if (saved_name := checkpoints.saved_as(state, name, folder)) is not None:
                folder.remove_later(remove)
                return folder.storage.path(saved_name)
            usual_name = f"step={state.step:08d}"
            request = SaveRequest(usual_name if name is None else name, score, asynchronous, tolerant, remove)
            with self.optimizer_set.modes.evaluating():
                content = self.checkpoint_content(score)
                # If this run is killed before it removes them, the run that resumes from here does.
                content.shared["postponed"] = [*folder.to_remove, *remove]
                path = checkpoints.save(request, content, state, folder)
            if asynchronous:
                self.engine.before_step(self.saver.before_step)
            self.pulse += 1
            return path

    def checkpoint_content(self, score: Mapping[str, Any] | None = None) -> Content:
        """Collect what this rank contributes to a checkpoint now, including what hooks add; ``score``: as in :meth:`save_checkpoint`."""
        shared = self.snapshot.shared()
        shared["postponed"] = list(self.checkpoints.folder.to_remove)
        if self.hooks.on_save_checkpoint:
            entries = self.snapshot.entries({})
            for hook in self.hooks.on_save_checkpoint:
                hook(self, self.module, entries)
            shared["user"] = dict(entries)
        return self.snapshot.content(shared, self.other_weights(), score, self.config)

    def other_weights(self) -> dict[str, dict[str, Any]]:
        """The weights that callbacks keep in addition to the parameters, by name; see :meth:`engine.Callback.other_weights`.

        Raises:
            ValueError: two callbacks use the same name, or a name is not allowed.
        """
        collected: dict[str, dict[str, Any]] = {}
        for callback in self.callbacks:
            for name, weights in callback.other_weights(self, self.module).items():
                if name in collected or name == TRAINED or not name or "/" in name:
                    why = (
                        "another callback has weights of this name"
                        if name in collected
                        else "a name is text without '/'"
                    )
                    why = "this is the name of the trained weights" if name == TRAINED else why
                    raise ValueError(
                        f"{type(callback).__name__} has the weights {name!r}: {why}; give them another name"
                    )
                collected[name] = weights
        return collected

    def wait_for_checkpoint(self) -> set[str]:
        """Wait until the checkpoint in progress is complete; all ranks call this together.

        Returns:
            The names of the checkpoints that could not be written.

        Raises:
            RuntimeError: too many consecutive writes failed.
        """
        with checkpoint_phase(self.phases, self.times):
            self.checkpoints.wait()
            self.pulse += 1
            return set().union(*(folder.lost for folder in self.checkpoints.folders))

    def announce_checkpoints(self) -> None:
        """Call the hooks for checkpoints that the main process has completed or deleted since the last call; all ranks call this together."""
        for event, path, score in self.checkpoints.take_events():
            if event == "saved":
                for hook in self.hooks.on_checkpoint_saved:
                    hook(self, self.module, path, score)
            else:
                for hook in self.hooks.on_checkpoint_removed:
                    hook(self, self.module, path)

    def finish_checkpoints(self) -> None:
        """Wait for the checkpoint in progress and call the hooks, if anything listens for checkpoint events. All ranks call this together."""
        if self.checkpoints.have_listeners:
            self.wait_for_checkpoint()
            self.announce_checkpoints()

    def save_checkpoint_at(self, where: Path | str, *, one_file: bool = False) -> Path | str:
        """Save a checkpoint at ``where``, a path or a URL. A mere name, or a path in the run's checkpoint folder, makes it one of the run's
        checkpoints, as :meth:`save_checkpoint` does; elsewhere the run does not resume from it or delete it by itself.

        Args:
            one_file: write one file, a zip of the folder, at a local path. Everything that takes a checkpoint can read it.

        Raises:
            ValueError: ``one_file`` at a URL.
        """
        if one_file:
            check_local(where)
        else:
            storage, name = split_path(where)
            if str(where) == name or storage.is_same(self.checkpoints.folder.storage):
                return self.save_checkpoint(name)
        self.engine.settle()
        with self.phases.timed("checkpoint"), self.optimizer_set.modes.evaluating():
            return self.checkpoints.save_at(where, self.checkpoint_content(), one_file=one_file)

    def remove_checkpoint(self, path: Path | str) -> None:
        """Delete the checkpoint at ``path``. Any rank may call this; only the main process deletes."""
        storage, name = split_path(path)
        folders = [folder for folder in self.checkpoints.folders if folder.storage.is_same(storage)]
        (folders or [self.checkpoints.folder])[0].remove([name])

    def roll_back(self, path: Path | str) -> None:
        """Restore weights, optimizers and schedulers from the checkpoint at ``path`` during a training; counters, data position and random number
        states stay as they are. The hooks of loaded checkpoints are not called: they may build layers, which optimizers would not have."""
        with opening(self.engine.group, *self.checkpoints.run_folder.source(str(path)), FOLDERS) as loaded:
            self.saver.before_roll_back()
            self.snapshot.load_weights(loaded, loaded.source, True)
            self.snapshot.restore_optimizers(loaded, Resume(path))

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Wait for a checkpoint in progress, then release the loaders with their worker processes, the engine and the model's wrapper."""
        try:
            self.checkpoints.close(self.exception is not None)
        finally:
            self._release()

    def _release(self) -> None:
        self.logbook.recorder.close()
        self.engine.release()
        self.placed.release()
        self.loaders.close()
        # The last object that refers back to the run: without cycles, weights and optimizer states are freed with their last reference.
        vars(self).pop("optimization", None)

    # -- manual optimization ----------------------------------------------------------------------------------------------------

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Implements ``module.manual_backward`` of ``loss``."""
        for hook in self.hooks.on_before_backward:
            hook(self, self.module, loss)
        backward = self.engine.backward if self.optimization is None else self.optimization.backward_pass
        self.phases.named("backward", backward)(loss, *args, **kwargs)
        for hook in self.hooks.on_after_backward:
            hook(self, self.module)

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        """Implements ``module.clip_gradients`` of ``optimizer`` with ``value`` and ``algorithm``; ``None``: as in the settings.

        Raises:
            ValueError: ``algorithm`` is unknown.
        """
        value = self.settings.gradient_clip_val if value is None else value
        algorithm = self.settings.gradient_clip_algorithm if algorithm is None else algorithm
        clippers: dict[str, Callable[..., Any]] = {
            "norm": self.engine.clip_grad_norm_,
            "value": self.engine.clip_grad_value_,
            "norm_per_parameter": self.engine.clip_grad_norm_per_parameter_,
        }
        if algorithm not in clippers:
            raise ValueError(
                f"gradient_clip_algorithm={algorithm!r} is unknown{nearest(algorithm, clippers)}; possible: {', '.join(map(repr, clippers))}"
            )
        if not value:
            return
        if not self.module.automatic_optimization:
            optimizer.readable()
        clippers[algorithm](parameters_of([raw(optimizer)]), value)

    # -- other calls of the module ----------------------------------------------------------------------------------------------

    def log_media(self, kind: str, name: str, value: Any, **options: Any) -> None:
        """Implements the module's ``log_<kind>(name, value, **options)``, for a ``kind`` of :data:`engine.metrics.media.KINDS`: pass ``value`` to
        each callback that takes this kind, on the main process.

        Raises:
            TypeError, ValueError: ``value`` is not of this kind; raised on every rank.
        """
        medium = media.as_medium(kind, name, value, **options)
        if not any(kind in callback.takes for callback in self.callbacks):
            warn_once(f"log_{kind}: no logger of this run takes it; {name!r} and others of this kind are left out")
        elif self.is_main_process and self.stage != "sanity":  # a sanity check logs no numbers either
            for hook in self.hooks.on_media:
                hook(self, self.module, kind, name, medium, options)

    def all_gather(self, data: Any, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Implements ``module.all_gather``: stack the tensors and numbers in ``data`` over all ranks; ``sync_grads``: keep the autograd graph.

        Raises:
            ValueError: ``group`` has only some of the ranks, or some rank has no batch in this step of an evaluation.
        """
        self.check_all_evaluate("all_gather()")
        if group is not None and group.size() != self.world_size:
            raise ValueError(
                f"all_gather(group=...) is a group of {group.size()} rank(s), but values are gathered over all {self.world_size}: leave it out, "
                "or call torch.distributed.all_gather with it"
            )
        return stack(self.engine.group, _numbers_as_tensors(data, self.device), sync_grads)

    def check_all_evaluate(self, call: str) -> None:
        """Check that every rank has a batch in this step of an evaluation, so that all of them reach ``call``.

        Raises:
            ValueError: some rank has none.
        """
        is_in_step = self.evaluating and self.logbook.recorder.batch is not None
        if is_in_step and self.engine.window.position.share.repeats:
            raise ValueError(
                f"{call} in a step of an evaluation: the number of batches does not divide by {self.world_size} ranks, so some rank has no batch "
                "now and would not take part: log the value, which is over all ranks, call it in on_validation_epoch_end or its like, or let "
                "the batches divide (drop_last, limit_val_batches)"
            )

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def result(self, best_weights: str | None = None) -> Result:
        """Create the result that ``Fit.run`` returns. ``best_weights``: see :attr:`engine.Result.best_weights`."""
        status, epochs = status_of(self.stop_reason), self.state.finished_epochs
        end, times, metrics = "interrupted" if self.interrupted else status, self.times, dict(self.logbook.metrics)
        times.other = max(0.0, self.control.stopwatch.seconds_here() - times.compute - times.apart)
        best, last, folder = self.checkpoints.best, self.checkpoints.last, self.checkpoints.run_folder.path
        skipped, nonfinite = self.engine.skips.count, self.nonfinite
        return Result(
            end,
            self.stop_reason,
            epochs,
            self.step,
            metrics,
            best,
            last,
            times,
            folder,
            best_weights,
            skipped,
            nonfinite,
            {name: [dict(row) for row in rows] for name, rows in self._tables.items()},
        )


def _numbers_as_tensors(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with its numbers replaced by tensors."""
    if isinstance(tree, (bool, int, float)):
        return torch.tensor(tree, device=device)
    if type(tree) in (list, tuple):
        return type(tree)(_numbers_as_tensors(item, device) for item in tree)
    return {key: _numbers_as_tensors(item, device) for key, item in tree.items()} if type(tree) is dict else tree
