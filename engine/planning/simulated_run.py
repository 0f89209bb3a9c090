"""Sets up one rank of the user's run in a simulated job, up to its first epoch: silent loggers, copied callbacks, a module and a batch without
values."""

from __future__ import annotations

import builtins
import copy
import io
import itertools
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader, IterableDataset

from engine.callback import Callback, adapted_callbacks, affecting_steps, with_callbacks_of_module
from engine.checkpoint.run_folder import RunFolder
from engine.config.resolve import Resolved
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.data.loader import BatchTransfer, PreparedLoader
from engine.distributed.agreement import Agreement
from engine.distributed.group import DeviceKind
from engine.loop.lifecycle import frame, torch_flags
from engine.loop.loaders import RunData
from engine.loop.run import Run
from engine.loop.run_checkpoints import UNKNOWN
from engine.loop.setup import call_setup_hooks, new_run
from engine.module import TrainModule
from engine.planning import imported_deepspeed, torch_private
from engine.planning.fake_tensors import Simulation, fake_module
from engine.planning.job import JobFacts
from engine.planning.missing_values import MissingValues
from engine.planning.simulated_group import CPU, simulated
from engine.planning.strategy_facts import strategy_facts
from engine.utils.seed import isolated
from engine.utils.tree import batch_size


@dataclass(frozen=True)
class SimulatedJob:
    """A job to plan: the user's run, and the ranks on which it is planned."""

    resolved: Resolved
    """The settings of the run, and where they come from."""
    module: TrainModule | Callable[[], TrainModule]
    """The user's module, or a function that creates it; the function is called where tensors have no values."""
    train_loader: Any
    datamodule: DataModule | None
    world_size: int
    nodes: int = 1
    kind: DeviceKind = CPU
    """The device of each rank."""


@dataclass(frozen=True)
class SimulatedRun:
    """One rank of a simulated job. Created by :func:`simulated_run`."""

    run: Run
    simulation: Simulation
    missing_values: MissingValues


@contextmanager
def simulated_run(job: SimulatedJob, rank: int, facts: JobFacts) -> Iterator[SimulatedRun]:
    """Yield the run of one rank of the job, with its training loader; its tensors have no values. ``facts`` receives the facts about the module.

    Raises:
        RuntimeError: this process is in a job already.
        ValueError: settings that do not fit together, as in a run.
    """
    with ExitStack() as stack:
        stack.enter_context(isolated())
        stack.enter_context(imported_deepspeed.without_earlier_groups())
        stack.enter_context(sparing_files())
        group = stack.enter_context(simulated(rank, job.world_size, job.nodes, job.kind))
        missing_values = MissingValues()
        simulation = Simulation(missing_values)
        stack.enter_context(torch_private.allowed_on_fake_tensors(simulation.fake, missing_values))
        stack.enter_context(torch_private.agreeing_stages())
        stack.enter_context(torch_private.released_outputs())
        with simulation:
            module = (
                fake_module(job.module)
                if isinstance(job.module, TrainModule)
                else _created_without_values(job.module, missing_values)
            )
        facts.from_module(module)
        folder = stack.enter_context(_temporary_folder())
        settings = planned_settings(job.resolved.settings, folder)
        callbacks = without_effects(with_callbacks_of_module(module, settings.callbacks), folder)
        data = RunData(job.datamodule, {"train": job.train_loader, "validation": []})
        run = new_run(replace(job.resolved, settings=settings), module, "fit", group, data, callbacks)
        if refusal := strategy_facts(run.engine.strategy).refusal:
            raise ValueError(refusal)
        run.checkpoints.live_in(folder, UNKNOWN)
        run.control.agreement = NoStops(group, run.control.stopwatch)
        stack.enter_context(imported_deepspeed.accepting_plans(group))
        stack.enter_context(torch_flags(settings))
        stack.enter_context(frame(run))
        call_setup_hooks(run, simulation)
        run.loaders.training()
        yield SimulatedRun(run, simulation, missing_values)


def planned_settings(settings: Settings, folder: PlannedFolder) -> Settings:
    """The settings of a planned run: with copies of the strategy and the callbacks, so that the user's stay unchanged, in the plan's folder,
    uncompiled, and without checks that read values."""
    return replace(
        settings,
        strategy=copy_or_share(settings.strategy),
        callbacks=without_effects(adapted_callbacks("callbacks", settings.callbacks), folder),
        root_dir=folder.path,
        num_nodes=1,
        devices="auto",
        accelerator="cpu",
        compile=False,
        detect_anomaly=False,
        check=False,
    )


class NoStops(Agreement):
    """Stands for the ranks' agreement, and carries no request to stop: Ctrl-C and SIGTERM end a plan at once."""

    __slots__ = ()

    def poll(self, request: int, step_s: float) -> bool:
        """Check whether the ranks have agreed to stop: they never do."""
        return False

    def agree_now(self, request: int) -> bool:
        """Check whether the ranks have agreed to stop, at an end of the run or of an epoch: they never do."""
        return False


# -- the module -------------------------------------------------------------------------------------------------------------------


class NeedsValues(ValueError):
    """A module reads values of its tensors while it is created, so it cannot be created without them. The message names the line."""


def _created_without_values(function: Callable[[], TrainModule], missing_values: MissingValues) -> TrainModule:
    """Return the module that the function creates. Reading a value is an error, because an assumed value could lead to another module."""
    try:
        module = function()
    except Exception as error:
        if not missing_values.comes_from_missing_values(error):
            raise
        line = missing_values.users_line(error)
        raise NeedsValues(f"{line}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if sentences := missing_values.sentences():
        raise NeedsValues(f"{sentences[0].partition(': the plan')[0]} while the module is made")
    return module


# -- the first batch --------------------------------------------------------------------------------------------------------------


def first_batch(loader: PreparedLoader) -> tuple[Any, int]:
    """Return a full micro-batch on the device, and the number of its samples. No generator, sampler or worker of the loader is used.

    Raises:
        ValueError: the loader gives no batch, or can be read only once.
    """
    data = loader.loader
    with isolated():
        batch = _read(data, loader)
        batch = (loader.transfer or BatchTransfer()).move(batch, loader._group.device, loader._dtype)
    return batch, batch_size(batch) or 1


def _read(data: Any, loader: PreparedLoader) -> Any:
    """The first batch of the user's data, before it is moved to the device."""
    if isinstance(data, Iterator):
        raise ValueError(
            f"the training data is a {type(data).__name__}, which can be read only once, and a plan would take its first batch: give a list of "
            "batches, a DataLoader or an object whose __iter__ starts again"
        )
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return _batch_of_dataset(data)
    source = data if hasattr(data, "__iter__") else loader
    batch = next(iter(source), None)
    if batch is None:
        raise ValueError(f"the training data ({type(data).__name__}) has no batch")
    return batch


def _batch_of_dataset(loader: DataLoader[Any]) -> Any:
    """The first samples of the loader's dataset as one batch: a plan needs their number, not their order."""
    dataset: Any = loader.dataset
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        with isolated():
            size = len(next(iter(loader.batch_sampler)))
    if size is None:
        return loader.collate_fn(dataset[0])
    try:
        indices = [index % len(dataset) for index in range(size)]
    except TypeError:
        return next(iter(loader))
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in itertools.islice(indices, size)])


# -- no effects --------------------------------------------------------------------------------------------------------------------


class PlannedFolder(RunFolder):
    """Stands for the run's folder: a temporary folder, which is created when something is written there."""

    def __init__(self, path: Path) -> None:
        self.id, self.path = path.name, path
        self.checkpoints = self.named = str(path / "checkpoints")

    @property
    def is_announced(self) -> bool:
        """Always true, so that the run does not log where its folder is: nobody looks for this one."""
        return True

    def announce(self) -> None:
        """Create the folder, because something is about to be written there."""
        self.path.mkdir(parents=True, exist_ok=True)


@contextmanager
def _temporary_folder() -> Iterator[PlannedFolder]:
    """Yield the plan's folder, and delete it after the block."""
    folder = PlannedFolder(Path(tempfile.gettempdir(), f"plan-{uuid.uuid4().hex}"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)


class AcceptsAnything:
    """Stands for the object of a logger's library, such as a ``SummaryWriter``: has every attribute and takes every call, without effect. As a path
    it is the plan's folder."""

    def __init__(self, folder: PlannedFolder) -> None:
        self.__folder = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # ``copy.deepcopy`` asks for some of them
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __fspath__(self) -> str:
        self.__folder.announce()
        return str(self.__folder.path)

    def __str__(self) -> str:
        return ""


class SilentLogger(Callback):
    """Stands for a logger: ``self.logger.experiment.add_scalar(...)`` of a module works and logs nothing."""

    is_logger = True

    def __init__(self, folder: PlannedFolder) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        if name == "_folder":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(AcceptsAnything(self._folder), name)


def without_effects(callbacks: Sequence[Callback], folder: PlannedFolder) -> tuple[Callback, ...]:
    """Copies of the callbacks that may change a step, and a silent logger in place of each logger; all others are left out."""
    step_changing = {id(callback) for callback in affecting_steps(callbacks)}
    return tuple(
        SilentLogger(folder) if callback.is_logger else copy_or_share(callback)
        for callback in callbacks
        if callback.is_logger or id(callback) in step_changing
    )


def copy_or_share(value: Any) -> Any:
    """A deep copy; attributes that cannot be copied (locks, connections) are shared."""
    try:
        return copy.deepcopy(value)
    except Exception:
        shallow = copy.copy(value)
        for name, attribute in vars(value).items():
            try:
                shallow.__dict__[name] = copy.deepcopy(attribute)
            except Exception:
                continue
        return shallow


@contextmanager
def sparing_files() -> Iterator[None]:
    """Protect the user's files inside the block: where ``open`` and ``os.open`` in this thread would truncate or append to a file that existed
    before, the code writes to the null device. New files are written, as in a run, and so is everything below the folder for temporary files."""
    thread, temporary = threading.get_ident(), os.path.realpath(tempfile.gettempdir())
    written: set[str] = set()

    def is_protected(file: Any, mode: str) -> bool:
        """Check whether the file existed before the block, and opening it with ``mode`` would change it."""
        if not set("wa+") & set(mode) or isinstance(file, int) or threading.get_ident() != thread:
            return False
        path = os.path.realpath(file)
        if path in written or Path(path).is_relative_to(temporary):
            return False
        if os.path.isfile(path):
            return True
        written.add(path)
        return False

    def protecting(real: Callable[..., Any]) -> Callable[..., Any]:
        def protected_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return real(os.devnull if is_protected(file, mode) else file, mode, *args, **kwargs)

        return protected_open

    def protected_os_open(file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        mode = "w" if flags & os.O_TRUNC else "a" if flags & os.O_APPEND else "r"
        return descriptor(os.devnull if is_protected(file, mode) else file, flags, *args, **kwargs)

    descriptor = os.open
    with ExitStack() as stack:
        for module in (builtins, io):
            stack.enter_context(patch.object(module, "open", protecting(module.open)))
        stack.enter_context(patch.object(os, "open", protected_os_open))
        yield
