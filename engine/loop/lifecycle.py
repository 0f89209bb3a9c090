"""The frame around every run: its folder, torch's flags, signals, error handling, teardown; around its steps the watchdog and garbage collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from engine import strategies
from engine.checkpoint.main_root import main_root
from engine.checkpoint.resume import Resume
from engine.checkpoint.run_folder import RunFolder, Trained
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.distributed import failures
from engine.distributed.watchdog import Watchdog, explain_mismatch
from engine.launch import script_ranks
from engine.loop.last_checks import name_step
from engine.loop.method_arguments import accepting
from engine.loop.run import Run
from engine.loop.run_checkpoints import UNKNOWN
from engine.loop.stopping import Preempted
from engine.utils import cuda
from engine.utils.errors import TERMINATED, CheckError, RankError
from engine.utils.extensions import explain_call
from engine.utils.log import logger


@contextmanager
def session(run: Run) -> Iterator[None]:
    """Run the block in :func:`frame`; Ctrl-C and SIGTERM end the run after a step, with a line that says what is saved."""
    failures.show_interrupts_no_longer(run.engine.group.environment)  # an earlier run may have let them show
    with torch_flags(run.settings), run.control.signals():
        try:
            with frame(run):
                yield
        finally:
            if isinstance(run.exception, KeyboardInterrupt):
                run.exception.args = run.exception.args or (_summary(run, "Ctrl-C"),)
            elif run.terminated and run.is_main_process:
                logger.warning("%s", _summary(run, "SIGTERM"))


@contextmanager
def frame(run: Run) -> Iterator[None]:
    """At the block's end, also after an error, tear the run down. Errors are passed to every callback and propagate.

    They propagate unchanged, except for those that only tell of another cause: the death of another rank, or Ctrl-C. After a SIGTERM callbacks get
    none.
    """
    try:
        run.module.attach(run)
        with suppress(Preempted):
            yield
        _end_early(run)
    except BaseException as error:
        if isinstance(error, SystemExit) and run.terminated:
            raise
        cause = _cause(run, error)
        if run.interrupted:
            failures.show_interrupts(run.engine.group.environment)
        _fail(run, cause)
        if cause is not error:
            raise cause from error
        raise
    finally:
        _tear_down(run)


@contextmanager
def in_folder(run: Run, checkpoint: str | Path | Resume | None, earlier: Trained | None) -> Iterator[None]:
    """Choose the run's folder, and close it after the block. ``checkpoint``, ``earlier``: see :class:`RunFolder`."""
    saving = [c for c in run.callbacks if c.is_checkpoint or c.checkpoints_in is not None]
    roots = list(dict.fromkeys(callback.checkpoints_in for callback in saving))
    best = next((callback.checkpoints_in for callback in saving if callback.finds_best), roots[0] if roots else None)
    try:
        group, root_dir, name = run.engine.group, run.settings.root_dir, run.settings.name or ""
        dirpath, earlier = main_root(group, root_dir, roots, best, checkpoint, earlier, name)
        folder = RunFolder(group, root_dir, dirpath, run.stage, checkpoint, earlier, name)
    except BaseException:
        run.release()
        raise
    run.checkpoints.live_in(folder, dirpath if roots else UNKNOWN)
    failed = True
    try:
        yield
        if run.stage == "fit" and run.control.stops_early:
            # A rank that is killed before it is here takes the others along: then the run is resumed to stop, rather than to train on.
            run.engine.group.barrier()
        failed = False
    finally:
        folder.close(failed, run.step if run.stage == "fit" and not failed else None)


def log_start(run: Run) -> None:
    """Log the processes, the strategy, the precision, the number of parameters and the run's folder."""
    if not run.is_main_process:
        return
    parameters = [p for p in run.module.parameters() if not is_lazy(p)]
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    nodes, folder = run.engine.group.environment.num_nodes, run.checkpoints.run_folder
    logger.info(
        "training with %d process%s (%s)%s, strategy %s, precision %s; %s parameters%s%s",
        run.world_size,
        "es" if run.world_size > 1 else "",
        run.device.type,
        f" on {nodes} machines" if nodes > 1 else "",
        strategies.describe(run.engine.strategy, run.settings.strategy)["name"],
        run.engine.precision.name,
        f"{count:,}",
        "" if count == trained else f", {trained:,} of them trained",
        "" if folder.is_announced else f"; run folder: {folder.path}",
    )


def _end_early(run: Run) -> None:
    """Raise the exception of Ctrl-C or SIGTERM for the caller, if one has ended the run; everything is saved and closed by then."""
    if run.stage == "fit" and run.world_size > 1 and not run.control.preempted:
        run.control.agree_now()  # the signal may have reached some ranks after the last step
    if run.interrupted:
        raise KeyboardInterrupt
    if run.terminated:
        run.engine.group.barrier()  # the other ranks would take a rank that ends first for a failed one
        raise SystemExit(TERMINATED)


def _cause(run: Run, error: BaseException) -> BaseException:
    """Return the error to report to callbacks and the caller: ``error``, or the one that caused it, such as another rank's failure."""
    if run.interrupted and not isinstance(error, KeyboardInterrupt):
        error = KeyboardInterrupt()  # data workers get Ctrl-C too, and their exit is noticed first
    if isinstance(error, FloatingPointError):
        name_step(run, error)
    if isinstance(error, Exception) and (text := run.engine.strategy.explain(error, type(run.module).__name__)):
        error = RuntimeError(text)
    ranks = script_ranks.current()
    if ranks is not None:
        try:
            ranks.fail(error)
        except RankError as rank_error:
            return rank_error
    return error


def _summary(run: Run, cause: str) -> str:
    """Describe in a line a run that Ctrl-C or SIGTERM (``cause``) has ended: where it stopped, what is saved, how to continue."""
    if run.stage not in ("fit", "sanity"):
        return f"{cause}: {run.stage} was ended"
    saved = run.checkpoints.saved
    step, name = (saved[0][0], saved[1]) if saved is not None else (0, "")
    end = f"{cause}: the training ended after step {run.step}"
    how_to_continue = 'resume="last" (fit run: --resume last) continues from it'
    if name and name not in run.checkpoints.saved_in.lost:
        path = run.checkpoints.saved_in.storage.path(name)
        saved_text = f", saved in {path}" if step == run.step else f"; saved: step {step}, {path}"
        return f"{end}{saved_text}; {how_to_continue}"
    if run.loaded_from is not None:
        return f"{end}; nothing new is saved since {run.loaded_from}; {how_to_continue}"
    saves = any(callback.runs_last for callback in run.callbacks)
    return f"{end}; nothing is saved{' yet' if saves else f': callbacks=ModelCheckpoint() saves after {cause} too'}"


def _fail(run: Run, error: BaseException) -> None:
    """Record that the run failed with ``error``, and call every ``on_exception``; errors in these are logged."""
    if isinstance(error, TypeError):
        explain_call(error)
    run.exception = error
    run.engine.group.failed = not isinstance(error, CheckError)  # all ranks raise a CheckError together
    hooks: list[Callable[[], Any]] = [partial(hook, run, run.module, error) for hook in run.hooks.on_exception]
    if run.datamodule is not None:
        hooks.append(partial(run.datamodule.on_exception, error))
    if run.world_size == 1:
        hooks.append(run.announce_checkpoints)  # callbacks may just have saved one in on_exception
    for hook in hooks:
        try:
            hook()
        except Exception:
            logger.exception(
                "%s failed while %s was handled", getattr(hook, "__name__", "on_exception"), type(error).__name__
            )


def _tear_down(run: Run) -> None:
    """Run every step of the teardown, even if one of them fails; at the end raise the first error, if the run had none before."""
    module, datamodule, failed = run.module, run.datamodule, run.exception is not None
    steps: list[Callable[[], Any]] = [partial(hook, run, module, run.stage) for hook in run.hooks.teardown]
    if datamodule is not None:
        end = accepting(datamodule.teardown, datamodule, "teardown", DataModule)
        steps += [partial(end, run.stage), partial(datamodule.attach, None)]
    steps += [partial(module.attach, None), run.release]
    for step in steps:
        try:
            step()
        except Exception as error:
            if run.exception is None:
                _fail(run, error)
            else:
                logger.exception("teardown failed after %s", type(run.exception).__name__)
    if run.exception is not None and not failed:
        raise run.exception


@contextmanager
def torch_flags(settings: Settings) -> Iterator[None]:
    """Inside the block ``deterministic``, ``benchmark``, ``matmul_precision`` and ``detect_anomaly`` apply; other flags stay as the user set them."""
    with ExitStack() as stack:
        if settings.deterministic:  # even use_deterministic_algorithms(False) would import torch's compiler
            before = torch.are_deterministic_algorithms_enabled()
            stack.callback(
                torch.use_deterministic_algorithms,
                before,
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
        # cuDNN's search for the fastest algorithm may find a different one in each run.
        search = False if settings.benchmark is None and settings.deterministic is True else settings.benchmark
        if search is not None:
            stack.callback(cuda.set_convolution_search, cuda.convolution_search())
            cuda.set_convolution_search(search)
        if settings.matmul_precision is not None:
            stack.callback(cuda.set_products, cuda.products())
            torch.set_float32_matmul_precision(settings.matmul_precision)
        if settings.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Inside the block, raise :class:`engine.HangError` if the run hangs, and in debug mode :class:`engine.MismatchError` if ranks differ."""
    settings, group = run.settings, run.engine.group
    run.control.end_set_up()
    start_timeout = timedelta(seconds=settings.start_timeout.value)
    group.limit(start_timeout)  # an earlier run may have left a shorter one
    watchdog = None
    if settings.timeout is not None:
        first_s, limit_s = start_timeout.total_seconds(), settings.timeout.value
        watchdog = Watchdog(
            group,
            lambda: run.state.batches + run.pulse,
            first_s=first_s,
            limit_s=limit_s,
            directory=run.checkpoints.run_folder.path / "hang",
            signals=run.control.early_signals,
            model=run.module,
        )
    try:
        yield
    except BaseException as error:
        explanation = (watchdog.explain(error) if watchdog is not None else None) or explain_mismatch(error, group)
        if explanation is not None and explanation is not error:
            raise explanation from error
        raise
    finally:
        if watchdog is not None:
            watchdog.stop()
        group.limit(start_timeout)  # the last checkpoint and callbacks' cleanup may take longer than a step
        run.control.first_step_done = False


@contextmanager
def collecting_garbage(run: Run) -> Iterator[None]:
    """Inside the block, switch automatic garbage collection off, for runs that collect at every ``gc_every_n_steps``-th step on all ranks at once."""
    if run.settings.gc_every_n_steps:
        run.garbage.begin(run.control.stopwatch.seconds_before)
    try:
        yield
    finally:
        run.garbage.end(run.elapsed_s)
