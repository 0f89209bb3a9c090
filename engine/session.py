"""The frame around every run: seed, set up, and whatever happens, tell the callbacks, tear down and put things back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from engine.data.sampler import mixed
from engine.datamodule import DataModule
from engine.distributed import relaunch
from engine.errors import RankError
from engine.log import logger
from engine.prepare import deterministic
from engine.run import Run
from engine.seed import seed_everything


@contextmanager
def session(run: Run, datamodule: DataModule | None) -> Iterator[None]:
    """Set up; at the end, also after an error, tear down. Errors reach every callback and leave unchanged."""
    module = run.module
    before = deterministic(run.settings.deterministic)
    with interruptible(run):
        try:
            module.attach(run)
            _set_up(run, datamodule)
            yield
            if run.interrupted:
                raise KeyboardInterrupt
        except BaseException as error:
            cause = _cause(run, error)
            run.exception = cause
            run.engine.group.failed = True
            _report(run, cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            _tear_down(run, datamodule)
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _cause(run: Run, error: BaseException) -> BaseException:
    """What callbacks and the caller are told: the error itself, unless it only says that something else has happened."""
    if isinstance(error, KeyboardInterrupt):
        return error
    if run.interrupted:
        return KeyboardInterrupt()  # data workers get Ctrl-C too, and their end is seen first
    started = relaunch.current()
    if started is not None:
        try:
            started.check(error)
        except RankError as other:
            return other
    return error


def _set_up(run: Run, datamodule: DataModule | None) -> None:
    stage, module, seed = run.stage, run.module, run.settings.seed
    if seed is not None:
        seed_everything(seed)
    if datamodule is not None:
        if run.world_size == 1:
            datamodule.prepare_data()
        else:
            with run.engine.local_main_process_first():
                if run.engine.is_local_main_process:
                    datamodule.prepare_data()
        datamodule.setup(stage)
    run.datamodule = datamodule
    for hook in run.hooks.setup:
        hook(run, module, stage)
    if not module.built:
        with run.engine.strategy.building():
            module.configure_model()
    stream = run.engine.strategy.random_stream
    if stream and stage == "fit":
        # Ranks see different samples: with the same random numbers they would drop out the same units of each.
        seed_everything(mixed(run.engine.seed, stream) % 2**32)


def _report(run: Run, error: BaseException) -> None:
    for hook in run.hooks.on_exception:
        try:
            hook(run, run.module, error)
        except Exception:
            logger.exception("on_exception of a callback failed while %s was handled", type(error).__name__)


def _tear_down(run: Run, datamodule: DataModule | None) -> None:
    """Every step of it, whatever goes wrong in one; the first error of a run that had none is raised at the end."""
    module, failed = run.module, run.exception is not None
    steps: list[Callable[[], Any]] = [partial(hook, run, module, run.stage) for hook in run.hooks.teardown]
    if datamodule is not None:
        steps.append(partial(datamodule.teardown, run.stage))
    steps += [partial(module.attach, None), run.release]
    for step in steps:
        try:
            step()
        except Exception as error:
            if run.exception is None:
                run.exception = error
                run.engine.group.failed = True
                _report(run, error)
            else:
                logger.exception("teardown failed after %s", type(run.exception).__name__)
    if run.exception is not None and not failed:
        raise run.exception


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C ends the run after the step; a second one at once. A handler of the user's own stays in place."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if run.interrupted:
            raise KeyboardInterrupt
        run.interrupted = True
        run.stop("interrupted (Ctrl-C)")
        logger.warning("Ctrl-C: the run ends after this step; again to end it at once")

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
