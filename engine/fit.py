"""``Fit``: runs the training loop for you."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from operator import is_not
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import nn

from engine import strategies
from engine.callback import Callback, adapted_callbacks, affecting_steps
from engine.checkpoint.resume import Resume
from engine.checkpoint.run_folder import Trained
from engine.config.duration import LONGEST, Duration
from engine.config.resolve import UNSET, Resolved, resolve, with_real_defaults_in_help
from engine.config.settings import Settings, checked_setting
from engine.data.datamodule import DataModule
from engine.distributed import failures
from engine.distributed.environments import detect
from engine.launch.script_ranks import joined_group
from engine.loop.evaluate import call_hooks, evaluate, predict, sanity_check
from engine.loop.late_methods import take_late_methods
from engine.loop.lifecycle import collecting_garbage, in_folder, log_start, session, watched
from engine.loop.loaders import RunData
from engine.loop.out_of_memory import noting_what_finds_a_fit
from engine.loop.placed_module import holding
from engine.loop.rank_checks import compare_models, compare_ranks, compare_settings, watch_differences
from engine.loop.replay import LeftOut, ReplayedStep, StepWatch, starting_point
from engine.loop.run import Run
from engine.loop.run_resume import loading_weights, reload_best, resuming
from engine.loop.setup import TrainingSetUp, call_setup_hooks, new_run, set_up_evaluation
from engine.loop.state import Result
from engine.loop.train import call_epoch_hooks, train
from engine.module import TrainModule
from engine.step.precision import Precision
from engine.strategies.adopted_shards import saved_as_whole
from engine.strategies.base import Strategy
from engine.transforms.float8 import FP8
from engine.utils.extensions import adapt, call_error, with_advice
from engine.utils.log import StartLog

if TYPE_CHECKING:  # importing these takes a second
    from engine.planning.device_table import Hardware
    from engine.planning.plan import Plan
    from engine.planning.search import PlanSearch


# Written from the fields of Settings by tests/tools/settings_text.py --write: the text of Args, and the arguments of __init__.
@with_advice
class Fit:
    """Trains, validates, tests and predicts with a :class:`engine.TrainModule`.

    Every argument may also come from the environment (``FIT_PRECISION=bf16-mixed``) or a YAML file (``fit.yaml``, or the one that
    ``FIT_CONFIG`` names); code wins over the environment, and the environment over the file. The arguments are the
    fields of :class:`engine.Settings`.

    Args:
        strategy: How the model is distributed over the ranks: ``"auto"``, ``"single"``, ``"ddp"``, ``"fsdp"``, ``"mesh"``, ``"deepspeed"``
            or another registered name, ``{name: deepspeed, stage: 3}`` with its settings, or an :class:`engine.Strategy` object.
        accelerator: ``"auto"``: the accelerator that ``torch.accelerator`` finds, else the CPU. ``"gpu"``: that accelerator, whatever its
            kind (an NPU too). Or a device by its name: ``"cpu"``, ``"cuda"`` (ROCm too), ``"mps"``, ``"xpu"``, ``"npu"``, ``"hpu"``,
            ``"mtia"``, or one that a package adds to torch.
        devices: Processes on this node, one device each: a number, the device indices (``[0, 2]`` or ``"0,2"``), or ``"auto"``: every GPU,
            or one process. ``run`` starts them unless a launcher has.
        num_nodes: Nodes of the job.
        precision: Number formats of the model and of its computations: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"fp8-mixed"``,
            ``"bf16-true"``, ``"16-true"``, ``"64-true"``, ``{name: fp8-mixed, recipe: rowwise}``, or an ``FP8`` or ``Precision`` object.
        max_epochs: Stop after this many epochs. 1 when no other limit (``max_steps``, ``max_time``, ``max_duration``) is given.
        min_epochs: Epochs before which callbacks (early stopping), ``run.stop()`` and ``max_time`` do not end the training; an earlier
            request to stop takes effect then.
        max_steps: Stop after this many optimizer steps.
        min_steps: Optimizer steps before which callbacks, ``run.stop()`` and ``max_time`` do not end the training; with ``min_epochs`` both
            must be reached. Ctrl-C and SIGTERM end the training at any time.
        max_time: Stop after this time: ``"10 min"``, ``"1.5 h"``, ``"DD:HH:MM:SS"`` or a ``timedelta``.
        max_duration: Stop after this length in any unit: ``"2e9 tokens"``, ``"1e6 samples"``, ``"3 epochs"``, ``500`` steps, ``"10 min"``.
            Beside other limits the first one ends the training.
        accumulate_grad_batches: Micro-batches of one optimizer step, or a schedule ``{first epoch: micro-batches}`` (1 before its first
            epoch).
        global_batch_size: Samples of one optimizer step over all ranks, or its tokens (``"524_288 tokens"``) where rows have one length;
            the window is derived from it, at any world size. Or a schedule ``{0: 256, "5e8 tokens": 512}``: each stage begins at the first
            step at or after its start.
        gradient_clip_val: Maximum gradient norm, or absolute value, after clipping; ``None`` or 0: no clipping.
        gradient_clip_algorithm: ``"norm"``: the global norm over all parameters and ranks. ``"value"``: each element on its own.
            ``"norm_per_parameter"``: the norm of each parameter's gradient, over all ranks.
        val_every: How often to validate: ``"1 epochs"``, ``500`` steps, ``0.25`` of an epoch, ``"1e8 tokens"``, ``"10 min"``; ``None``:
            never.
        num_sanity_val_steps: Validation batches to try before training starts; 0: none, -1: all.
        limit_train_batches: Micro-batches of an epoch on each rank: an int is a number (0: none), a float in (0, 1] a fraction, ``None``
            all.
        limit_val_batches: Batches of each validation loader on each rank, during training and in ``Fit.validate``: an int is a number (0
            switches validation off), a float in (0, 1] a fraction, ``None`` all.
        limit_test_batches: Batches of each loader of ``Fit.test`` on each rank: an int is a number (0 tests nothing), a float in (0, 1] a
            fraction, ``None`` all.
        limit_predict_batches: Batches of each loader of ``Fit.predict`` on each rank: an int is a number (0 predicts nothing), a float in
            (0, 1] a fraction, ``None`` all.
        overfit_batches: Train on the same batches in every epoch, the first ones, unshuffled: an int is a number, a float in (0, 1] a
            fraction, 0 all. Validation is limited and unshuffled, too.
        fast_dev_run: Try everything on n batches (``True``: 1): one epoch, n batches of training and of validation, no sanity check.
        log_every_n_steps: Optimizer steps between two log boundaries, at which metrics leave the device; the first and the last step are
            logged as well. 0: never within an epoch.
        callbacks: Callback objects, called in this order. Given in code only.
        activation_checkpointing: Recompute the model's repeated blocks in the backward pass instead of storing their results: ``"full"``,
            ``"selective"`` (results of matrix products and attention are kept), an int n (every n-th block only), or ``None``.
        activation_offload: Move what the forward pass saves for the backward pass to the host's pinned memory, and back ahead of its use.
            ``True``: all that is saved before the model's last repeated block; ``"blocks"``: only what repeated blocks save; an int n: only
            what the first n save.
        compile: ``torch.compile``: ``True`` for the whole model, ``"blocks"`` for each repeated block, or a dict of its options (with
            ``"blocks": True``).
        sync_batchnorm: Batch norms compute their statistics over the samples of all ranks, as one process would over the whole micro-batch.
        deterministic: ``True``: only deterministic algorithms, others raise an error; ``"warn"``: others warn.
        benchmark: Whether cuDNN measures its algorithms for each new input shape and uses the fastest. ``None``: torch's setting; off if
            ``deterministic``.
        matmul_precision: How products of float32 matrices are computed during the run, as ``torch.set_float32_matmul_precision`` has it:
            ``"highest"`` in float32, ``"high"`` in TF32 (or pairs of bfloat16), ``"medium"`` in bfloat16, each where the device has it.
            ``None``: torch's setting.
        detect_anomaly: Autograd checks every backward pass for NaN and shows the forward operation it comes from. Slow; for debugging.
        seed: Seed of python, numpy and torch, and of the data order; 0 to 2**32 - 1. ``None`` seeds nothing. It is set when the run starts:
            to seed the first weights of a module that is created earlier, call ``seed_everything`` before.
        on_nonfinite: The reaction to a step whose gradient norm is not finite: ``"raise"`` an error, ``"skip"`` the step, or ``None``: no
            check.
        max_skipped_steps: Maximum number of steps in a row that are skipped because a gradient is not finite: the last of them is an error,
            under fp16 once its loss scale is at most 1. ``None``: no limit. The first skipped step is reported; later ones are counted in
            the metric ``skipped_steps``.
        timeout: Maximum time without a finished batch, and for a collective, after the first step: several ranks then end with an error
            that names those that lag; a single process logs its position. ``None``: ``start_timeout`` applies throughout, without
            monitoring.
        start_timeout: Maximum time without a sign of life, and for a collective, until the first step, while processes connect, data is
            prepared and the model is compiled.
        check: Compare the ranks before the first step: parameters, lengths of loaders, structure of the first batch, and that batches
            arrive unchanged.
        debug: Compare operation, shapes and dtypes over the ranks before each collective: an error instead of a hang. Slow; for debugging.
        gc_every_n_steps: Run Python's garbage collector at every n-th optimizer step, on all ranks at once, and not in between; 0:
            automatically, as Python does.
        reload_best: After the training, load the weights of the best checkpoint, by the ``monitor`` of a ``ModelCheckpoint``, into the
            module.
        root_dir: Where checkpoints and logs are written. Without ``name``, the first run uses this folder, each later run a numbered folder
            in it.
        name: A name for the run, whose folder is ``root_dir/name``; a further run of this name has ``name_version_1``, and so on, beside
            it. ``"auto"``, ``"last"`` and ``"best"`` then mean the newest run of this name. If ranks have different names, rank 0's counts.

    Raises:
        ValueError, TypeError: a wrong argument; the message names it, its value and what is possible.
    """

    @with_real_defaults_in_help
    def __init__(
        self,
        *,
        strategy: str | Mapping[str, Any] | Strategy = UNSET,
        accelerator: str = UNSET,
        devices: int | str | Sequence[int] = UNSET,
        num_nodes: int = UNSET,
        precision: str | int | Mapping[str, Any] | Precision | FP8 = UNSET,
        max_epochs: int | None = UNSET,
        min_epochs: int | None = UNSET,
        max_steps: int | None = UNSET,
        min_steps: int | None = UNSET,
        max_time: str | timedelta | Duration | None = UNSET,
        max_duration: int | float | str | timedelta | Duration | None = UNSET,
        accumulate_grad_batches: int | Mapping[int, int] = UNSET,
        global_batch_size: int | str | Mapping[int | str | Duration, int | str] | None = UNSET,
        gradient_clip_val: float | None = UNSET,
        gradient_clip_algorithm: str = UNSET,
        val_every: int | float | str | timedelta | Duration | None = UNSET,
        num_sanity_val_steps: int = UNSET,
        limit_train_batches: int | float | None = UNSET,
        limit_val_batches: int | float | None = UNSET,
        limit_test_batches: int | float | None = UNSET,
        limit_predict_batches: int | float | None = UNSET,
        overfit_batches: int | float = UNSET,
        fast_dev_run: bool | int = UNSET,
        log_every_n_steps: int = UNSET,
        callbacks: Callback | Sequence[Callback] | None = UNSET,
        activation_checkpointing: str | int | None = UNSET,
        activation_offload: bool | str | int = UNSET,
        compile: bool | str | dict[str, Any] = UNSET,
        sync_batchnorm: bool = UNSET,
        deterministic: bool | str = UNSET,
        benchmark: bool | None = UNSET,
        matmul_precision: str | None = UNSET,
        detect_anomaly: bool = UNSET,
        seed: int | None = UNSET,
        on_nonfinite: str | None = UNSET,
        max_skipped_steps: int | None = UNSET,
        timeout: str | timedelta | Duration | None = UNSET,
        start_timeout: str | timedelta | Duration = UNSET,
        check: bool = UNSET,
        debug: bool = UNSET,
        gc_every_n_steps: int = UNSET,
        reload_best: bool = UNSET,
        root_dir: str | Path = UNSET,
        name: str | None = UNSET,
        **unknown: Never,
    ) -> None:
        arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__", "unknown")
        } | unknown
        failures.attach(detect(os.environ))
        self._set(resolve(arguments, os.environ))

    @classmethod
    def from_resolved(cls, resolved: Resolved, callbacks: Callback | Sequence[Callback] | None = ()) -> Fit:
        """Create a ``Fit`` from settings that :func:`engine.config.resolve.resolve` has collected (``resolved``), with these ``callbacks``.

        Raises:
            ValueError, TypeError: as for the constructor.
        """
        failures.attach(detect(os.environ))
        fit = cls.__new__(cls)
        fit._set(
            replace(resolved, settings=replace(resolved.settings, callbacks=checked_setting("callbacks", callbacks)))
        )
        return fit

    def _set(self, resolved: Resolved) -> None:
        """Set all attributes, and check the requested strategy."""
        self.settings: Settings = resolved.settings
        """The values in effect, from command line, code, environment, file and defaults."""
        self.origins: dict[str, str] = resolved.origins
        """Where each setting comes from."""
        self.sections: dict[str, Any] = resolved.sections
        """The arguments from which ``fit run`` built model, data and callbacks."""
        self.names_what_fits: bool = True
        """Whether an out-of-memory error of :meth:`run` gets a note with the command that finds settings that fit."""
        self._trained: Trained | None = None  # the folders of the latest training
        environment = detect(os.environ)
        launched = None if environment.name == "single" else environment.world_size
        # Only checked here, so that errors come before processes start: each run has a strategy object of its own, which its engine creates.
        strategies.requested(self.settings, self.origins, launched)

    @property
    def _resolved(self) -> Resolved:
        return Resolved(self.settings, self.origins, self.sections)

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0, before and after runs as well: ``if fit.is_main_process: print(...)``."""
        return detect(os.environ).rank == 0

    @with_real_defaults_in_help
    def run(
        self,
        module: TrainModule = UNSET,
        train_loader: Any = None,
        val_loaders: Any = None,
        *,
        datamodule: DataModule | None = None,
        resume: str | Path | Resume | None = None,
        **unknown: Never,
    ) -> Result:
        """Train a module::

            start or join the processes; seed; prepare_data; setup; configure_model; the checkpoint's on_load_checkpoint; configure_optimizers; resume
            on_fit_start; sanity validation; on_train_start
            epochs (engine.loop.train)
            on_train_end; on_fit_end; teardown

        Args:
            module: the module to train; afterwards it has its last weights (or the averages of a callback such as ``EMA``), with
                ``reload_best`` the best ones.
            train_loader: a ``DataLoader``, a list of batches, any iterable of batches, or a :class:`engine.CombinedLoader`. A dict or list of
                loaders is read side by side, ``CombinedLoader(loaders, "max_size_cycle")``.
            val_loaders: one loader, or a list of ``DataLoader`` objects or a dict of loaders, which are read one after the other. A list of
                batches is one loader; an empty list or dict means no validation.
            datamodule: provides the loaders that are not passed here.
            resume: continue a run, in its folder: ``"last"`` (the newest checkpoint of the newest run in ``root_dir``, or of those with
                the ``name``), ``"auto"`` (the same, if there is one), ``"best"``, a checkpoint's path or URL, a run's folder, or a
                :class:`engine.Resume` that loads only parts of the checkpoint. By default a new run starts, in a new folder.

        Returns:
            How the run ended; on every rank.

        Raises:
            ValueError, TypeError: invalid input, before the first step where possible.
            FolderInUse: the run to continue is still running.
            RankError: another rank failed.
            KeyboardInterrupt: Ctrl-C was pressed; raised after the step, once callbacks have saved and closed.
            Exception: whatever the module or a callback raised, unchanged.
        """
        if module is UNSET or unknown:
            raise call_error(Fit.run, unknown)
        data = _run_data(datamodule, "train", train_loader, validation=val_loaders)
        with (
            noting_what_finds_a_fit(self.names_what_fits),
            self._start(module, "fit", data) as run,
            in_folder(run, resume, self._trained),
            session(run),
        ):
            call_setup_hooks(run)
            self._trained = run.checkpoints.run_folder.trained()
            log_start(run)
            if run.settings.check:
                compare_models(run)  # before rank 0's parameters overwrite those of the other ranks
            set_up = TrainingSetUp(run)
            with resuming(run, resume, set_up) as resumption:
                set_up.complete()
                if resumption is not None:
                    resumption.restore()
            watch_differences(run)
            call_hooks(run, run.hooks.on_fit_start)
            sanity_check(run)
            if run.settings.check:
                compare_ranks(run)
            take_late_methods(run)
            call_epoch_hooks(run, run.hooks.on_train_start)
            with watched(run), collecting_garbage(run), run.optimizer_set.modes.training():
                train(run)
            run.over = True
            call_hooks(run, run.hooks.on_train_end)
            run.finish_checkpoints()
            call_hooks(run, run.hooks.on_fit_end)
            reload_best(run)
            best_weights = run.checkpoints.best_weights()
        return run.result(best_weights)

    @with_real_defaults_in_help
    def validate(
        self,
        module: TrainModule = UNSET,
        loaders: Any = None,
        *,
        datamodule: DataModule | None = None,
        checkpoint: str | Path | None = None,
        weights: str | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` on every batch; return one dict of metrics per loader.

        ``module``, ``loaders`` and ``datamodule``: as in :meth:`run`. ``checkpoint``: load its weights first, by default those that its score was
        measured with, and what module and data module have saved beside them; ``weights``: load instead ``"trained"``, or the weights that a callback
        has saved under a name such as ``"ema"``.
        """
        if module is UNSET or unknown:
            raise call_error(Fit.validate, unknown)
        return self._evaluate(module, loaders, datamodule, checkpoint, weights, "validate", "validation")

    @with_real_defaults_in_help
    def test(
        self,
        module: TrainModule = UNSET,
        loaders: Any = None,
        *,
        datamodule: DataModule | None = None,
        checkpoint: str | Path | None = None,
        weights: str | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` on every batch; return one dict of metrics per loader.

        ``module``, ``loaders`` and ``datamodule``: as in :meth:`run`. ``checkpoint``, ``weights``: as in :meth:`validate`.
        """
        if module is UNSET or unknown:
            raise call_error(Fit.test, unknown)
        return self._evaluate(module, loaders, datamodule, checkpoint, weights, "test", "test")

    @with_real_defaults_in_help
    def predict(
        self,
        module: TrainModule = UNSET,
        loaders: Any = None,
        *,
        datamodule: DataModule | None = None,
        checkpoint: str | Path | None = None,
        weights: str | None = None,
        return_predictions: bool = True,
        **unknown: Never,
    ) -> list[Any]:
        """Return the outputs of ``predict_step`` from all ranks, on every rank: on the CPU, one entry per batch, in the order of the data.

        With several loaders, return one such list per loader. ``module``, ``loaders`` and ``datamodule``: as in :meth:`run`. ``checkpoint``,
        ``weights``: as in :meth:`validate`. ``return_predictions=False``: keep no output in memory and return empty lists, for predictions that
        a callback such as ``PredictionWriter`` writes.
        """
        if module is UNSET or unknown:
            raise call_error(Fit.predict, unknown)
        data = _run_data(datamodule, "predict", loaders)
        with (
            _train_module(module).lent(),
            self._start(module, "predict", data) as run,
            in_folder(run, checkpoint, self._trained),
            session(run),
        ):
            call_setup_hooks(run)
            with loading_weights(run, checkpoint, weights) as loaded_weights:
                prepared = set_up_evaluation(run, "predict")
                if not prepared:
                    return []
                if loaded_weights is not None:
                    loaded_weights.load()
            with watched(run):
                results = predict(run, prepared, return_predictions)
        return results[0] if len(prepared) == 1 else results

    def _without_time(self) -> dict[str, Any]:
        """The limits of time, changed so that they are not reached: without any limit a training would end after an epoch."""
        limits = {name: getattr(self.settings, name) for name in ("max_time", "max_duration")}
        return {name: LONGEST for name, limit in limits.items() if limit is not None and limit.unit == "seconds"}

    def replay(
        self,
        module: TrainModule,
        train_loader: Any = None,
        val_loaders: Any = None,
        *,
        run: str | Path | None = None,
        step: int,
        datamodule: DataModule | None = None,
        detect_anomaly: bool = False,
    ) -> ReplayedStep:
        """Repeat one step of an earlier training and observe it; the run's files stay unchanged.

        The replay continues from the newest checkpoint before that step. If there is none, it repeats the training from the start, by its ``seed``.

        On the same number of ranks every number is the same to the last bit. On fewer ranks the step has the same samples in more micro-batches:
        its numbers differ by rounding, and where random numbers differ (dropout).

        Args:
            module, train_loader, val_loaders, datamodule: the same as in the run, as must be the settings of this ``Fit``. Loggers, progress bars
                and checkpoint callbacks are left out.
                From the start, the module must have the weights that the run's began with: create it after the same ``seed_everything``.
            run: the run's folder, or one of its checkpoints; ``None``: repeat the training from the start.
            step: the number of the step, from 1: the number of optimizer steps done once it is complete.
            detect_anomaly: let autograd find the operation whose gradient is not finite in that step, which is slow.

        Returns:
            What was observed in the step; the same on all ranks.

        Raises:
            FileNotFoundError: there is no run, or ``run`` is a checkpoint that is not from before this step.
            ValueError: the run ends before this step, the number of ranks does not divide the run's, or the start cannot be repeated: the run had no
                seed, or another one, or the module was trained already.
        """
        start = starting_point(run, step)
        start.check_seed(step, self.settings.seed)
        start.check_module(step, _train_module(module))
        replayed = ReplayedStep(step, 0, start.checkpoint, 1, start.ranks)
        watch = StepWatch(replayed, detect_anomaly=detect_anomaly)
        settings = replace(
            self.settings,
            root_dir=self.settings.root_dir / "replay",
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            min_steps=None,
            min_epochs=None,
            **self._without_time(),
            reload_best=False,
            on_nonfinite=None
            if self.settings.on_nonfinite == "raise"
            else self.settings.on_nonfinite,  # the answer names the place
        )
        all_callbacks = adapted_callbacks("callbacks", settings.callbacks)
        callbacks = affecting_steps(all_callbacks)
        left_out = [LeftOut(callback.state_key) for callback in all_callbacks if not affecting_steps([callback])]
        replaying = Fit.from_resolved(replace(self._resolved, settings=settings), [*callbacks, *left_out, watch])
        result = replaying.run(
            module, train_loader, val_loaders, datamodule=datamodule, resume=start.checkpoint or None
        )
        if not watch.seen:
            raise ValueError(
                f"replay(step={step}): the run ends at step {result.step}: {result.stop_reason}; give the settings that the run had at that step"
            )
        return replayed

    def plan(
        self,
        module: TrainModule | Callable[[], TrainModule],
        train_loader: Any = None,
        *,
        world_size: int,
        nodes: int | None = None,
        device: str | Hardware = "h100",
        network: str | None = None,
        memory_limit: int | str | None = None,
        price: float | None = None,
        storage: float | str | None = None,
        datamodule: DataModule | None = None,
    ) -> Plan:
        """Forecast memory, communication, time and cost of this training on ``world_size`` ranks; traced in this process, without data.

        The real strategy and optimizers run some steps of the training on tensors without values in a simulated job. ``module`` and this process's
        random number states stay as they are; callbacks are copied; loggers, progress bars and checkpoint callbacks are left out; the run's folder
        is a temporary one. Otherwise a plan runs your code as a run does: files that your code writes to its own paths are written, except that
        ``open`` and ``os.open`` neither truncate nor append to an existing file. Ctrl-C and SIGTERM end a plan at once.

        Args:
            module: as in :meth:`run`, or a function that creates the module; it is called where tensors have no values and take no memory.
            train_loader, datamodule: as in :meth:`run`; the first micro-batch gives the shapes.
            world_size: the number of processes of the job, with one device each.
            nodes: the number of machines; ``None``: as many as the device's usual nodes need.
            device: ``"h100"``, ``"a100-80gb"``, ... (:data:`engine.planning.device_table.DEVICES`), or memory, operations per second and bytes
                per second: ``"80GiB,1e15,3e12"``.
            network: bandwidths per device within and between nodes, ``"450GB/s,50GB/s"``; ``None``: the usual ones of the device.
            memory_limit: the memory that a rank may use, in bytes or as text such as ``"2GiB"``; ``None``: the memory of the device.
            price: the price of one device for one hour.
            storage: the bandwidth of writing checkpoints, in bytes per second or as text such as ``"5GB/s"``.

        Raises:
            RuntimeError: this process is in a job (``torch.distributed`` is initialized), or the module is in a run.
            ValueError, TypeError: as for :meth:`run`; also for data that can be read only once, and for a function whose module reads values of
                tensors while it is created.
        """
        from engine.planning import forecast  # takes a second

        return forecast.plan(
            self._resolved,
            *_planned(module, train_loader, datamodule),
            world_size=world_size,
            nodes=nodes,
            device=device,
            network=network,
            memory_limit=memory_limit,
            price=price,
            storage=storage,
        )

    def search_plans(
        self,
        module: TrainModule | Callable[[], TrainModule],
        train_loader: Any = None,
        *,
        world_size: int,
        nodes: int | None = None,
        device: str | Hardware = "h100",
        network: str | None = None,
        memory_limit: int | str | None = None,
        datamodule: DataModule | None = None,
        **options: Any,
    ) -> PlanSearch:
        """Find the strategies, mesh degrees, micro-batches, recomputation and precisions that fit, fastest first, and why the others do not.

        All candidates train the same number of samples per step: ``global_batch_size``, or what this ``Fit`` would if all ranks saw different data.

        Args:
            module, train_loader, world_size, nodes, device, network, memory_limit, datamodule: as in :meth:`plan`.
            options: ``precisions``, ``largest``, ``seconds``, ``first``, ``report``: see :func:`engine.planning.forecast.search_plans`.
        """
        from engine.planning import forecast  # as in :meth:`plan`

        return forecast.search_plans(
            self._resolved,
            *_planned(module, train_loader, datamodule),
            world_size=world_size,
            nodes=nodes,
            device=device,
            network=network,
            memory_limit=memory_limit,
            **options,
        )

    def state_dict(self, module: TrainModule, *, everywhere: bool = False) -> dict[str, Any]:
        """The full (unsharded) parameters and buffers of a trained module, by name, on the CPU; all ranks call this.

        Args:
            everywhere: return the weights on every rank; by default on the main process only, and ``{}`` on the others.

        Raises:
            ValueError: the module was sharded by another strategy than this ``Fit`` has.
            RuntimeError: a run is using the module.
        """
        module = adapt(module)
        if module.attached:
            raise RuntimeError(
                "Fit.state_dict() and gathered() are for a module after its run; in a callback, use run.engine.get_state_dict(module)"
            )
        with self._start(module, "gather", RunData()) as run:
            try:
                return run.placed.whole_state(everywhere)
            finally:
                module.attach(None)
                run.release()

    @contextmanager
    def gathered(self, module: TrainModule, *, everywhere: bool = False) -> Iterator[TrainModule]:
        """Inside the block the module has full (unsharded) parameters on the CPU, under every strategy; all ranks enter it together::

            with fit.gathered(module):
                if fit.is_main_process:
                    module.model.save_pretrained("out")

        Changes made to the parameters in the block are lost. Afterwards the module is as it was and can be used in further runs.

        Args:
            everywhere: gather on every rank; by default on the main process only, while the others keep their shards.

        Raises:
            ValueError, RuntimeError: as for :meth:`state_dict`.
        """
        adapted = adapt(module)
        with holding(adapted, self.state_dict(module, everywhere=everywhere)), saved_as_whole(adapted):
            yield module

    def _evaluate(
        self,
        module: TrainModule,
        loaders: Any,
        datamodule: DataModule | None,
        checkpoint: str | Path | None,
        weights: str | None,
        stage: str,
        name: str,
    ) -> list[dict[str, float]]:
        """Implements :meth:`validate` and :meth:`test`. ``name``: the kind of loaders, and the prefix of the step and its hooks."""
        data = _run_data(datamodule, name, loaders)
        with (
            _train_module(module).lent(),
            self._start(module, stage, data) as run,
            in_folder(run, checkpoint, self._trained),
            session(run),
        ):
            call_setup_hooks(run)
            with loading_weights(run, checkpoint, weights) as loaded_weights:
                prepared = set_up_evaluation(run, name)
                if not prepared:
                    return []
                if loaded_weights is not None:
                    loaded_weights.load()
            with watched(run):
                return evaluate(run, prepared, name, run.placed.evaluation_step(f"{name}_step"))

    @contextmanager
    def _start(self, module: TrainModule, stage: str, data: RunData) -> Iterator[Run]:
        """Join the other processes and create the run."""
        module = _train_module(module)
        if module.attached:
            raise RuntimeError(
                f"{type(module).__name__} is in a run, which another one inside it would end: give that one a copy, copy.deepcopy(module)"
            )
        settings, callbacks = self.settings, adapted_callbacks("callbacks", self.settings.callbacks)
        if any(map(is_not, callbacks, settings.callbacks)):  # some were another library's
            settings = replace(settings, callbacks=callbacks)
        environment = detect(os.environ)
        with StartLog(environment.rank == 0) as start_log, joined_group(settings, environment) as group:
            resolved = replace(self._resolved, settings=settings)
            run = new_run(resolved, module, stage, group, data, start_log=start_log)
            compare_settings(run)
            yield run


def _planned(
    module: Any, loader: Any, datamodule: DataModule | None
) -> tuple[TrainModule | Callable[[], TrainModule], Any, DataModule | None]:
    """Convert the arguments of a plan: its module or a function that creates it, its loader and its data module; one of the last two is ``None``."""
    datamodule, loader = _datamodule(datamodule, loader)
    return (
        _train_module(module) if isinstance(module, nn.Module) else lambda: _train_module(module()),
        loader,
        datamodule,
    )


def _run_data(datamodule: DataModule | None, kind: str, loaders: Any, **other_loaders: Any) -> RunData:
    """Collect the data of a run. ``loaders``: those of ``kind``, or a data module in their place; ``other_loaders``: those of other kinds."""
    datamodule, loaders = _datamodule(datamodule, loaders)
    return RunData(datamodule, {kind: loaders, **other_loaders})


def _train_module(module: Any) -> TrainModule:
    """Return the user's module, converted if it is another library's.

    Raises:
        TypeError: it is no ``TrainModule``.
    """
    module = adapt(module)
    if not isinstance(module, TrainModule):
        if isinstance(module, type) and issubclass(module, TrainModule):
            raise TypeError(
                f"Fit takes a TrainModule, got the class {module.__name__}: give an object, {module.__name__}(...)"
            )
        if isinstance(getattr(module, "_orig_mod", getattr(module, "module", None)), TrainModule):
            raise TypeError(
                f"Fit takes a TrainModule, got one wrapped by {type(module).__name__}: give the module itself; Fit(compile=True) compiles "
                "it, and strategies wrap it"
            )
        raise TypeError(
            f"Fit takes a TrainModule, got {type(module).__name__}: subclass engine.TrainModule, or keep your own loop and use engine.Engine"
        )
    return module


def _datamodule(datamodule: DataModule | None, loader: Any) -> tuple[DataModule | None, Any]:
    """Return the data module, which may have been passed as ``loader``, and the loader; convert a data module of another library.

    Raises:
        ValueError: there are two data modules.
    """
    datamodule, loader = (adapt(data) if hasattr(data, "train_dataloader") else data for data in (datamodule, loader))
    if isinstance(loader, DataModule):
        if datamodule is not None:
            raise ValueError("two data modules were given, one as the loader and one as datamodule=: give one of them")
        return loader, None
    return datamodule, loader
